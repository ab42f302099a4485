"""DropCompute: which micro-batches are left out, the divisor, the limit that is chosen."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.exchange import drop, replay, run_specification
from fsdp_demo.peers import join_messages as join

from ..oracles import drop as oracle
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.refused import refusal

N = 4
LR = 0.5


class Clock:
    """Seconds that pass when a test says so, for the limit of this process."""

    def __init__(self) -> None:
        self.now = 100.0
        drop.clock = lambda: self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(6, 4)


def loss_of(model: torch.nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return model(torch.randn(3, 6, generator=generator)).square().mean()


def attached(model: torch.nn.Module, **changes: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    changes = {"inner_optimizers": "as_is", "clip": None, **changes}
    return optimizer, fsdp_demo.attach(optimizer, "full", model=model, **changes)


def by_hand(taken: list[list[tuple[int, int]]], exact: bool, tokens: bool) -> list[torch.Tensor]:
    """Two steps on what each island of two ranks has taken."""
    model = net()
    for step in range(2):
        mine = [[micro for s, micro in island if s == step] for island in taken]
        for island, micros in enumerate(mine):
            weight = len(micros) / sum(map(len, mine)) if tokens else 1 / len(taken)
            share = weight / 2 / (len(micros) if exact else N)
            for micro in micros:
                for rank in (2 * island, 2 * island + 1):
                    (loss_of(model, step, micro, rank) * share).backward()
        torch.optim.SGD(model.parameters(), lr=LR).step()
        model.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "wrap, divisor, weight",
    [("ddp", "published", "equal"), ("fsdp2", "exact", "tokens"), ("ddp", "exact", "equal")],
)
@in_ranks(2, 2)
def test_drop_step_on_what_was_taken(me: Any, wrap: str, divisor: str, weight: str) -> Any:
    """Both ranks of an island leave out what is late on one of them, never the first and the last
    micro-batch; the step is on those taken, by the divisor that was asked for."""
    whole, clock, taken = net(), Clock(), []
    model = whole if wrap == "fsdp2" else DistributedDataParallel(whole)
    if wrap == "fsdp2":
        fully_shard(model, mesh=me.mesh())
    changes = {"drop": {"limit": 2.5, "divisor": divisor}, "reducer.weight": weight}
    optimizer, exchange = attached(model, **changes)
    for step in range(2):
        for micro in range(N):
            if exchange.time_is_up(micro, N):
                continue
            last = micro == N - 1
            if wrap == "fsdp2":
                model.set_requires_gradient_sync(last)
            else:
                model.require_backward_grad_sync = last
            (loss_of(model, step, micro, me.rank) / N).backward()
            clock.work(1.5 if me.rank == 3 else 0.1)
            exchange.report(tokens=3)
            taken.append((step, micro))
        optimizer.step()
        optimizer.zero_grad()
    exchange.finish()
    every = [(step, micro) for step in range(2) for micro in range(N)]
    want = [every, [(step, micro) for step, micro in every if micro != 2]]
    assert taken == want[me.island] and exchange.metrics()["dropped"] == 2 * me.island
    parts = [p.full_tensor() if wrap == "fsdp2" else p.detach() for p in whole.parameters()]
    for a, b in zip(parts, by_hand(want, divisor == "exact", weight == "tokens"), strict=True):
        torch.testing.assert_close(a, b)
    return parts


def recorded(islands: int, steps: int, micro: int) -> np.ndarray:
    """Seconds of micro-batches with the paper's log-normal delays [islands, steps, micro]."""
    delay = np.random.default_rng(11).lognormal(0.0, 1.0, (islands, steps, micro))
    return 0.45 * (1 + 0.5 * delay)


@pytest.mark.parametrize("last", [False, True], ids=["released", "last taken"])
@pytest.mark.parametrize("shape, overhead", [((4, 14, 12), 1.0), ((2, 3, 6), 0.1), ((1, 5, 9), 0)])
def test_drop_limit_is_the_released_choice(
    shape: tuple[int, int, int], overhead: float, last: bool
) -> None:
    """The chosen limit, its share of dropped micro-batches and its gain are those of the released
    rule, and of the same rule where the last micro-batch is always taken."""
    times = recorded(*shape)
    wall = times.sum(2).max(0).mean() + overhead
    found = drop.best_limit(times.tolist(), float(wall), last)
    assert found == pytest.approx(oracle.best(times, wall, last), rel=1e-9)
    assert shape[0] == 1 or found[1] > 0.01 and found[2] > 0.05


def play(exchange: Any, optimizer: Any, clock: Clock, times: Any, rank: int = 0) -> None:
    """A step for each row of `times`, seconds of its micro-batches."""
    model = exchange.host.parameter(0)
    for row in times:
        for micro, seconds in enumerate(row):
            if not exchange.time_is_up(micro, len(row)):
                model.square().sum().backward()
                clock.work(float(seconds))
        optimizer.step()
        optimizer.zero_grad()


