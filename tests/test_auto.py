"""`auto`: a run whose method is chosen after its first steps is the run that begins there with that
method.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import fsdp_demo
from fsdp_demo import ExchangeConfig, Link, automatic, preset
from fsdp_demo.automatic import earlier_choice, first_steps, measuring
from fsdp_demo.automatic.measuring import chosen as chosen_in
from fsdp_demo.automatic.measuring import coarse
from fsdp_demo.checkpoint.exchange_state import describe_part
from fsdp_demo.config.auto import MEASURED, AutoChoice, AutoConfig, undecided
from fsdp_demo.errors import StoreSilent
from fsdp_demo.exchange import run_specification, runtime
from fsdp_demo.exchange.ledger import ExchangeRecord
from fsdp_demo.hosts.optimizers import keeps_momentum
from fsdp_demo.peers.votes import Ranks
from fsdp_demo.store.client import WorldStore
from fsdp_demo.tools.planner import Situation

from .support.heard import heard
from .support.inside import in_ranks
from .support.refused import refusal

STEPS = 24
ALONE = Ranks(None, 0, 1)


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "qhadamw":
        return fsdp_demo.QHAdamW(model.parameters(), lr=1e-3)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, island: int, steps: range) -> None:
    for t in steps:
        generator = torch.Generator().manual_seed(1000 * t + island)
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [
        p.to_local().clone() if hasattr(p, "to_local") else p.detach().clone()
        for p in model.parameters()
    ]


def sharded(model: nn.Module, procs: int) -> nn.Module:
    if procs > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (procs,)))
    return model


def start(
    kind: str = "adamw", config: Any = "auto", procs: int = 1, **how: Any
) -> tuple[nn.Module, torch.optim.Optimizer, fsdp_demo.Exchange]:
    """A model, its optimizer, and their exchange."""
    model = sharded(model_of(), procs)
    optimizer = optimizer_of(kind, model)
    return model, optimizer, fsdp_demo.attach(optimizer, config, model=model, **how)


def a_link(rate: float) -> None:
    """From now on islands of this process find a link of this rate."""
    first_steps.__dict__["quick_probe"] = lambda peers, island: (
        None if peers is None else Link(rate, 0.02)
    )


@pytest.mark.parametrize(
    ("kind", "rate", "procs"), [("adamw", 1e5, 1), ("adamw", 1e5, 2), ("sgd", 1e10, 1)]
)
def test_auto_is_the_run_that_begins_at_the_choice(
    kind: str, rate: float, procs: int, run_ranks: Any
) -> None:
    """A run under `auto` is the run that begins at the choice with the chosen method, bit for
    bit.
    """

    def run(me: Any) -> tuple[str, bool]:
        a_link(rate)
        model, optimizer, exchange = start(kind, procs=procs)
        train(model, optimizer, me.island, range(MEASURED - 1))
        fresh = weights(sharded(model_of(), procs))
        assert undecided(exchange.config)
        assert all(map(torch.equal, weights(model), fresh))  # nothing has moved
        train(model, optimizer, me.island, range(MEASURED - 1, STEPS))
        chosen = exchange.config
        assert not undecided(chosen) and exchange.chosen_because and exchange.step == STEPS
        exchange.finish()

        twin, twins, plain = start(kind, chosen, procs, step=MEASURED)
        train(twin, twins, me.island, range(MEASURED, STEPS))
        plain.finish()
        same = all(map(torch.equal, weights(model), weights(twin)))
        return json.dumps(chosen.to_dict()), same

    found = run_ranks(run, 2, procs)
    assert len({chosen for chosen, _ in found}) == 1
    assert all(same for _, same in found)
    config = json.loads(found[0][0])
    name = config["preset"]
    assert config["clip"] == preset(name).clip
    of_gradients, of_deltas = ("full", "demo", "random"), ("full", "sign_loco", "diloco", *SPARSE)
    assert name in (of_gradients if kind == "sgd" else of_deltas)


SPARSE = ("sparse_loco", "decoupled_momentum", "streaming_diloco")


@in_ranks(2, 1)
def test_auto_choice_keeps_what_is_known_of_islands(me: Any) -> None:
    """On unlike machines sums that differ are logged; they end no run, under whatever method `auto`
    chooses.
    """
    a_link(1e10)
    runtime.EVERY, said = 1, heard(logging.INFO)
    run_specification.machine = lambda device: dict(
        torch="2", device="cpu", processor=f"{me.island}"
    )
    model, optimizer, exchange = start("sgd")
    exchange.rows_compared()
    train(model, optimizer, me.island, range(MEASURED))
    watch = exchange._queue.watch
    assert watch.unlike and not watch.compares
    with torch.no_grad():
        next(model.parameters()).view(-1)[7] += 1e-6 * me.island
    train(model, optimizer, me.island, range(MEASURED, STEPS))
    exchange.finish()
    assert exchange.step == STEPS and any("no longer equal" in text for text in said)


@in_ranks(2, 1)
def test_auto_resume_takes_what_was_chosen(me: Any) -> None:
    """A run that resumes takes what was chosen."""
    a_link(1e5)
    model, optimizer, exchange = start(must_match={"steps": STEPS})
    early = None
    for t in range(STEPS):
        train(model, optimizer, me.island, range(t, t + 1))
        if t == 4:
            early = exchange.state_dict()
    state, chosen, why = exchange.state_dict(), exchange.config, exchange.auto_choice
    assert why is not None and (why.steps, why.link) == (STEPS, "100kbit,20ms")
    assert f"for {STEPS} steps: " in why.reason
    kept = describe_part(exchange)["auto_choice"]
    assert kept == state["auto_choice"] == dataclasses.asdict(why)
    exchange.detach()

    again = fsdp_demo.attach(optimizer, "auto", model=model, state=state)
    assert again.config == chosen and again.auto_choice == why
    watches, after = exchange._phases.at_end, again._phases.at_end
    assert isinstance(after, first_steps.LinkHealth) and after.planned == watches.planned
    again.detach()

    before = fsdp_demo.attach(optimizer, "auto", model=model, state=early)
    assert undecided(before.config)
    train(model, optimizer, me.island, range(5, MEASURED))
    assert not undecided(before.config) and before.step == MEASURED
    before.detach()


def test_auto_resume_without_own_state(run_ranks: Any) -> None:
    """All islands have ended, and one has lost its disk: it takes over from the other, also its
    method.
    """

    def run(me: Any) -> list[torch.Tensor]:
        a_link(1e5)
        model, optimizer, exchange = start()
        train(model, optimizer, me.island, range(STEPS))
        exchange.finish()
        state, chosen, why = exchange.state_dict(), exchange.config, exchange.auto_choice
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        exchange.detach()
        os.environ["ISLAND_RUN"] += "-again"
        model, held = model_of(), {}
        if me.island == 1:
            model.load_state_dict(kept)
            held = {"state": state, "step": STEPS}
        again = fsdp_demo.attach(optimizer_of("adamw", model), "auto", model=model, **held)
        assert (again.config, again.auto_choice, again.step) == (chosen, why, STEPS)
        return weights(model)

    mine, others = run_ranks(run, 2, 1)
    assert all(map(torch.equal, mine, others))


@in_ranks(2, 1)
def test_auto_chooses_for_the_slowest_device(me: Any) -> None:
    """Islands with unlike devices choose for the slowest."""
    a_link(1e7)
    name, planned, choose = ["cpu", "h100"][me.island], list[str](), first_steps.chosen

    def note(situation: Situation, host: Any) -> Any:
        planned.append(situation.device)
        return choose(situation, host)

    first_steps.__dict__.update(device_name=lambda device: name, chosen=note)
    model, optimizer, exchange = start()
    train(model, optimizer, me.island, range(MEASURED))
    exchange.detach()
    assert planned[0] == "cpu"


def test_auto_refuses_a_state_of_an_earlier_release() -> None:
    """A state of an earlier release is refused under `auto`."""
    with pytest.raises(ValueError, match="name the method it was saved under"):
        earlier_choice.known_choice(fsdp_demo.Topology.from_env({}), {"step": 3}, ALONE)


def test_auto_newcomer_finds_the_choice_in_the_store() -> None:
    """An island that joins finds the choice in the store, also with a state of its own from before
    there was one.
    """
    why = AutoChoice("slow", "20Mbit,40ms", 0.3, 900)
    note = {"config": preset("sparse_loco").to_dict(), "auto_choice": dataclasses.asdict(why)}
    store, silent = WorldStore(HashStore(), "a store", 5.0), [False]
    store.set("run/0/auto", json.dumps(note))

    def open_store(limit: float) -> Any:
        if silent[0]:
            raise StoreSilent("nobody answers")
        return store

    late = SimpleNamespace(rank=0, elastic=True, question=5.0, open_store=open_store)
    late.under_way, late.prefix = lambda: True, lambda: "run/0"

    def found(state: Any = None) -> Any:
        return automatic.remembered(late, state, ALONE)  # type: ignore[arg-type]

    assert found() == (preset("sparse_loco"), why)
    measured = SimpleNamespace(heads=[{"config": preset("auto").to_dict()}])
    assert found(measured) == (preset("sparse_loco"), why)
    silent[0] = True
    assert found() == (None, None)
    silent[0] = False
    store.set("run/0/auto", "{")  # of another release, or damaged
    with pytest.raises(ValueError, match="the run's choice in the store .* cannot be read"):
        found()
    store.set("run/0/auto", "")  # it comes before the choice, and measures with the others
    assert found() == (None, None)


@in_ranks()
def test_auto_rank_0_tells_the_choice(me: Any) -> None:
    """Rank 0 looks for the choice and tells the others. It is written while they look: rank 1 would
    find it, rank 0 does not, or the other way round.
    """
    looked = iter([{}, {"config": preset("diloco").to_dict()}])

    def look(topology: Any) -> Any:
        return next(looked) if me.proc == 0 else {"config": {"preset": "wrong"}}

    earlier_choice.__dict__.update(_under_way=lambda topology: True, _in_store=look)
    topology, island = fsdp_demo.Topology.from_env(), Ranks.everywhere()
    assert earlier_choice.known_choice(topology, None, island) is None
    known = earlier_choice.known_choice(topology, None, island)
    assert known is not None and known[0].preset == "diloco"


def test_auto_choice_reaches_a_silent_store_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent store gets the choice when it answers again."""
    put, again = dict[str, str](), list[Any]()

    class Pulse:
        deadline = 0.1

        def ask(self, job: Any, seconds: float) -> bool:
            return False

        every, no_more = again.append, again.remove

    monkeypatch.setattr(earlier_choice.attempts, "join", lambda topology: Pulse())
    topology = SimpleNamespace(rank=0, elastic=True)
    earlier_choice.tell(topology, preset("diloco"))  # type: ignore[arg-type]
    assert not put and len(again) == 1
    again[0](SimpleNamespace(set=put.__setitem__))
    assert json.loads(put["auto"]) == {"config": preset("diloco").to_dict()} and not again


