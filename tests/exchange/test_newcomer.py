"""An island joins a run under way: after the steps that it makes up for it stands where an island
stands that was there.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import PeerLost, Stopped, WireError, base_optimizer, preset
from fsdp_demo.exchange import replay
from fsdp_demo.exchange.message import replica_weights
from fsdp_demo.peers import join_messages as join
from fsdp_demo.peers.header import PAYLOAD, STOP, Header

from ..support import joining, threaded
from ..support.cases import named
from ..support.inside import in_ranks

STEPS = 12
FACTS: dict[str, Any] = {"must_match": {"steps": 100}}
SEEDED = threading.Lock()  # islands are threads here, and share torch's generator


class Net(nn.Module):
    """Two layers with running statistics, a head, a frozen vector."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(66, 66), nn.BatchNorm1d(66)) for _ in range(2)]
        )
        self.head = nn.Linear(66, 70)
        self.shift = nn.Parameter(torch.randn(70), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) + self.shift


def rates(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that gives each step another rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 5))


def made(config: Any, seed: int = 0) -> tuple[Net, torch.optim.Optimizer, Any]:
    """Model, optimizer and schedule."""
    model = Net(seed)
    optimizer = base_optimizer(config, model.named_parameters(), lr=config.lr or 0.01)
    return model, optimizer, rates(optimizer)


