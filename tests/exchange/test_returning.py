"""An island comes back with a checkpoint of its own: with what came since it stands where a
snapshot would have put it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import base_optimizer, preset
from fsdp_demo.exchange import replay, returning, snapshot
from fsdp_demo.exchange.startup import OwnCheckpoint

from ..support import joining, threaded
from .test_joining import Net, compare, joins, made, step

STEPS = 10
CASES = {
    "full": preset("full"),
    "demo-adamw": preset("demo", inner_optimizer="adamw"),
    "demo-late": preset("demo", **{"schedule.delay": 3}),
    "diloco": preset("diloco", period=3, momentum_warmup=2),
    "diloco-int8": preset("diloco", period=3, value_dtype="int8"),
    "diloco-queue": preset("diloco", period=2, **{"schedule.delay": 5}),
    "diloco-kept": preset("diloco", period=3, **{"schedule.delay": 2, "applier.keep_steps": True}),
    "diloco-eager": preset("diloco", period=3, **{"schedule.delay": 4, "applier.own_share": 0.5}),
    "streaming-queue": preset("streaming_diloco", period=3, layers=1, delay=4, value_dtype="fp32"),
    "sparse_loco": preset("sparse_loco", period=2),
    "sign_loco": preset("sign_loco", beta=0.6, period=2, momentum_warmup=3),
    "muloco-queue": preset("muloco", period=2, value_dtype="int4", **{"schedule.delay": 3}),
    "local_sgd": preset("local_sgd", period=4),
    "desloc": preset("desloc", period=2, **{"exp_avg.schedule.delay": 1}),
    "released": preset("decoupled_momentum", rule="released", period=2, average_every=4),
}
"""Presets of each way to keep what replicas share."""

SHARES = (
    "full",
    "demo-adamw",
    "demo-late",
    "diloco",
    "diloco-int8",
    "diloco-queue",
    "diloco-kept",
    "diloco-eager",
    "streaming-queue",
    "sparse_loco",
    "sign_loco",
    "muloco-queue",
)
"""Those whose replicas share all that a snapshot brings, at every step."""


class Plain(Net):
    """Without running statistics, which belong to one island."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(66, 66), nn.Tanh()) for _ in range(2)])


def plain(config: Any, seed: int = 0) -> Any:
    model = Plain(seed)
    optimizer = base_optimizer(config, model.named_parameters(), lr=config.lr or 0.01)
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 5)),
    )


