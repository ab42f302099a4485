"""`Exchange.reset`: parameters that the script has written in mid-run are the new state of all
islands, and the rest of the model goes on as if nothing had happened.
"""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import Mismatch, PeerLost, base_optimizer, preset
from fsdp_demo.elastic import agreement, join_server
from fsdp_demo.elastic.newcomer import Following
from fsdp_demo.elastic.notes import Note, Ready, Sign
from fsdp_demo.exchange import finish
from fsdp_demo.peers.header import PAYLOAD, RESET, Header
from fsdp_demo.peers.join_messages import Expected, MessageHead, to_bytes

from ..support import joining, probe, threaded
from ..support.heard import heard
from ..support.inside import in_ranks, in_threads
from ..support.two_layers import train


def drawn(island: int, k: int, shape: Any) -> torch.Tensor:
    """What an island writes to the k-th of the parameters."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + 10 * island + k))


AT = 7
"""Steps before the reset: inside a round of most cases, with messages under way where they are
late."""


class Net(nn.Module):
    """Layers whose matrices are cut into blocks, a vector, and a frozen matrix."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(70, 70, dtype=dtype) for _ in range(3))
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=g) / 8)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    @property
    def chosen(self) -> list[nn.Parameter]:
        return [self.layers[1].weight, self.layers[2].bias]