def step(model: Net, optimizer: torch.optim.Optimizer, t: int, island: int) -> None:
    torch.manual_seed(100 * t + island)
    generator = torch.Generator().manual_seed(1000 * t + island)
    model(torch.randn(4, 66, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def recorded(config, steps=STEPS, brings=None, made=made):
    """Two islands train; what the first one's desk has seen, and where it stood after every
    step.
    """

    def island(i: int, topology: Any) -> Any:
        with SEEDED:
            model, optimizer, schedule = made(config, i)
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology, **FACTS)
        record = joining.Record(exchange, brings) if i == 0 else None
        stands = [joining.stand(exchange._runtime)]
        for t in range(steps):
            exchange.report(tokens=10 + 3 * i + t, loss=float(t))
            step(model, optimizer, t, i)
            schedule.step()
            stands.append(joining.stand(exchange._runtime))
        exchange.state_dict()  # what is under way comes in
        exchange.detach()
        return record, stands

    return threaded.values(threaded.islands(island))[0]


def attached(config: Any, model: Any, optimizer: Any, fed: Any, **place: Any) -> Any:
    """The exchange of a newcomer that is fed from a record."""
    where = joining.topology(fed, **place)
    return fsdp_demo.attach(optimizer, config, model=model, topology=where, **FACTS)


def trains(me: Any, config: Any, model: Any, optimizer: Any, schedule: Any) -> Any:
    """Eight steps of an island: the exchange, its record, and where it stood after each step."""
    exchange = fsdp_demo.attach(optimizer, config, model=model, **FACTS)
    record, truth = joining.Record(exchange), [joining.stand(exchange._runtime)]
    for t in range(8):
        step(model, optimizer, t, me.island)
        schedule.step()
        truth.append(joining.stand(exchange._runtime))
    exchange.state_dict()
    return exchange, record, truth


def joins(config, record, at, until=None, made=made, waits=1, **place) -> tuple[list, Any, Net]:
    """A newcomer joins at step `at`: where it stood after each step that it has made up for, its
    exchange and its model. waits: how often it is told that there is no snapshot yet.
    """
    stands: list[dict[str, Any]] = []
    patch = joining.watched(lambda runtime: stands.append(joining.stand(runtime)))
    try:
        model, optimizer, _ = made(config, 7)
        fed = joining.Fed(record, at, until)
        fed.waits = waits
        exchange = attached(config, model, optimizer, fed, **place)
    finally:
        patch.undo()
    assert exchange.newcomer
    assert fed.goes_on == exchange.step
    assert fed.asked == [p.numel() for p in fed.parts[1:]]
    return stands, exchange, model


def world(me: Any) -> dict[str, Any]:
    """The place of a newcomer that has the ranks of its island."""
    return {"rank": me.proc, "world": me.procs, "group": torch.distributed.group.WORLD}


CASES = {
    "full": preset("full"),
    "full-late": preset("full", **{"schedule.delay": 2}, clip=0.1),
    "demo-seldom": preset("demo", **{"schedule.sync_every": 2, "schedule.delay": 5}),
    "demo": preset("demo"),
    "demo-late": preset("demo", **{"schedule.delay": 3}),
    "demo-norm": preset("demo", clip=0.05, clip_scope="islands"),
    "demo-rates": preset("demo", lr_inside=True),
    "demo-2": preset("demo", version=2),
    "demo-adamw": preset("demo", inner_optimizer="adamw"),
    "random": preset("random"),
    "stride": preset("stride", inner_optimizer="adamw"),
    "local_sgd": preset("local_sgd", period=4),
    "local_sgd-late": preset("local_sgd", period=4, **{"schedule.delay": 2, "applier.mix": 0.25}),
    "local_sgd-queue": preset("local_sgd", period=2, **{"schedule.delay": 5}),
    "sel_sync": preset("sel_sync", check_every=2, window=2, delta=0.3, at_most=6),
    "local_adam": preset("local_adam", period=3),
    "desloc": preset("desloc", period=2, **{"exp_avg.schedule.delay": 1}),
    "desloc-rank": preset("desloc", rank=4, period=2, states={"exp_avg": 1, "exp_avg_sq": 2}),
    "diloco-rank": preset("diloco", inner_optimizer="lowrankadamw", inner_rank=4, period=3),
    "diloco": preset("diloco", period=3, momentum_warmup=2),
    "diloco-int8": preset("diloco", period=3, value_dtype="int8"),
    "diloco-late": preset("diloco", period=4, **{"schedule.delay": 3, "applier.mix": 0.5}),
    "diloco-queue": preset("diloco", period=2, **{"schedule.delay": 5}),
    "diloco-eager": preset("diloco", period=3, eager=2),
    "diloco-tokens": preset("diloco", period=3, **{"reducer.weight": "tokens"}),
    "streaming_diloco": preset("streaming_diloco", period=4, layers=1, delay=2),
    "streaming-queue": preset("streaming_diloco", period=3, layers=1, delay=4, value_dtype="fp32"),
    "decoupled_momentum": preset("decoupled_momentum", period=2),
    "consensus-late": preset("decoupled_momentum", period=3,
        **{"schedule.delay": 2, "applier.mix": 0.5}),
    "released": preset("decoupled_momentum", rule="released", period=2, average_every=2),
    "sparse_loco": preset("sparse_loco", period=2),
    "sign_loco": preset("sign_loco", beta=0.6, period=2, momentum_warmup=3),
    "sign_loco-switch": preset("sign_loco", period=2, switch=5),
    "muloco": preset("muloco", period=3),
    "muloco-queue": preset("muloco", period=2, value_dtype="int4", **{"schedule.delay": 3}),
}  # fmt: skip


def compare(config: Any, now: dict[str, Any], then: dict[str, Any]) -> None:
    """What a newcomer must share with an island that was there."""
    equal = ["step", "clocks", "history"]
    if not any(c.applier.local_delta for c in config.channels):
        equal += ["anchors", "momenta"]
        assert all(not a.any() for a in now["accumulators"])
    if all(c.before_step for c in config.channels):
        equal += ["parameters", "states"]
    assert now["loss"] == then["loss"] or now["loss"] != now["loss"]
    assert all(far == 0 for far in now["away"])
    here, there = (torch.cat([p.flatten() for p in at["parameters"]]) for at in (now, then))
    # a late mean is corrected by what was sent: without it it would count twice
    assert float((here - there).norm() / there.norm()) < 0.5
    pairs = list(zip(now["states"], then["states"], strict=True))
    for c in config.channels:
        exact = c.schedule.due(now["step"] - 1) and not c.schedule.delay
        exact &= c.schedule.pure or now["clocks"][1][c.name] == now["step"]  # sent in this one
        if c.source == "parameter" and exact and not c.applier.mix:
            equal.append("parameters")
        if c.state_name:
            kept = ["step", *([c.state_name] if exact and not c.exclude else [])]
            assert all(torch.equal(a[n], b[n]) for a, b in pairs for n in kept)
    if config.averages_moments:
        bases = [(a["projection"], b["projection"]) for a, b in pairs if "projection" in a]
        assert bases and all(map(torch.equal, *zip(*bases, strict=True)))
    for name in equal:
        assert joining.same(now[name], then[name]), (name, now[name], then[name])


@pytest.mark.parametrize("name", CASES)
@in_ranks(1, 1)
def test_newcomer_state_equals_others(name: str) -> None:
    """A newcomer has the state of the others, after joining at any step. Joining after every step,
    and following up to the end.
    """
    config = CASES[name]
    record, truth = recorded(config)
    assert sorted(record.snapshots) == list(range(1, STEPS + 1))
    for at in record.snapshots:
        stands, exchange, model = joins(config, record, at)
        assert [s["step"] for s in stands] == list(range(at + 1, STEPS + 1))
        group = exchange.optimizers[0].param_groups[0]
        assert exchange.step == STEPS and group["lr"] == group["initial_lr"]
        for now in [*stands, joining.stand(exchange._runtime)]:
            compare(config, now, truth[now["step"]])
        exchange.detach()


@pytest.mark.parametrize(
    "name", ["demo-adamw", "streaming_diloco", "local_sgd-late", "desloc-rank"]
)
@in_ranks()
def test_newcomer_fsdp2_shards(me: Any, name: str) -> None:
    """A newcomer may be sharded. FSDP2 over two ranks; each follows its own line."""
    from torch.distributed.fsdp import fully_shard

    def sharded(config: Any, seed: int) -> Any:
        model = Net(seed)
        for layer in [*model.layers, model]:
            fully_shard(layer, mesh=me.mesh())
        optimizer = base_optimizer(config, model.named_parameters(), lr=config.lr or 0.01)
        return model, optimizer, rates(optimizer)

    config = CASES[name]
    exchange, record, truth = trains(me, config, *sharded(config, me.island))
    exchange.detach()
    for at in (1, 4, 7) if me.island == 0 else ():
        # the snapshot of rank 1 comes later than that of the other rank
        stands, exchange, model = joins(config, record, at, None, sharded, me.proc, **world(me))
        assert exchange.step == 8 and len(stands) == 8 - at
        for now in stands:
            compare(config, now, truth[now["step"]])
        assert model.head.weight.full_tensor().isfinite().all()  # type: ignore[operator]
        exchange.detach()


@pytest.mark.parametrize("procs", [[2, 1], [2, 2]], ids=["one active copy", "two active copies"])
@pytest.mark.parametrize("name", ["demo-adamw", "diloco-queue", "full-late"])
def test_newcomer_copies_of_a_shard(run_ranks, name: str, procs: list[int]) -> None:
    """A newcomer may hold copies of a shard. Two ranks hold the whole model. They share two active
    copies; or one, and the second has no line and gets all through its island.
    """
    config, active_copies = CASES[name], min(procs)

    def run(me: Any) -> Any:
        exchange, record, truth = trains(me, config, *made(config, me.island))
        # an island that has detached says no more that it has what another waits for
        (me.folder / f"saved{me.rank}").touch()
        while len(list(me.folder.glob("saved*"))) < sum(procs):
            time.sleep(0.01)
        exchange.detach()
        if me.island:
            return None
        model, optimizer, _ = made(config, 7)
        fed = joining.Fed(record, 3) if me.proc < active_copies else None
        place = {"active_copies": active_copies, **world(me)}
        exchange = attached(config, model, optimizer, fed, **place)
        now = joining.stand(exchange._runtime)
        compare(config, now, truth[8])
        buffers = [b.clone() for b in model.buffers()]
        exchange.detach()
        states = now["states"] if config.channels[0].before_step else []
        return now["parameters"], states, now["clocks"], buffers, exchange.step

    first, second, *_ = run_ranks(run, islands=2, procs=procs)
    assert joining.same(first, second) and first[-1] == 8


@pytest.mark.parametrize("name", ["demo-adamw", "diloco-queue", "streaming_diloco", "desloc"])
@in_ranks(1, 1)
def test_newcomer_trains_before_its_messages_count(name: str) -> None:
    """A newcomer that has caught up takes steps of its own. Its messages count later, but it
    already applies what the others agree on.
    """
    config = CASES[name]
    record, truth = recorded(config)
    for at, until in ((2, 6), (5, 5), (7, 8)):
        _, exchange, model = joins(config, record, at, until)
        assert exchange.step == until
        counted = 2 * sum(10 + t for t in range(at))  # by island 0, the donor
        assert exchange.totals()["global_tokens"] == counted * until // at
        assert exchange.tokens == 0  # its own, which weigh
        optimizer = exchange.optimizers[0]
        schedule = rates(optimizer)
        for _ in range(until):
            schedule.step()
        for t in range(until, STEPS):
            step(model, optimizer, t, 5)
            schedule.step()
            now, then = joining.stand(exchange._runtime), truth[t + 1]
            equal = ["clocks", "anchors", "momenta"]
            equal += ["parameters", "states"] if config.channels[0].before_step else []
            assert [n for n in equal if not joining.same(now[n], then[n])] == []
        exchange.detach()


def damaged(change: Any) -> Any:
    """Lets `change` spoil the head of a snapshot's parts."""

    def apply(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        head = json.loads(bytes(parts[0].tolist()))
        change(head)
        return [join.to_bytes(head), *parts[1:]]

    return apply


def into(*path: Any, value: Any) -> Any:
    def change(head: Any) -> None:
        node = head
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return damaged(change)


SPOILT = {
    "format": (into("format", value=7), r"has format 7, written by fsdp_demo .* reads format 2"),
    "no form": (into("stand", value=[]), r"Expected `object`, got `array` - at `\$.stand`"),
    "no JSON": (lambda parts: [parts[0][:-9], *parts[1:]], "the head of a snapshot cannot be read"),
    "shards": (into("place", "shards", value=4),
        r"island 0 \(island0\) runs something else than newcomer: shards: 1 here, 4 there"),
    "islands": (into("place", "islands", value=3), "islands: 2 here, 3 there"),
    "facts": (into("facts", "must_match.steps", value=7), "must_match.steps: 100 here, 7 there"),
    "dtype": (into("parameters", 1, 3, value="bfloat16"),
        r"parameter 1 is .* float32, trained here, .* bfloat16, trained there"),
    "fewer": (damaged(lambda head: head["parameters"].pop()), "11 parameters here, 10 there"),
    "states": (into("states", value=["exp_avg"]),
        r"keep states exp_avg, exp_avg_sq, step of \d+ tensors here, exp_avg, step of"),
    "counts": (damaged(lambda head: head["stand"]["counts"][0].pop("step")),
        "one that makes them at its first step cannot join"),
    "no number": (into("stand", "counts", 0, "step", value="x"), "got `str` - at"),
    "channel": (into("stand", "last", "other", value=3), r"channels \['other'\] there"),
    "norms": (into("stand", "norms", value={"b": []}), "norms of channels 'b'"),
    "step": (into("stand", "step", value=-1), "stands at step -1"),
    "no step": (into("stand", "step", value=2.5), "Expected `int`, got `float`"),
    "many": (damaged(lambda head: head["stand"]["flights"].extend(head["stand"]["flights"] * 9)),
        "20 messages are under way there"),
    "old": (into("stand", "flights", 0, "step", value=0),
        "a message of step 1 of channels .* is under way after step 5"),
    "marks": (into("stand", "flights", 0, "parts", "momentum", value="01"),
        "is under way after step 5"),
    "listed": (into("tensors", 1, 2, value=1 << 40),
        r"the snapshot lists tensor 1 as \('parameters', 'float32', 1099511627776\)"),
    "cut": (lambda parts: parts[:-1], r"the snapshot was cut off: 3 of 4 tensors came"),
    "short": (lambda parts: [*parts[:-1], parts[-1][:-4]],
        r"the snapshot was cut off: state.exp_avg_sq has \d+ bytes"),
}  # fmt: skip


@in_ranks(1, 1)
def test_newcomer_snapshot_refused_by_name() -> None:
    """A snapshot that does not fit the newcomer is refused, and the error names what differs."""
    config = preset("demo", inner_optimizer="adamw", **{"schedule.delay": 2})
    record, _ = recorded(config, 6)
    parts, under_way = record.snapshots[5]
    for name, (change, message) in SPOILT.items():
        record.snapshots[5] = change(list(parts)), under_way
        with named(name), pytest.raises(ValueError, match=message):
            joins(config, record, 5)
    record.snapshots[5] = parts, under_way
    sooner = config.changed({"schedule.delay": 1})
    with pytest.raises(ValueError, match="channels.0.schedule.delay: 1 here, 2 there"):
        joins(sooner, record, 5)
    with pytest.raises(ValueError, match="config.preset: 'full' here, 'demo' there"):
        joins(preset("full"), record, 5)
    wide = nn.Linear(66, 70)
    other = r"2 parameters here, 11 there; parameter 0 is weight \[70, 66\] float32, trained here"
    nameless = "parameter 0 is optimizer0.group0.parameter0|pass model= on all islands"
    for model, params, message in (
        (wide, wide.named_parameters(), other),
        (None, made(config)[0].parameters(), nameless),
    ):
        with pytest.raises(ValueError, match=message):
            attached(config, model, base_optimizer(config, params), joining.Fed(record, 5))


@in_ranks(1, 1)
def test_newcomer_of_unlike_hardware_averages_no_basis() -> None:
    """An island of another torch joins, but not where moments of low rank are averaged."""
    for name in ("desloc", "desloc-rank"):
        config = CASES[name]
        record, _ = recorded(config, 6)
        parts, under_way = record.snapshots[4]
        record.snapshots[4] = into("facts", "torch", value="2.0.0")(list(parts)), under_way
        if not config.averages_moments:
            joins(config, record, 4)
            continue
        with pytest.raises(ValueError, match="has torch 2.0.0, here it is"):
            joins(config, record, 4)


@in_ranks(1, 1)
def test_newcomer_ticks_and_messages_refused() -> None:
    """Ticks and messages that do not fit the newcomer are refused."""
    config = preset("demo", inner_optimizer="adamw")
    record, _ = recorded(config, 6)
    good, messages = dict(record.hooks), list(record.messages)
    spoilt = {
        "another step": (join.to_bytes(join.Tick(4, join.from_bytes(good[3], join.Tick,
            "a tick").rates)), WireError, "step 5 came to be made up for, here comes 4"),
        "other groups": (join.to_bytes(join.Tick(3, [])), ValueError,
            r"rates of \[\] groups came, the optimizers here have \[1\]"),
        "no rate": (join.to_bytes(join.Tick(3, [[{"lr": "x"}]])), ValueError,
            "lr of another form came"),
        "no tick": (join.to_bytes({"step": 3}), WireError, "a tick cannot be read"),
    }  # fmt: skip
    for name, (tick, kind, message) in spoilt.items():
        record.hooks = good | {3: tick}
        with named(name), pytest.raises(kind, match=message):
            joins(config, record, 2)
    record.hooks = good
    wrong = {
        "missing": ([m for m in messages if m.headers[0].step != 3],
            r"are of \(kind, step\) \[\(1, 4\)\], here comes \(1, 3\)"),
        "short": ([replace(m, bodies=[b[:-1] for b in m.bodies]) for m in messages],
            r"has bodies of \[.*\] bytes"),
        "many": ([replace(m, headers=m.headers * 5, bodies=m.bodies * 5) for m in messages],
            "is of 10 islands"),
        "over": (messages[:4], "the record has no more messages"),
    }  # fmt: skip
    for name, (kept, message) in wrong.items():
        record.messages = kept
        with named(name), pytest.raises((WireError, PeerLost), match=message):
            joins(config, record, 2)
    with pytest.raises(WireError, match="cut off: parts of"):
        size = messages[0].bodies[0].numel()
        join.unpacked(join.packed(messages[0])[:-1], join.Expected(PAYLOAD, 0, size))


@in_ranks(1, 1)
def test_newcomer_stop_of_others() -> None:
    """A stop of the others reaches a newcomer that is still joining."""
    config = preset("demo", inner_optimizer="adamw")
    record, _ = recorded(config, 6)
    last = record.messages[-1]
    flagged = [replace(h, flags=h.flags | STOP) for h in last.headers]
    record.messages[-1] = replace(last, headers=flagged)
    with pytest.raises(Stopped, match="stopped after step 6, when this one was about to join"):
        joins(config, record, 2)


@in_ranks(1, 1)
def test_newcomer_ignores_own_state() -> None:
    """A newcomer drops a state and a step of an older life. Its later questions carry the step of
    the others.
    """
    config = preset("diloco", period=3)
    record, truth = recorded(config, 6)
    model, optimizer, _ = made(config, 7)
    own = fsdp_demo.attach(optimizer, config, model=model, topology=fsdp_demo.Topology())
    state = own.state_dict()
    model, optimizer, _ = made(config, 7)
    # the Trainer's step, where it starts anew
    where, facts = joining.topology(joining.Fed(record, 4)), {"steps": 100, "at": 2}
    given = {"topology": where, "state": state, "step": 2, "must_match": facts}
    exchange = fsdp_demo.attach(optimizer, config, model=model, **given)
    compare(config, joining.stand(exchange._runtime), truth[6])
    assert exchange.across_islands._step() == 6
    exchange.detach()


@in_ranks(1, 1)
def test_newcomer_known_tensors_not_sent() -> None:
    """Frozen parameters and buffers whose digest the newcomer names are not sent to it."""
    config = preset("local_sgd", period=3)

    def lora(config: Any, seed: int) -> Any:
        model = Net(0)
        for layer in model.layers:
            layer.requires_grad_(False).eval()  # running statistics stay as they are
        torch.manual_seed(seed)
        nn.init.normal_(model.head.weight)
        trained = [p for p in model.named_parameters() if p[1].requires_grad]
        optimizer = base_optimizer(config, trained, lr=0.01)
        return model, optimizer, rates(optimizer)

    whole, _ = recorded(config, 3, made=lora)
    model, optimizer, _ = lora(config, 7)
    fed = joining.Fed(whole, 1)
    attached(config, model, optimizer, fed).detach()
    less, truth = recorded(config, 3, fed.brought, made=lora)
    sizes = [[p.numel() for p in record.snapshots[2][0][1:]] for record in (whole, less)]
    assert sizes[0][1:] == sizes[1] and sizes[0][0] > 10_000
    stands, exchange, model = joins(config, less, 1, made=lora)
    compare(config, stands[-1], truth[3])
    exchange.detach()


@in_ranks(1, 1)
def test_newcomer_keeps_own_tensors() -> None:
    """The tensors that `own_tensors` names stay the newcomer's own."""
    config = preset("diloco", period=3, own_tensors=["shift", "layers.0.*.running_*"])
    record, _ = recorded(config, 6)
    _, exchange, model = joins(config, record, 4)
    assert torch.equal(model.shift, Net(7).shift)
    own, taken = (layer[1].running_mean for layer in model.layers)
    assert not own.any() and taken.any()
    exchange.detach()


@pytest.mark.parametrize("name", ["diloco", "demo-adamw"])
@in_ranks(1, 1)
def test_newcomer_keeps_own_moments(name: str) -> None:
    """A newcomer keeps the moments of its optimizer where islands share none. As `RunState` has
    loaded them from its own checkpoint, before `attach`.
    """
    config = CASES[name]

    def loaded(config: Any, seed: int) -> Any:
        model, optimizer, schedule = made(config, seed)
        for p in model.parameters() if seed == 7 else ():
            if p.requires_grad:
                moments = {"exp_avg": 2.0, "exp_avg_sq": 4.0}
                kept = {n: torch.full_like(p, v) for n, v in moments.items()}
                optimizer.state[p] = {"step": torch.tensor(3.0), **kept}
        return model, optimizer, schedule

    record, truth = recorded(config, 6, made=loaded)
    _, exchange, _ = joins(config, record, 4, made=loaded)
    now = joining.stand(exchange._runtime)
    compare(config, now, truth[6])
    kept = [bool((s["exp_avg"] == 2.0).all()) and s["step"] == 3.0 for s in now["states"]]
    assert all(kept) if name == "diloco" else not any(kept)
    exchange.detach()


def test_newcomer_snapshot_time_logged(monkeypatch, caplog) -> None:
    """The log estimates early how long a snapshot takes, from what the link has carried so far;
    later lines are rare.
    """
    now = iter([100.0, 102.0, 105.0, 110.0, 120.0])
    monkeypatch.setattr(replay.time, "monotonic", lambda: next(now))

    class Slow:
        fetched = 1 << 20  # the head

        def bodies(self, sizes: list[int], seconds: float) -> None:
            self.fetched += 1 << 20

    caplog.set_level("INFO", "fsdp_demo")
    ask = replay._fetching(Slow(), [20 << 20, 20 << 20], "a")  # type: ignore[arg-type]
    assert [ask() for _ in range(4)] == [None] * 4
    assert caplog.messages == [
        "a: 2 of 40 MiB of the snapshot after 5 s: about 1.6 minutes are left",
        "a: 3 of 40 MiB of the snapshot after 10 s: about 2.1 minutes are left",
        "a: 4 of 40 MiB of the snapshot after 20 s: about 3.0 minutes are left",
    ]


@in_ranks(1, 1)
def test_newcomer_lazy_optimizer_state() -> None:
    """A newcomer whose optimizer makes its state at the first step gets the state of the others."""
    config = preset("full")

    def lazy(config: Any, seed: int) -> Any:
        model = Net(seed)
        # a product of momenta, too
        optimizer = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return model, optimizer, rates(optimizer)

    record, truth = recorded(config, 5, made=lazy)
    assert truth[5]["states"][0]["mu_product"] < 1
    stands, exchange, _ = joins(config, record, 2, made=lazy)
    for now in stands:
        compare(config, now, truth[now["step"]])
    exchange.detach()


WEIGHTS = {
    # joined at step 4: own steps are 4 and 5 of the round that ends with step 5, then 6 to 8, then
    # 9 to 11
    "tokens": (preset("diloco", period=3, **{"reducer.weight": "tokens"}),
        [(5, 9.0), (8, 21.0), (11, 30.0)]),
    "equal": (preset("diloco", period=3), [(5, -1.0), (8, 1.0), (11, 1.0)]),
    "gradients": (preset("demo", **{"schedule.sync_every": 3}), [(5, -1.0), (8, 1.0), (11, 1.0)]),
    "every step": (preset("demo"), [(t, 1.0) for t in range(4, 12)]),
    # the donor's, and two steps on
    "parameters": (preset("local_sgd", period=3), [(5, 1.0), (8, 1.0), (11, 1.0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
@in_ranks(1, 1)
def test_newcomer_first_weights(name: str) -> None:
    """The first contribution of a newcomer weighs the tokens since it joined. Without tokens a part
    of a round weighs nothing.
    """
    config, expected = WEIGHTS[name]
    record, _ = recorded(config, STEPS)
    _, exchange, model = joins(config, record, 2, 4)
    assert exchange.step == 4
    optimizer, line = exchange.optimizers[0], exchange.peers
    replayed = len(line.said)
    for t in range(4, STEPS):
        exchange.report(tokens=t)
        step(model, optimizer, t, 5)
    exchange.flush()
    assert line.said[replayed:] == expected, line.said
    before = expected[0][1] if expected[0][1] < 0 else line.said[0][1]
    assert all(weight == before for _, weight in line.said[:replayed])
    exchange.detach()


def test_newcomer_part_of_round_weight() -> None:
    """A part of a round has no share in the mean unless no island has more."""
    (channel,) = preset("diloco").channels
    part, whole = Header(0, 0, weight=-1.0), Header(0, 0)
    assert replica_weights(channel, [whole, part, whole]) == [1.0, 0.0, 1.0]
    assert replica_weights(channel, [part, part]) == [1.0, 1.0]
