"""Wrong uses that would go on in silence: each is an error that names what is wrong and says the
cure, or a line in the log.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.checkpoint import CheckpointManager, RunState
from fsdp_demo.errors import PeerLost
from fsdp_demo.hosts.torch_params import TURNS

from ..support import two_layers
from ..support.heard import heard
from ..support.inside import in_ranks, in_threads
from ..support.two_layers import Net, alone, attached, equal, sgd, two

AS_IS: dict[str, Any] = {"inner_optimizers": "as_is"}
KINDS = {
    "full": preset("full"),
    "demo": preset("demo", topk=8, **AS_IS),
    "diloco": preset("diloco", period=2, **AS_IS),
    "local_sgd": preset("local_sgd", period=2, **AS_IS),
    "decoupled_momentum": preset("decoupled_momentum", period=2, **AS_IS),
    "streaming_diloco": preset("streaming_diloco", period=4, delay=1, layers=0, **AS_IS),
}
CHANGED = r"parameters were changed since attach \(a.weight, .*\)"
CURE = rf"{CHANGED}.*Load first, then attach, or attach\(state=...\)"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, logger="fsdp_demo")
    warned = logging.WARNING
    return lambda: " | ".join(r.getMessage() for r in caplog.records if r.levelno >= warned)


def step(net: Net, optimizer: Any, t: int = 0) -> None:
    two_layers.step(optimizer, net.loss(t))


# ---- weights that are loaded after attach ------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_attach_weights_loaded_later_refused(kind: str) -> None:
    """Weights that were loaded after attach are refused at the first step."""
    (net, optimizer, exchange), other = attached(KINDS[kind]), alone()
    saved = {n: t + 1 for n, t in other.state_dict().items()}
    net.load_state_dict(saved)
    for _ in range(2):
        with pytest.raises(ValueError, match=CURE):
            step(net, optimizer)
    assert exchange.step == 0 and all(torch.equal(t, saved[n]) for n, t in net.state_dict().items())
    with pytest.raises(ValueError, match=CURE):
        exchange.finish()
    exchange.detach()
    exchange = fsdp_demo.attach(optimizer, KINDS[kind], model=net)
    step(net, optimizer)
    net.load_state_dict(saved)
    if kind not in ("full", "local_sgd"):  # which keep nothing that belongs to the old values
        with pytest.raises(ValueError, match="load_state_dict was called after step 1"):
            step(net, optimizer)
        exchange.accept_parameters()
    step(net, optimizer)
    assert exchange.step == 2


# ---- a run that goes on without the exchange's state -------------------------------------------


@pytest.mark.parametrize(("kind", "lost"), [
    ("diloco", "(anchors, outer momenta)"), ("demo", "(accumulators)"), ("local_sgd", ""),
    ("full", ""),
])  # fmt: skip
def test_attach_step_without_state_logged(kind: str, lost: str, said: Any) -> None:
    """The log says what a start at a later step without a state loses."""
    net, optimizer, exchange = attached(KINDS[kind])
    step(net, optimizer)
    state = copy.deepcopy(exchange.state_dict())
    exchange.detach()
    for more in ({"state": state}, {"step": 1, "state": state}, {"step": 1, "fresh": True}):
        exchange = fsdp_demo.attach(optimizer, KINDS[kind], model=net, **more)
        assert exchange.step == 1
        exchange.detach()
    assert "without a saved state" not in said()
    fsdp_demo.attach(optimizer, KINDS[kind], model=net, step=1).detach()
    assert said().count("attach at step 1 without a saved state of the exchange") == bool(lost)
    assert lost in said() and ("load_exchange(FOLDER)" in said()) == bool(lost)


@in_threads()
def test_attach_step_without_state_names_islands(topology: Any) -> None:
    """The log names the islands that lose their steps for want of a state."""
    lines = heard()
    attached(KINDS["local_sgd"], topology, step=3)[2].detach()
    text = " | ".join(lines)
    assert "lost (parameters of all islands but " in text and "island 0" in text, text


# ---- places where it cannot work ---------------------------------------------------------------


@pytest.mark.parametrize("what", ["all of it", "a frozen part"])
def test_attach_meta_tensors_refused(what: str) -> None:
    """Tensors without values are refused."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    if what == "a frozen part":
        model[1].requires_grad_(False)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    two = fsdp_demo.Topology("islands", 0, 2, endpoint="127.0.0.1:1", run="r")  # nobody is asked
    with pytest.raises(ValueError, match=r"on the meta device.*1\.weight, 1\.bias; .*to_empty"):
        fsdp_demo.attach(optimizer, KINDS["diloco"], model=model, topology=two)