def cloned(tree: Any) -> Any:
    """With tensors of its own."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {k: cloned(v) for k, v in tree.items()}
    return [cloned(v) for v in tree] if isinstance(tree, (list, tuple)) else tree


def saved(runtime: Any, exchange: Any, model: Any, optimizer: Any) -> OwnCheckpoint:
    """As a checkpoint on a disk would have it: nothing of it is shared with what trains on."""
    state = cloned(exchange.state_dict())
    weights, inner = cloned(model.state_dict()), cloned(optimizer.state_dict())

    def load(joined: Any) -> dict[str, Any]:
        joined.model_here.load_state_dict(cloned(weights))
        joined.optimizers[0].load_state_dict(cloned(inner))
        return cloned(state)

    return OwnCheckpoint(exchange.step, returning.mark(runtime, model), load)


def lives(
    config: Any, make: Any = plain
) -> tuple[joining.Record, dict[int, OwnCheckpoint], list[dict[str, Any]]]:
    """Two islands train and save after every step: what the first one keeps, what the second one
    has on its disk, where the first stood.
    """

    def island(i: int, topology: Any) -> Any:
        model, optimizer, schedule = make(config, i)
        exchange = fsdp_demo.attach(
            optimizer, config, model=model, topology=topology, must_match={"steps": 100}
        )
        runtime, record = exchange._runtime, joining.Record(exchange) if i == 0 else None
        stands, disk = [joining.stand(runtime)], {}
        for t in range(STEPS):
            exchange.report(tokens=10 + 3 * i + t, loss=float(t))
            step(model, optimizer, t, i)
            schedule.step()
            disk[t + 1] = saved(runtime, exchange, model, optimizer)
            if record is not None:
                record.marks[disk[t + 1].mark] = (
                    t + 1,
                    snapshot.without_tensors(
                        runtime, {"must_match.steps": 100}, disk[t + 1].mark
                    ).pack(),
                )
            stands.append(joining.stand(runtime))
        exchange.state_dict()
        exchange.detach()
        return record, disk, stands

    (record, _, stands), (_, disk, _) = threaded.values(threaded.islands(island))
    return record, disk, stands


def comes_back(
    config: Any, record: joining.Record, own: OwnCheckpoint, make: Any = plain, seed: int = 7
) -> Any:
    """It joins with this checkpoint: where it stood after each step that it made up for, its
    exchange, and what its donor sent.
    """
    stands: list[dict[str, Any]] = []
    patch = joining.watched(lambda runtime: stands.append(joining.stand(runtime)))
    try:
        model, optimizer, _ = make(config, seed)
        load = OwnCheckpoint(
            own.step,
            own.mark,
            lambda exchange: (setattr(exchange, "model_here", model), own.load(exchange))[1],
        )
        fed = joining.Fed(record, own.step)
        exchange = fsdp_demo.attach(
            optimizer,
            config,
            model=model,
            topology=joining.topology(fed),
            must_match={"steps": 100},
            state=load,
        )
    finally:
        patch.undo()
    assert exchange.newcomer and fed.goes_on == exchange.step == STEPS
    return stands, exchange, fed


def without_inner(stand: dict[str, Any], config: Any) -> dict[str, Any]:
    """What a snapshot puts somewhere: inner optimizers that are each island's own go on from the
    checkpoint instead of anew.
    """
    shared = any(c.before_step or c.state_name for c in config.channels)
    return stand if shared else {**stand, "states": None}


@pytest.mark.parametrize("name", CASES)
def test_it_stands_where_a_snapshot_would_have_put_it(run_ranks, name: str) -> None:
    config = CASES[name]

    def run() -> None:
        record, disk, truth = lives(config)
        used = []
        for at, own in disk.items():
            stands, exchange, fed = comes_back(config, record, own)
            if not fed.asked:
                used.append(at)
            others, other, _ = joins(config, record, at, made=plain)
            assert [s["step"] for s in stands] == list(range(at + 1, STEPS + 1))
            for now, then in zip(
                [*stands, joining.stand(exchange._runtime)],
                [*others, joining.stand(other._runtime)],
                strict=True,
            ):
                compare(config, now, truth[now["step"]])
                assert now.pop("loss") == then.pop("loss") or now["step"] <= at + 5, (
                    "before the first message nothing is known"
                )
                here, there = without_inner(now, config), without_inner(then, config)
                assert joining.same(here, there), (
                    at,
                    now["step"],
                    [k for k in here if not joining.same(here[k], there[k])],
                )
            exchange.detach()
            other.detach()
        if name in SHARES:
            assert used == list(disk)
        else:  # where replicas have just met
            assert len(used) < STEPS, used

    run_ranks(run, islands=1, procs=1)


def test_what_belongs_to_one_island_is_no_snapshot(run_ranks) -> None:
    """Running statistics; another history; a checkpoint that does not load as it was saved."""
    config = preset("demo", inner_optimizer="adamw")

    def run() -> None:
        record, disk, _ = lives(config, made)
        assert record.marks and not {own.mark for own in disk.values()} & set(record.marks)
        record, disk, truth = lives(config)
        other = OwnCheckpoint(4, "0" * 32, disk[4].load)
        stands, exchange, fed = comes_back(config, record, other)
        assert fed.asked and len(stands) == STEPS - 4  # a snapshot
        compare(config, joining.stand(exchange._runtime), truth[STEPS])
        exchange.detach()

        def spoilt(exchange: Any) -> dict[str, Any]:
            state = disk[4].load(exchange)
            with torch.no_grad():
                exchange.model_here.head.weight[0, 0] += 1
            return state

        with pytest.raises(
            ValueError,
            match="the checkpoint of step 4 was loaded, and is not what was saved: remove its "
            "folder",
        ):
            comes_back(config, record, OwnCheckpoint(4, disk[4].mark, spoilt))

    run_ranks(run, islands=1, procs=1)


def keeps(
    me: Any, config: Any, make: Any
) -> tuple[joining.Record, dict[int, OwnCheckpoint], list[dict[str, Any]]]:
    """`lives` of ranks in processes: this rank's own."""
    model, optimizer, schedule = make(config, me.island)
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    record, disk, stands = joining.Record(exchange), {}, [joining.stand(exchange._runtime)]
    for t in range(8):
        step(model, optimizer, t, me.island)
        schedule.step()
        own = disk[t + 1] = saved(exchange._runtime, exchange, model, optimizer)
        if exchange._runtime.peers is not None:
            record.marks[own.mark] = (
                t + 1,
                snapshot.without_tensors(exchange._runtime, {}, own.mark).pack(),
            )
        stands.append(joining.stand(exchange._runtime))
    exchange.state_dict()
    exchange.detach()
    return record, disk, stands