def test_auto_one_island_trains_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One island alone trains at once, under `full`."""
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    model, optimizer, exchange = start(clip=0.5)
    assert exchange.config.preset == "full" and exchange.config.clip == 0.5
    before = weights(model)
    train(model, optimizer, 0, range(1))
    assert not all(map(torch.equal, weights(model), before))
    exchange.detach()


@pytest.mark.parametrize("rate", [1e5, 1e6, 1e7, 1e8, 1e9, 1e10])
def test_auto_keeps_the_users_optimizer(rate: float) -> None:
    """AdamW and QHAdamW, with a first moment, do not get a method that keeps a momentum of
    gradients; SGD does not get one of deltas.
    """
    found = {}
    for kind in ("adamw", "qhadamw", "sgd"):
        _, _, exchange = start(kind, "full")
        situation = Situation([("layers.0.w", (512, 512))], 4, Link(rate, 0.02), 0.1, device="cpu")
        chosen = chosen_in(situation, exchange.host).config
        allowed = ("sgd", "any") if kind == "sgd" else ("adamw", "any")
        assert set(allowed) & set(chosen.inner_optimizers)
        assert chosen.preset != "muloco", "AdamW is only the partner of Muon there"
        assert kind == "sgd" or not keeps_momentum(chosen)
        found[kind] = chosen
        exchange.detach()
    assert found["qhadamw"] == found["adamw"]


def test_auto_rounds_its_measurements() -> None:
    """A measurement is rounded so that the next one ends alike."""
    for value in (1.0, 1.5e3, 7e8, 0.02):
        assert coarse(value) == pytest.approx(value)
        assert coarse(1.1 * value) == coarse(0.92 * value)
    assert coarse(9.9e7) == 1e8 and coarse(0.0) == 0.0
    # by ratio: 1.23 is nearer to 1.5, and 8.4 to 10, than by difference
    assert [coarse(v) for v in (1.22, 1.23, 8.3, 8.4)] == [1.0, 1.5, 7.0, 10.0]
    # as a person writes it
    assert str(Link(coarse(6.1e4), coarse(0.304))) == "70kbit,300ms"


def test_auto_chosen_method_keeps_its_own_settings() -> None:
    """The chosen method keeps its own value of each setting that was not given to `auto`."""
    diloco = preset("diloco")
    assert diloco.clip == 1.0
    for given in ({}, {"target": 0.9}, {"clip": None}, {"clip": 0.5}, {"seed": 3, "clip": 2.0}):
        config = preset("auto", **given).changed({"measured": 5})
        kept = {k: v for k, v in given.items() if k != "target"}
        taken = config.taken_over(diloco)  # type: ignore[attr-defined]
        assert taken == dataclasses.replace(diloco, **kept)
        assert ExchangeConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(("name", "settings", "says"), [
    ("auto", {"target": 1.5}, "target=1.5 is out of range"),
    ("auto", {"topk": 3}, "auto has no setting 'topk': it chooses the method"),
    ("auto", {"targets": 0.9}, "did you mean 'target'"),
    ("auto", {"measured": 2}, "measured=2 is out of range"),
    ("auto", {"target": "95%"}, "target='95%' must be a number; found a text"),
    ("Auto", {}, "did you mean 'auto'"),
])  # fmt: skip
def test_auto_refuses_wrong_settings(name: str, settings: dict[str, Any], says: str) -> None:
    """`auto` refuses settings of a method, and values out of range."""
    refusal(lambda: preset(name, **settings), says)


@pytest.mark.parametrize(("steps", "said"), [(MEASURED, 1), (MEASURED + 1, 0), (None, 0)])
def test_auto_warns_of_a_run_that_ends_before_the_choice(steps, said, monkeypatch, caplog) -> None:
    """A run that ends before the choice is warned of."""
    measuring = SimpleNamespace(chosen_meanwhile=lambda: False)
    monkeypatch.setattr(first_steps, "_FirstSteps", lambda *_: measuring)
    exchange = SimpleNamespace(config=preset("auto"), on_step_end=lambda call: None)
    exchange.topology = SimpleNamespace(islands=2, rank=0)
    with caplog.at_level(logging.WARNING, logger="fsdp_demo"):
        automatic.begin(exchange, None, steps)  # type: ignore[arg-type]
    assert sum("8 steps, and the method is chosen after 8" in m for m in caplog.messages) == said


def test_auto_newcomer_during_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An island that joins while the others choose takes their choice: it finds the choice at the
    end of a step at the latest, and asks nobody then.
    """
    known: list[Any] = [None, None, (preset("diloco"), AutoChoice("because", "1Gbit", 0.5))]
    monkeypatch.setattr(first_steps, "known_choice", lambda topology, state, island: known.pop(0))
    watched, chosen, called = [], [], []
    monkeypatch.setattr(first_steps, "watch", lambda exchange, choice: watched.append(choice))
    exchange = SimpleNamespace(
        **dict(config=preset("auto"), newcomer=True, step=3, peers=None, island=ALONE),
        topology=SimpleNamespace(islands=3, rank=0),
        choose=lambda config, model, choice: chosen.append((config, choice)),
        on_step_end=called.append,
        host=SimpleNamespace(device=torch.device("cpu")),
    )
    automatic.begin(exchange, None)  # type: ignore[arg-type]
    (measuring,) = called
    measuring()
    assert not chosen and called == [measuring]
    exchange.step = MEASURED  # where the others would be asked
    measuring()
    ((method, choice),) = chosen
    assert method == preset("diloco") and choice.reason == "because" and not known
    assert watched == [choice] and called == [measuring, None]