def test_guard_in_thread_logs_no_signals(said: Any) -> None:
    """`guard` in a thread logs that it gets no signals."""
    (net, optimizer, exchange), ended = attached(KINDS["diloco"]), list[int]()

    def train() -> None:
        with fsdp_demo.guard(exchange):
            step(net, optimizer)
        ended.append(exchange.step)

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()
    assert ended == [1]
    assert "guard in the thread 'trainer' does not hear SIGTERM" in said()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attach_unchanged_weights_accepted(dtype: torch.dtype) -> None:
    """Calls that leave the parameters as they are cause no error: the same values loaded again,
    outer parameters shown, flush, a first step that is skipped.
    """
    for config in KINDS.values():
        if dtype != torch.float32 and any(c.schedule.delay for c in config.channels):
            config = config.changed({"schedule.delay": 0})
        net, optimizer, exchange = attached(config, net=alone().to(dtype))
        net.load_state_dict({n: t.clone() for n, t in net.state_dict().items()})
        with exchange.outer_parameters(net):
            pass
        exchange.flush()
        exchange.skip()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert exchange.step == 2
        exchange.finish()
        exchange.detach()


@in_threads()
def test_attach_resume_with_message_in_flight(topology: Any) -> None:
    """A resumed run begins with the messages that are in flight. Its parameters are loaded before
    attach, its state by attach; flush moves them before the first step.
    """
    config = preset("diloco", period=2, **AS_IS).changed({"schedule.delay": 1})
    net, optimizer, exchange = attached(config, topology)
    two_layers.train(optimizer, net.loss, 4)
    state = exchange.state_dict()
    assert state["in_flight"]
    exchange.detach()
    for flush in (True, False):
        exchange = fsdp_demo.attach(optimizer, config, model=net, topology=topology, state=state)
        before = net.copies()
        if flush:
            exchange.flush()
            assert not equal(before, net.copies())
        step(net, optimizer, 4)
        assert exchange.step == 5
        exchange.detach()


@in_threads()
def test_attach_paused_steps_are_none(topology: Any) -> None:
    """Steps inside `paused`, before the first step of the exchange too, are accepted, do not count
    and send nothing.
    """
    for kind in ("full", "diloco"):
        net, optimizer, exchange = attached(KINDS[kind], topology)
        with exchange.paused():
            step(net, optimizer)
        assert exchange.step == exchange.metrics()["messages"] == 0
        step(net, optimizer)
        assert exchange.step == 1
        exchange.finish()


# ---- steps that would be lost ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_outer_parameters_step_refused(kind: str) -> None:
    """A step inside `outer_parameters` is refused."""
    net, optimizer, exchange = attached(KINDS[kind])
    step(net, optimizer)
    inside = r"inside outer_parameters\(\) would be lost"
    before = net.copies()
    for _ in range(2):
        with exchange.outer_parameters(net):
            net.loss(0).backward()
            with exchange.paused(), pytest.raises(RuntimeError, match=inside):
                optimizer.step()
            for wrong in (optimizer.step, exchange.skip):
                with pytest.raises(RuntimeError, match=inside):
                    wrong()
        assert exchange.step == 1 and equal(before, net.copies())
    with exchange.paused():
        optimizer.step()
    optimizer.step()
    assert exchange.step == 2