class Run:
    """One island; its gradients depend on island and step alone."""

    def __init__(self, topology: Any, config: Any, dtype: torch.dtype = torch.float32):
        self.model, self.island = Net(dtype), topology.island
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = base_optimizer(config, named, lr=config.lr or 0.01)
        self.exchange = fsdp_demo.attach(
            self.optimizer, config, model=self.model, topology=topology, must_match={"steps": 100}
        )

    def train(self, stop: int) -> None:
        while self.exchange.step < stop:
            for k, p in enumerate(q for q in self.model.parameters() if q.requires_grad):
                key = 1000 * self.exchange.step + 10 * self.island + k
                g = torch.Generator().manual_seed(key)
                p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
            self.exchange.report(tokens=5)
            self.optimizer.step()

    def write(self) -> list[torch.Tensor]:
        """Other values on each island; gives them."""
        with torch.no_grad():
            for k, p in enumerate(self.model.chosen):
                p.copy_(drawn(self.island, k, p.shape))
        return [p.detach().clone() for p in self.model.chosen]

    def still(self, steps: int) -> None:
        """Steps at rate zero."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.train(self.exchange.step + steps)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """By name of a parameter, what the exchange holds of it: values, and what channels keep."""
        host, out = self.exchange._runtime.host, {}
        for s, t in zip(host.params, host.tensors("parameter"), strict=True):
            out[s.name] = {"parameter": t.clone()}
        for c in self.exchange._runtime.channels:
            for kind, work in c.state().workspaces.items():
                there = [torch.zeros(host.params[i].shape) for i in c.covered]
                c.layout.unpack(work, there)
                for i, t in zip(c.covered, there, strict=True):
                    out[host.params[i].name][f"{c.channel.name}.{kind}"] = t
        return out


LATE = {"schedule.delay": 2}
CASES = {
    "full": preset("full"),
    "full-late": preset("full", **LATE),
    "demo": preset("demo"),
    "demo-late": preset("demo", **LATE),
    "demo-2": preset("demo", version=2),
    "random": preset("random"),
    "stride": preset("stride", inner_optimizer="adamw"),
    "local_sgd": preset("local_sgd", period=4),
    "local_sgd-late": preset("local_sgd", period=3, **LATE, **{"applier.mix": 0.25}),
    "local_adam": preset("local_adam", period=3),
    "desloc": preset("desloc", period=2, **{"exp_avg.schedule.delay": 1}),
    "diloco": preset("diloco", period=3),
    "diloco-int8": preset("diloco", period=3, value_dtype="int8"),
    "diloco-keeps": preset("diloco", period=3, **LATE, **{"applier.keep_steps": True}),
    "diloco-queue": preset("diloco", period=2, **{"schedule.delay": 5}),
    "streaming_diloco": preset("streaming_diloco", period=4, layers=1, delay=2),
    "decoupled_momentum": preset("decoupled_momentum", period=2),
    "released": preset("decoupled_momentum", rule="released", period=2, average_every=2),
    "sparse_loco": preset("sparse_loco", period=2),
    "sign_loco": preset("sign_loco", beta=0.6, period=2, momentum_warmup=3),
    "muloco": preset("muloco", period=3),
    "muloco-queue": preset("muloco", period=2, value_dtype="int4", **{"schedule.delay": 3}),
}


def reset_against_flush(config: Any, dtype: torch.dtype = torch.float32) -> None:
    """Two islands reset, two flush at the same step; compares all that the exchange holds."""

    def island(i: int, topology: Any) -> Any:
        run = Run(topology, config, dtype)
        run.train(AT)
        run.exchange.flush()
        flushed = run.state()
        run.exchange.detach()
        return flushed

    def resets(i: int, topology: Any) -> Any:
        run = Run(topology, config, dtype)
        run.train(AT)
        written = run.write()
        run.exchange.reset(iter(run.model.chosen))
        after = run.state()
        run.still(6)
        still = run.state()
        run.train(AT + 12)
        run.exchange.finish()
        equal = run.exchange.digests_equal()
        return written, after, still, equal

    flushed = threaded.values(threaded.islands(island))
    found = threaded.values(threaded.islands(resets))
    names = {"layers.1.weight": 0, "layers.2.bias": 1}
    for (_, after, still, equal), before in zip(found, flushed, strict=True):
        assert equal is not False
        for name, held in after.items():
            if name not in names:
                assert joining.same(held, before[name]), name
                continue
            mean = sum(written[names[name]].float() for written, *_ in found) / 2
            assert torch.equal(held["parameter"], mean.to(dtype)), name
            for what, value in held.items():
                if what.endswith((".anchor", ".written")):
                    assert torch.equal(value, mean.to(dtype).float()), (name, what)
                elif what != "parameter":
                    assert not value.any(), (name, what)
            # a format without a zero rounds zeros to something where others share their group
            if not config.preset.startswith("muloco"):
                assert torch.equal(still[name]["parameter"], held["parameter"]), name


@pytest.mark.parametrize("case", [*CASES, "diloco, bf16", "full-late, bf16"])
@in_ranks(1, 1)
def test_reset_presets(case: str) -> None:
    """The values become the mean (in bf16 the rounded one, and so does the anchor), what channels
    keep of them begins anew, and other parameters stand as after `flush`; a round at rate 0 changes
    nothing."""
    name, _, low = case.partition(", ")
    reset_against_flush(CASES[name], torch.bfloat16 if low else torch.float32)


@in_threads()
def test_reset_names(island: int, topology: Any) -> None:
    """Names of parameters do as well as the parameters, and one needs no list."""
    run = Run(topology, CASES["diloco"])
    run.train(AT)
    written = run.write()
    run.exchange.reset("layers.1.weight")
    run.exchange.reset(["layers.2.bias", run.model.layers[2].bias])
    means = run.exchange.across_islands.mean([float(t[0].sum()) for t in written])
    got = [float(p[0].sum()) for p in run.model.chosen]
    assert got == pytest.approx(means, rel=1e-5)
    run.exchange.detach()


class Lora(nn.Module):
    """An adapter of rank 2 on a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.W = nn.Parameter(torch.randn(8, 8, generator=g) / 3, requires_grad=False)
        self.A = nn.Parameter(torch.randn(2, 8, generator=g) / 3)
        self.B = nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.W + self.B @ self.A).T