def rejoins(
    me: Any,
    config: Any,
    make: Any,
    record: joining.Record,
    own: OwnCheckpoint | None,
    at: int,
    active_copies: int | None = None,
) -> Any:
    """An island of several ranks comes back: where this one stands, and whether a snapshot was
    asked for.
    """
    model, optimizer, _ = make(config, 7)
    fed = joining.Fed(record, at) if active_copies is None or me.proc < active_copies else None
    given = {} if active_copies is None else {"active_copies": active_copies}
    where = joining.topology(
        fed, rank=me.proc, world=me.procs, group=torch.distributed.group.WORLD, **given
    )
    load = own and OwnCheckpoint(
        at,
        own.mark,
        lambda exchange: (setattr(exchange, "model_here", model), own.load(exchange))[1],
    )
    exchange = fsdp_demo.attach(optimizer, config, model=model, topology=where, state=load)
    now = joining.stand(exchange._runtime)
    exchange.detach()
    return now, bool(fed and fed.asked)


@pytest.mark.parametrize("name", ["demo-adamw", "streaming-queue"])
def test_sharded(run_ranks, name: str) -> None:
    """FSDP2 over two ranks, each with its own mark; where one of them has none, both take the
    snapshot.
    """
    config = CASES[name]

    def run(me: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        def sharded(config: Any, seed: int) -> Any:
            model = Plain(seed)
            for layer in [*model.layers, model]:
                fully_shard(layer, mesh=me.mesh())
            optimizer = base_optimizer(config, model.named_parameters(), lr=config.lr or 0.01)
            return (
                model,
                optimizer,
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 5)),
            )

        record, disk, truth = keeps(me, config, sharded)
        if me.island:
            return
        for at in (1, 4, 7):
            now, whole = rejoins(me, config, sharded, record, disk[at], at)
            compare(config, now, truth[8])
            assert not whole
        now, whole = rejoins(me, config, sharded, record, disk[4] if me.proc else None, 4)
        compare(config, now, truth[8])
        assert whole

    run_ranks(run, islands=2, procs=2)


@pytest.mark.parametrize("procs", [[2, 1], [2, 2]], ids=["one active copy", "two active copies"])
@pytest.mark.parametrize("name", ["demo-adamw", "diloco-queue"])
def test_copies(run_ranks, name: str, procs: list[int]) -> None:
    """Two ranks hold the whole model; the one that is not active has no peers, and no mark is asked
    of them.
    """
    config, active_copies = CASES[name], min(procs)

    def run(me: Any) -> Any:
        record, disk, truth = keeps(me, config, plain)
        if me.island:
            return None
        now, whole = rejoins(me, config, plain, record, disk[3], 3, active_copies)
        compare(config, now, truth[8])
        assert not whole
        return now["parameters"], now["clocks"]

    first, second, *_ = run_ranks(run, islands=2, procs=procs)
    assert joining.same(first, second)


def test_how_long_a_snapshot_takes_is_said_early(monkeypatch, caplog) -> None:
    """After some seconds, and then seldom: with what the link has carried so far."""
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


def test_it_is_for_newcomers_only(run_ranks) -> None:
    """Who starts with the others goes by what all hold: nothing of such a checkpoint has been
    loaded.
    """

    def run() -> None:
        model, optimizer, _ = plain(preset("diloco"))
        own = OwnCheckpoint(7, "0" * 32, lambda exchange: pytest.fail("it was loaded"))
        exchange = fsdp_demo.attach(
            optimizer, "diloco", model=model, topology=fsdp_demo.Topology(), state=own
        )
        assert exchange.step == 0 and not exchange.newcomer
        exchange.detach()

    run_ranks(run, islands=1, procs=1)