SHOWN = r"inside outer_parameters\(\).*Leave the context"


def test_outer_parameters_finish_and_save_refused(tmp_path: Any) -> None:
    """`finish` and saves inside `outer_parameters` are refused. What they write to the parameters
    would be undone; what they save would be shown ones.
    """
    topology = fsdp_demo.Topology.from_env({})
    net, optimizer, exchange = attached(preset("diloco", period=3, **AS_IS))
    state = RunState(CheckpointManager(tmp_path / "a", topology), net, optimizer)
    two_layers.train(optimizer, net.loss, 4)
    own = net.copies()
    with exchange.outer_parameters(net), exchange.outer_parameters(net):
        assert not equal(own, net.copies())
        saves = (lambda: state.save(exchange), lambda: state.save(exchange, last=True))
        for wrong in (exchange.finish, exchange.flush, exchange.state_dict, *saves):
            with pytest.raises(RuntimeError, match=SHOWN):
                wrong()
    assert equal(own, net.copies()) and not list(tmp_path.glob("a/*-4"))
    state.save(exchange)
    exchange.finish()
    with exchange.outer_parameters(net):
        exchange.finish()
        exchange.state_dict()
    # where replicas hold the result anyway nothing is undone
    net, optimizer, exchange = attached(KINDS["full"])
    step(net, optimizer)
    with exchange.outer_parameters(net):
        exchange.state_dict()
        exchange.finish()


def test_outer_parameters_loss_saves_own(run_ranks: Any, tmp_path: Any) -> None:
    """A loss inside `outer_parameters` saves the own parameters. `guard` saves when the context has
    ended, also where that stands inside it.
    """

    def run(me: Any) -> None:
        topology = fsdp_demo.Topology.from_env({})
        net, optimizer, exchange = attached(preset("diloco", period=3, **AS_IS))
        state = RunState(CheckpointManager(tmp_path / "a", topology), net, optimizer)
        two_layers.train(optimizer, net.loss, 4)
        torch.save(net.copies(), tmp_path / "own.pt")
        guarded = fsdp_demo.guard(exchange, save=lambda: state.save(exchange, last=True))
        with guarded, exchange.outer_parameters(net):
            raise PeerLost("in an evaluation")

    (outcome,) = run_ranks(run, 1, 1, check=False)
    assert outcome.status == 75, outcome.log
    net, topology = alone(), fsdp_demo.Topology.from_env({})
    state = RunState(CheckpointManager(tmp_path / "a", topology), net, sgd(net.parameters()))
    state.restore(True)
    assert state.step == 4 and equal(net.copies(), torch.load(tmp_path / "own.pt"))


# ---- what is trained ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_requires_grad_switched_refused(kind: str) -> None:
    """A `requires_grad` that was switched after attach is refused."""
    net = alone()
    net.b.bias.requires_grad_(False)
    _, optimizer, exchange = attached(KINDS[kind], net=net)
    step(net, optimizer)
    for p, name, on in ((net.b.bias, "b.bias", True), (net.a.weight, "a.weight", False)):
        p.requires_grad_(on)
        before = net.copies()
        switched = f"requires_grad of {name} was switched {'on' if on else 'off'} after attach"
        with pytest.raises(RuntimeError, match=rf"{switched}.*detach\(\) and attach again"):
            step(net, optimizer)
        assert equal(before, net.copies())
        p.requires_grad_(not on)
        step(net, optimizer)
    assert exchange.step == 3


@pytest.mark.parametrize("kind", KINDS)
def test_resized_parameter_refused(kind: str) -> None:
    """A parameter that was given more rows after attach is refused by name and shape: the new rows
    would be on no other island.
    """
    net, optimizer, _ = attached(KINDS[kind])
    step(net, optimizer)
    rows, width = net.a.weight.shape
    net.a.weight.data, net.a.weight.grad = torch.randn(rows + 2, width), None
    shapes = rf"the shape \[{rows + 2}, {width}\], at attach it had \[{rows}, {width}\]"
    with pytest.raises(RuntimeError, match=f"a.weight has {shapes}.*attach again"):
        optimizer.step()