@in_ranks(2, 1)
def test_drop_limit_chosen_once_and_resumed(me: Any) -> float:
    """All islands take the released choice from the times of both; a resume knows it, also an
    island without a state of its own."""
    times, clock, said = recorded(2, drop.RECORDED, 8), Clock(), heard(20)
    optimizer, exchange = attached(net(), drop={"limit": "auto"})
    play(exchange, optimizer, clock, times[me.island])
    used = times[:, drop.WARM :]
    limit, share, gain = oracle.best(used, used.sum(2).mean())
    assert exchange.drop.limit == pytest.approx(limit, rel=1e-6)
    line = next(text for text in said if "drop.limit" in text)
    assert f"{limit:.3g} s" in line and f"{100 * share:.1f} %" in line, line
    chosen, state = exchange.drop.limit, exchange.state_dict()
    assert state["limit"] == chosen
    exchange.detach()
    me.meet("again")
    _, exchange = attached(net(), drop={"limit": "auto"}, state=None if me.island else state)
    assert exchange.drop.limit == chosen and exchange.step == drop.RECORDED
    exchange.detach()
    return chosen


def test_drop_newcomer_knows_the_limit(run_ranks: Any) -> None:
    """An island that joins a run, before the limit is chosen or behind it, has the same limit."""

    def run(me: Any) -> tuple[float, bool]:
        drop.RECORDED = 8
        begun, end, clock = me.folder / "begun", me.folder / "end", Clock()
        while me.island == 2 and not begun.exists():
            time.sleep(0.02)
        optimizer, exchange = attached(net(), drop={"limit": "auto"})
        while not end.exists() or exchange.step < int(end.read_text()):
            play(exchange, optimizer, clock, recorded(1, 1, 6)[0])
            if exchange.step == 6:
                begun.touch()
            if me.island == 0 and len(exchange.peers.slots) == 3 and not end.exists():
                (me.folder / "part").write_text(str(exchange.step + 12))
                (me.folder / "part").rename(end)
            time.sleep(0.02)
        exchange.finish()
        return exchange.drop.limit, exchange.newcomer

    env = {"ISLAND_MIN": "2", "ISLAND_TIMEOUT": "20"}
    found = run_ranks(run, 3, 1, timeout=90, env=env)
    assert [newcomer for _, newcomer in found] == [False, False, True]
    assert len({limit for limit, _ in found}) == 1 and found[0][0] < 100


def test_drop_repeated_step_brings_the_limit() -> None:
    """A newcomer takes the limit with the step that it repeats, as the donor sends it."""
    _, exchange = attached(net(), drop={"limit": "auto"})
    runtime = exchange._runtime
    rates = run_specification.read_rates(exchange.host)
    tick = join.from_bytes(join.to_bytes(join.Tick(0, rates, 2.5)), join.Tick, "a step", ValueError)
    assert exchange.drop.limit == float("inf")
    with exchange.paused():
        replay._take(runtime, tick)
    assert exchange.drop.limit == exchange.drop.chosen == 2.5 and exchange.step == 1
    exchange.detach()


def test_drop_off_costs_nothing_and_changes_nothing() -> None:
    """Without the key nothing is ever dropped, counted or saved."""
    optimizer, exchange = attached(net())
    assert not any(exchange.time_is_up(micro, 3) for micro in (0, 2, 7))
    assert "dropped" not in exchange.metrics() and "limit" not in exchange.state_dict()
    older = preset("full").to_dict()
    del older["drop"]
    assert fsdp_demo.ExchangeConfig.from_dict(older).digest() == preset("full").digest()
    exchange.detach()


def test_drop_wrong_uses_refused() -> None:
    """Wrong values, and questions out of their order, are refused with what is allowed."""
    for limit in (0, -1, "fast", float("nan")):
        refusal(lambda value=limit: preset("demo", **{"drop.limit": value}), "drop.limit", "auto")
    refusal(lambda: preset("demo", drop={"limt": 1}), "unknown key drop.limt", "'limit'")
    refusal(lambda: preset("demo", **{"drop.divisor": "mean"}), "published, exact")
    both = {"drop.limit": 1, "reducer.weight": "tokens"}
    refusal(lambda: preset("diloco", **both), "counts what an island drops twice", "exact")
    assert preset("diloco", **both, **{"drop.divisor": "exact"}).drop.limit == 1.0
    text = "preset: full\ndrop:\n  limit: auto\n"
    assert (
        fsdp_demo.ExchangeConfig.from_yaml(preset("full", drop={}).to_yaml()).drop.limit == "auto"
    )
    assert text
    _, exchange = attached(net(), drop={"limit": 1.0})
    refusal(lambda: exchange.time_is_up(1, 4), "time_is_up(1, 4)", "from 0 on")
    exchange.time_is_up(0, 4)
    refusal(lambda: exchange.time_is_up(2, 4), "1 of 4")
    exchange.detach()


def test_drop_says_a_limit_without_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit shorter than one micro-batch is said once, and a loop that does not ask."""
    monkeypatch.setattr(drop, "clock", drop.clock)  # is put back
    for micro, word in ((4, "shorter than one micro-batch"), (2, "nothing can be dropped")):
        said, clock = heard(), Clock()
        optimizer, exchange = attached(net(), drop={"limit": 1.0})
        play(exchange, optimizer, clock, [[1.5] * micro] * 8)
        assert len([text for text in said if word in text]) == 1, said
        exchange.detach()