@pytest.mark.parametrize("config", [
    preset("diloco", period=4),
    preset("streaming_diloco", period=4, layers=0, delay=2),
    preset("full", **{"schedule.delay": 1}),
], ids=["diloco", "streaming_diloco", "full-late"])  # fmt: skip
@in_ranks(1, 1)
def test_reset_relora(config: Any) -> None:
    """ReLoRA: the product goes into the frozen matrix, A is drawn anew, B is 0 and stays 0 in a
    round at rate 0; nothing is warned of, and the islands end equal."""

    def island(i: int, topology: Any) -> tuple[float, list[torch.Tensor]]:
        model = Lora()
        optimizer = torch.optim.AdamW([model.A, model.B], lr=1e-2, weight_decay=0.0)
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology)

        def loss(t: int) -> torch.Tensor:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * t + i))
            return (model(x) - x.flip(1)).square().mean()

        train(optimizer, loss, 16)
        exchange.reset([model.A, model.B])  # equal on all islands, so their product is, too
        with torch.no_grad():
            model.W += model.B @ model.A
            model.A.copy_(torch.randn(2, 8, generator=torch.Generator().manual_seed(7)) / 3)
            model.B.zero_()
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        exchange.reset([model.A, model.B])
        rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
        train(optimizer, loss, 16, 20)
        left = float(model.B.detach().abs().max())
        optimizer.param_groups[0]["lr"] = rate
        train(optimizer, loss, 20, 28)
        exchange.finish()
        assert exchange.digests_equal()
        return left, [p.detach().clone() for p in model.parameters()]

    said = heard()
    (one, here), (two, there) = threaded.values(threaded.islands(island))
    assert one == two == 0.0 and joining.same(here, there)
    assert not any("written" in text for text in said), said


@in_ranks(1, 1)
def test_reset_single_replica() -> None:
    """Alone nothing is sent; the channels' state of these tensors begins anew."""
    for case in ("diloco", "demo", "sparse_loco"):
        run = Run(fsdp_demo.Topology.from_env(), CASES[case])
        run.train(AT)
        written = run.write()
        run.exchange.reset(run.model.chosen)
        assert joining.same(written, [p.detach() for p in run.model.chosen])
        held = run.state()["layers.1.weight"]
        kept = [v for k, v in held.items() if not k.endswith(("anchor", "parameter"))]
        assert kept and not any(v.any() for v in kept)
        run.train(AT + 5)
        run.exchange.finish()
        assert run.exchange.metrics()["bytes_sent"] == 0


@in_threads()
def test_reset_refused(island: int, topology: Any) -> None:
    """What is no whole trained parameter, other names and another step are a ValueError on all
    islands; nothing is changed, and a right call follows."""
    run = Run(topology, preset("diloco", period=20))
    run.train(3)
    run.write()
    model, before, reset = run.model, run.state(), run.exchange.reset
    one, two = model.layers[0].weight, model.layers[1].weight
    for wrong, *said in (
        ([one[0]] if island else [one], "island1", "a Tensor [70]"),  # on one island alone
        ([model.frozen, one], "a Parameter [3]:"),
        ([torch.ones(2)], "a Tensor [2]:"),
        (["nothing"], "got 'nothing':"),
        ([], "got no parameter:"),
        ([one, two] if island else [one], "layers.1.weight", "island 1"),
    ):
        with pytest.raises(ValueError) as caught:
            reset(wrong)
        assert all(part in str(caught.value) for part in said), (said, str(caught.value))
    with pytest.raises(RuntimeError, match="outer_parameters"):
        with run.exchange.outer_parameters(model):
            reset([one])
    run.train(4 if island else 3)
    with pytest.raises(ValueError, match="step 3.*step 4|step 4.*step 3"):
        reset([one])
    if not island:
        assert joining.same(run.state(), before)
    run.train(4)
    reset([one, two])
    run.exchange.finish()
    with pytest.raises(RuntimeError, match="finished"):
        reset([one])


@in_threads()
def test_reset_beside_other_call(island: int, topology: Any) -> None:
    """Where the other island steps on instead, both hear what the other does."""
    run = Run(topology, preset("demo"))
    run.train(3)
    with pytest.raises(Mismatch, match="is at step 4" if island else "is at step 3"):
        run.exchange.reset(run.model.chosen) if island else run.train(5)
    run.exchange.detach()