@pytest.mark.parametrize("which", [0, 37, 99])
def test_requires_grad_checked_in_turns(which: int) -> None:
    """Each of many parameters is checked within some steps. A step at which nothing is due does not
    look at all of them.
    """
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(100)]
    optimizer = sgd(params)
    exchange = fsdp_demo.attach(optimizer, preset("diloco", period=1000, clip=None, **AS_IS))
    asked = list[int]()

    class Counted(torch.nn.Parameter):
        @property
        def requires_grad(self) -> bool:  # type: ignore[override]
            asked.append(1)
            return True

    exchange.host.check_trained(0)
    params[which].requires_grad_(False)
    with pytest.raises(RuntimeError, match=rf"requires_grad of .*{which} was switched off"):
        for _ in range(TURNS):
            optimizer.step()
    params[which].requires_grad_(True)
    steps = exchange.step
    params[5] = optimizer.param_groups[0]["params"][5] = Counted(torch.zeros(2))
    for _ in range(70):
        optimizer.step()
    assert exchange.step == steps + 70 and len(asked) < 40


def test_requires_grad_two_optimizers() -> None:
    """One of two optimizers may be switched off while the other steps. As GANs do it: what another
    optimizer steps is looked at when that one does.
    """
    config = preset("diloco", period=2, clip=None, **AS_IS)
    net, optimizers, exchange = attached(config, inner=two)
    for optimizer, resting in zip(optimizers, (net.b, net.a), strict=True):
        resting.requires_grad_(False)
        net.loss(0).backward()
        optimizer.step()
        resting.requires_grad_(True)
    assert exchange.step == 1


def test_attach_unstepped_parameters_logged(said: Any) -> None:
    """The log names trainable parameters that no attached optimizer steps."""

    def of_a(net: Net) -> torch.optim.Optimizer:
        return sgd(net.a.parameters())

    net, _, exchange = attached("full", inner=of_a)
    lacking = "2 trainable parameters of the model are in no attached optimizer, and so not "
    assert f"{lacking}exchanged: b.weight, b.bias" in said()
    exchange.detach()
    net.b.requires_grad_(False)
    caught = said()
    attached("full", inner=of_a, net=net)[2].detach()
    assert said() == caught


def test_attach_foreign_optimizer_refused() -> None:
    """An optimizer of another model and one without trainable parameters are refused."""
    other = alone()
    with pytest.raises(ValueError, match="holds no parameter of this model"):
        attached("full", inner=lambda net: sgd(other.named_parameters()))
    with pytest.raises(ValueError, match="nothing to train"):
        attached("full", net=other.requires_grad_(False))


# ---- numbers that cannot be exchanged ----------------------------------------------------------


def test_attach_dtypes_refused(said: Any) -> None:
    """Parameters in complex64 or float64 are refused by name; bf16 is logged."""
    for dtype in (torch.complex64, torch.float64):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=dtype))
        named = rf"cannot be exchanged: 1.weight \({str(dtype)[6:]}\), 1.bias .*dtype=torch.float32"
        with pytest.raises(ValueError, match=named):
            attached("diloco", net=model, clip=None, **AS_IS)
        model[1].requires_grad_(False)
        attached("diloco", net=model, **AS_IS)[2].detach()
    assert "not fp32" not in said()
    attached("full", net=alone().bfloat16())[2].detach()
    assert "4 parameters not in fp32 (" in said()