def test_auto_undecided_configuration_reads_back() -> None:
    """A configuration of `auto` reads back before the choice."""
    config = preset("auto", target=0.8)
    again = ExchangeConfig.from_dict(config.to_dict())
    assert again == config and isinstance(again, AutoConfig) and again.target == 0.8


@pytest.mark.parametrize(("slower", "said"), [(1.0, 0), (1.9, 0), (5.0, 1)])
def test_auto_slower_link_is_said_once(slower, said: int, caplog: pytest.LogCaptureFixture) -> None:
    """A link that gets slower than the choice assumed is said once."""
    _, _, exchange = start(config="full")
    situation = Situation([("layers.0.w", (2048, 2048))], 4, Link(1e7, 0.02), 0.5, device="cpu")
    health = first_steps.LinkHealth(exchange, situation)
    exchange._queue.flown = deque(maxlen=2)  # it forgets old ones, and does not grow
    with caplog.at_level(logging.WARNING, logger="fsdp_demo"):
        for n in range(3 * first_steps.ROUNDS):
            took = slower * health.planned + (0.06 if slower > 2 else 0.0)
            ends = 10.0 * n + took
            exchange._queue.flown.append(ExchangeRecord(n, n, ("delta",), 10.0 * n, ends))
            health()
    told = [r.message for r in caplog.records if "the link has become slower" in r.message]
    assert len(told) == said
    assert all("fsdp-demo plan --link 2Mbit,20ms" in text for text in told)
    exchange.detach()