@pytest.mark.parametrize("case", ["streaming_diloco", "demo-late"])
@in_threads()
def test_reset_resume(island: int, topology: Any, case: str) -> None:
    """A run that is saved behind a reset and resumed ends as one that was not; its history is
    another than before the reset."""
    run = Run(topology, CASES[case])
    run.train(AT)
    before = run.exchange.state_dict()["history"]["digest"]
    run.write()
    run.exchange.reset(run.model.chosen)
    run.train(AT + 1)
    state = [run.model.state_dict(), run.optimizer.state_dict(), run.exchange.state_dict()]
    model, inner, held = copy.deepcopy(state)
    assert held["history"]["digest"] != before
    run.train(AT + 9)
    values = [p.detach().clone() for p in run.model.parameters()]
    run.train(AT + 10)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(inner)
    run.exchange.load_state_dict(held)
    run.train(AT + 9)
    assert joining.same(values, [p.detach() for p in run.model.parameters()])
    run.exchange.finish()


def loop(model: Net, optimizer: torch.optim.Optimizer, exchange: Any, stop: int) -> None:
    """Steps on data of the island; the ranks of an island have equal rows."""
    island = exchange.topology.island

    def loss(t: int) -> torch.Tensor:
        x = torch.randn(4, 70, generator=torch.Generator().manual_seed(1000 * t + island))
        for layer in model.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    train(optimizer, loss, exchange.step, stop)


@pytest.mark.parametrize("form", ["fsdp2", "copies"])
def test_reset_shards_and_copies(run_ranks: Any, form: str) -> None:
    """Under FSDP2, and where ranks hold copies and share the work, the whole tensor is the mean of
    the islands' whole tensors, and what the script reads is that."""

    def run(me: Any) -> list[list[torch.Tensor]]:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import distribute_tensor

        out = []
        for case in ("streaming_diloco", "demo", "sparse_loco"):
            os.environ["ISLAND_RUN"] += "+"
            model, config = Net(), CASES[case]
            if form == "fsdp2":
                for layer in model.layers:
                    fully_shard(layer, mesh=me.mesh())
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            optimizer = base_optimizer(config, named, lr=0.01)
            exchange = fsdp_demo.attach(optimizer, config, model=model)

            loop(model, optimizer, exchange, AT)
            chosen = model.chosen
            written = [drawn(me.island, k, p.shape) for k, p in enumerate(chosen)]
            for value, p in zip(written, chosen, strict=True):
                if form == "fsdp2":
                    value = distribute_tensor(value, p.device_mesh, p.placements)
                with torch.no_grad():
                    p.copy_(value)
            exchange.reset(chosen)
            whole = list(probe.whole(nn.ParameterList(chosen)).values())
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            loop(model, optimizer, exchange, AT + 5)
            assert joining.same(list(probe.whole(nn.ParameterList(chosen)).values()), whole), case
            exchange.finish()
            assert exchange.digests_equal()
            out += [written, whole]
        return out

    found = run_ranks(run, 2, 2, timeout=120)
    for k in range(0, len(found[0]), 2):
        means = [(a + b) / 2 for a, b in zip(found[0][k], found[2][k], strict=True)]
        assert all(joining.same(rank[k + 1], means) for rank in found)


def _later(note: Note) -> Note:
    """What a joining island says, but that it is ready."""
    return Sign() if isinstance(note, Ready) else note


def joined_run(me: Any, case: str) -> Any:
    """Two islands train and reset in the moment in which the third one has been sent a snapshot.
    All reset once more when it has joined, for most cases before it takes part in messages. Beside
    a reset the script moves a frozen matrix."""
    begun, attached = me.folder / "begun", me.folder / "attached"
    while me.island == 2 and not begun.exists():
        time.sleep(0.02)
    model, config, resets = Net(), JOINED[case], [0, 0]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = base_optimizer(config, named, lr=config.lr or 0.01)
    exchange = fsdp_demo.attach(optimizer, config, model=model, must_match={"steps": 200})
    came, end, read = exchange.step, 10**9, join_server.read_note
    if me.island == 0:  # no join is planned before the reset
        patch = pytest.MonkeyPatch()
        patch.setattr(
            join_server, "read_note", lambda note: read(note) if resets[0] else _later(read(note))
        )
    while exchange.step < end:
        loop(model, optimizer, exchange, exchange.step + 1)
        if me.island == 0 and exchange.step == 4:
            begun.touch()
        feed, size = exchange._runtime.donor_feed, len(exchange.peers.slots)
        now = [not resets[0] and feed is not None and feed.feeding, attached.exists()]
        said = exchange.across_islands.largest([*map(float, now), float(size)])
        for k, p in enumerate(model.chosen):
            if said[k] and not resets[k]:
                with torch.no_grad():
                    model.frozen += 1.0
                    p.zero_()
                    for state in optimizer.state.values():
                        for value in state.values():
                            value.zero_() if isinstance(value, torch.Tensor) else None
                exchange.reset(p)
                resets[k] += 1
                assert not p.any()
        if me.island == 2:
            attached.touch()
        if said[2] == 3 and end == 10**9:
            end = exchange.step + 9
    exchange.finish()
    values = [p.detach().clone() for p in model.parameters()]
    return came, resets, exchange.digests_equal(), values