def test_sparse_gradients_refused() -> None:
    """Sparse gradients are refused where an exchange or a clip reads them."""
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    for config in (preset("full"), preset("full", clip=None), preset("diloco", **AS_IS)):
        _, optimizer, exchange = attached(config, net=model)
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ValueError, match=r"sparse gradients: 0.weight;.*sparse=False"):
            optimizer.step()
        exchange.detach()
    optimizer = torch.optim.SparseAdam([model[0].weight])
    with pytest.raises(ValueError, match="SparseAdam takes sparse gradients"):
        fsdp_demo.attach(optimizer, "full")
    # reads no gradient: works
    exchange = fsdp_demo.attach(optimizer, preset("diloco", period=1, clip=None, **AS_IS))
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    exchange.finish()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["full", "diloco"])
def test_grad_scaler_refused(fused: bool, kind: str) -> None:
    """A step of an active GradScaler is refused."""
    net, optimizer, exchange = attached(
        KINDS[kind], inner=lambda net: torch.optim.AdamW(net.parameters(), fused=fused)
    )
    scaler = torch.amp.GradScaler("cpu")
    before = net.copies()
    for unscale in (False, True):
        scaler.scale(net.loss(0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        with pytest.raises(ValueError, match="a GradScaler .fp16. steps this optimizer.*use bf16"):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        optimizer.__dict__.pop("found_inf", None), optimizer.__dict__.pop("grad_scale", None)
    assert exchange.step == 0 and equal(before, net.copies())
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(net.loss(0)).backward()
    off.step(optimizer)
    assert exchange.step == 1


def test_grad_scaler_of_accelerate_refused() -> None:
    """An active GradScaler of Accelerate is refused at attach."""
    optimizer_of = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    net = alone()
    for enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        wrapped = optimizer_of(sgd(net.parameters()), scaler=scaler)
        refused = pytest.raises(ValueError, match="use bf16") if enabled else nullcontext()
        with refused:
            fsdp_demo.attach(wrapped, "full", model=net).detach()


# ---- FSDP2 -------------------------------------------------------------------------------------


@in_ranks()
def test_attach_checks_under_fsdp2(me: Any) -> None:
    """The checks at attach hold under FSDP2. An evaluation before attach leaves the root unsharded;
    FSDP2 starts lazily; weights changed on one rank are refused by all.
    """
    from torch.distributed.fsdp import fully_shard

    for late in (False, True):
        net = Net(fsdp_demo.Topology(island=me.island))
        net.b.bias.requires_grad_(False)
        fully_shard(net, mesh=me.mesh())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        with torch.no_grad():
            net(torch.ones(2, 66))  # leaves the root unsharded
        os.environ["ISLAND_RUN"] += "+"
        exchange = fsdp_demo.attach(optimizer, KINDS["diloco"], model=net)
        names = [s.name for s in exchange.host.params]
        assert names == ["a.weight", "a.bias", "b.weight", "b.bias"]
        assert exchange.host.states() == ["momentum_buffer"] and not exchange.host.outside(net)
        held = [m for m in exchange.host.tensors("state:momentum_buffer") if m is not None]
        assert all(torch.signbit(m).all() for m in held)
        if late and me.proc == 0:
            net.a.bias.to_local().data.add_(1.0)
        net(torch.ones(2, 66)).sum().backward()
        if late:
            words = "changed since attach .a.bias." if me.proc == 0 else "those of another rank"
            with pytest.raises(ValueError, match=words):
                optimizer.step()
            exchange.detach()
            continue
        optimizer.step()
        net.a.bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match="requires_grad of a.bias was switched off"):
            optimizer.step()
        net.a.bias.requires_grad_(True)
        optimizer.step()
        assert exchange.step == 2
        exchange.finish()


def test_dcp_state_of_exchange_refused(tmp_path: Path) -> None:
    """An exchange among the states of `torch.distributed.checkpoint` is refused. torch would keep
    one rank's state for all, and say so only at the resume.
    """
    from torch.distributed import checkpoint

    model = torch.nn.Linear(2, 2)
    exchange = fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco", model=model)
    with pytest.raises(Exception, match="save_exchange.FOLDER, exchange. on every rank"):
        checkpoint.save({"exchange": exchange}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert exchange.state_dict()["step"] == 0  # anybody else may ask
    exchange.detach()