def test_auto_ranks_with_unlike_clocks_send_equally_many(run_ranks: Any) -> None:
    """Ranks of an island whose clocks differ send equally many messages. A message is complete when
    all ranks of the island hold it. One more for one of them would never be.
    """

    def run(me: Any) -> tuple[str, int]:
        if me.proc:  # the time of the measurement is up at once
            measuring.time = SimpleNamespace(monotonic=lambda: 1000 * time.monotonic())  # type: ignore[attr-defined]
        model, optimizer, exchange = start(procs=2)
        assert exchange.peers is not None
        sent = exchange.peers.meter.setup_bytes
        train(model, optimizer, me.island, range(MEASURED + 2))
        exchange.finish()
        return json.dumps(exchange.config.to_dict()), sent

    found = run_ranks(run, 2, 2, timeout=60)
    assert len({chosen for chosen, _ in found}) == 1
    # both sent the first message, and nothing that the slower clock forbids
    assert all(measuring.SIZES[0] < sent < 4 * measuring.SIZES[2] for _, sent in found)


def test_auto_step_ends_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is measured until the device has made it. The host runs ahead of a GPU: spans between
    launches would say that steps take no time.
    """
    order: list[Any] = []
    monkeypatch.setattr(first_steps, "synchronize", order.append)
    clock = SimpleNamespace(monotonic=lambda: order.append("clock") or 0.0)
    monkeypatch.setattr(first_steps, "time", clock)
    first: Any = object.__new__(first_steps._FirstSteps)
    first._exchange, first._ends = SimpleNamespace(host=SimpleNamespace(device="gpu")), []
    first.chosen_meanwhile = lambda: True
    first()
    assert order == ["gpu", "clock"]