JOINED = {
    "diloco": preset("diloco", period=40),
    "full": CASES["full"],
    "streaming_diloco": preset("streaming_diloco", period=40, layers=1, delay=2),
}


@pytest.mark.parametrize("case", JOINED)
def test_reset_while_island_joins(run_ranks: Any, case: str) -> None:
    """An island that has a snapshot of before a reset starts over from a new one, with all that the
    script has done beside the reset; one that has joined takes part in the call."""
    env = {"ISLAND_MIN": "2", "ISLAND_COUNT": "2", "ISLAND_SLOTS": "3"}
    found = run_ranks(joined_run, 3, 1, timeout=120, env=env, args=(case,), check=False)
    assert not any(f.error for f in found), [f.error for f in found]
    assert "a new snapshot is asked for" in found[2].log, found[2].log
    one, two, three = (f.value for f in found)
    assert one[1] == two[1] == [1, 1] and three[1] == [0, 1] and three[0] > 4
    assert float(three[3][0][0]) == 3.0  # the frozen matrix
    for f in (one, two, three):
        assert f[2] and joining.same(f[3], one[3])


def test_reset_missed_by_newcomer() -> None:
    """A newcomer that has not called `reset` where the others did comes upon their message, and
    has to begin again; one that calls it takes the message."""
    following = Following.__new__(Following)
    following._caught_up = 8
    head = MessageHead([Header(0, 8, kind=RESET)], [0], [4], [], False)
    assert not following._skips(to_bytes(head), Expected(RESET, 8, 4))
    for other in (Expected(PAYLOAD, 8, 4), Expected(RESET, 9, 4)):
        following.outdated = False
        with pytest.raises(PeerLost, match="have reset parameters"):
            following._skips(to_bytes(head), other)
        assert following.outdated


def dies(me: Any, case: str, moment: str) -> Any:
    """Three islands; the last one is killed inside the reset, in a process of its own."""
    if me.island == 2 and (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        run = Run(fsdp_demo.Topology.from_env(), CASES[case])
        run.train(AT)
        run.write()
        if me.island == 2:
            patch = pytest.MonkeyPatch()
            if moment == "after":
                patch.setattr(finish, "mean_parameters", lambda *args: os._exit(9))
            else:
                patch.setattr(agreement, "gather_json", lambda *args: os._exit(9))
        run.exchange.reset(run.model.chosen)
        values = [p.detach().clone() for p in run.model.chosen]
        run.train(AT + 6)
        run.exchange.finish()
        return values, run.exchange.digests_equal()
    finally:
        if me.island == 2:
            os._exit(1)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_reset_island_lost(run_ranks: Any, moment: str) -> None:
    """An island that is killed inside a reset, before or after it has told its names, leaves the
    others with the mean of their own values."""
    found = run_ranks(dies, 3, 1, env={"ISLAND_DEAD": "4"}, args=("streaming_diloco", moment))
    assert found[2] == 9
    shapes = [(70, 70), (70,)]
    expected = [sum(drawn(i, k, s) for i in range(2)) / 2 for k, s in enumerate(shapes)]
    for values, equal in found[:2]:
        assert equal and joining.same(values, expected)
