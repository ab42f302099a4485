"""Exchanges in pairs of islands: the schedule against the released rules, messages of two islands
only, their bytes, what is refused, a loss, a stop and a resume.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import Topology, preset
from fsdp_demo.config.pairs import BLOCK, PairSchedule, paired
from fsdp_demo.config.parts import Pairs
from fsdp_demo.exchange.backup import refuse_pairs
from fsdp_demo.exchange.plan import plan_model
from fsdp_demo.tools.planner.counting import cycle

from ..oracles import pairs as oracle
from ..support import threaded
from ..support.inside import in_threads
from ..support.refused import refusal
from ..support.small import Noise
from . import test_stop_together as stops

METHODS = {
    "noloco": preset("noloco", period=2, clip=None, inner_optimizers="as_is"),
    "saps": preset("saps", clip=None),
}

# ---- the schedule -------------------------------------------------------------------------------


def speeds(islands: int, seed: int) -> list[list[float]]:
    """Mbit/s: fast inside two halves, slow between them, and none both ways alike."""
    draw, half = random.Random(seed), islands // 2

    def speed(i: int, j: int) -> float:
        return draw.uniform(50, 90) if (i < half) == (j < half) else draw.uniform(1, 9)

    return [[speed(i, j) for j in range(islands)] for i in range(islands)]


def by_bandwidth(found: list[list[float]], fast: float = 40.0, rounds: int = 5) -> Pairs:
    return Pairs("bandwidth", tuple(map(tuple, found)), fast, rounds)


@pytest.mark.parametrize("islands", [4, 5, 6, 8])
@pytest.mark.parametrize("fast", [40.0, 70.0])
def test_pairs_by_bandwidth_equal_release(islands: int, fast: float) -> None:
    """On the same matrix and draws the pairs are the released rule's, which tries all ways to pair
    the islands off here; some rounds bridge the halves, and nobody is left over.
    """
    found = speeds(islands, islands)
    mine = PairSchedule(by_bandwidth(found, fast), islands, seed=3)
    theirs, bridged, met = oracle.Saps(found, fast, 5, seed=3), 0, set[tuple[int, int]]()
    for round in range(1, 81):
        pairs = theirs.next()
        assert mine.edges(round) == tuple(pairs), round
        assert len(pairs) == islands // 2
        bridged, met = bridged + theirs.bridged, met | set(pairs)
    assert 0 < bridged < 80 and theirs.joined(sorted(met))


@pytest.mark.parametrize("islands", [2, 3, 6])
def test_pairs_random_equal_release(islands: int) -> None:
    """Random pairs are the released grouping of a permutation of the same draws."""
    schedule = PairSchedule(Pairs(), islands, seed=1)
    for round in range(1, 40):
        pairs = oracle.random_pairs(islands, 1, round)
        assert schedule.edges(round) == tuple(pairs)
        for i in range(islands):
            mine = schedule.members(round, i)
            assert mine == next((p for p in pairs if i in p), (i,))
    assert paired([3, 1, 0, 2, 4]) == ((0, 3), (1, 2))  # 4 stays alone


def test_pairs_of_a_resume() -> None:
    """Whoever begins in the midst of a run, or asks for a round again, finds the same pairs; what
    is remembered of links begins anew after a block of rounds.
    """
    found = by_bandwidth(speeds(6, 2))
    whole = PairSchedule(found, 6, seed=0)
    every = [whole.edges(round) for round in range(1, BLOCK + 30)]
    for first in (1, 17, BLOCK, BLOCK + 1, BLOCK + 9):
        again = PairSchedule(found, 6, seed=0)
        assert [again.edges(r) for r in (first, first, first + 1)] == [
            every[first - 1], every[first - 1], every[first],
        ]  # fmt: skip
        assert again.edges(3) == every[2]


# ---- messages -----------------------------------------------------------------------------------


@in_threads(4)
@pytest.mark.parametrize("name", METHODS)
def test_pairs_bytes_go_to_the_partner_alone(topology: Any, name: str) -> None:
    """In steps each piece goes to the island of the pair and to nobody else, as many bytes as the
    plan says; the drift of the pair is known; `finish()` leaves one model, bit for bit.
    """
    made = METHODS[name]
    run, me = Noise(topology, made), topology.island
    tap = threaded.Tap(run.exchange)
    schedule, period = PairSchedule(Pairs(), 4, made.seed), made.channels[0].schedule.sync_every
    plan = plan_model(made, [(n, p.shape) for n, p in run.named], 4, rank=me)[0]
    for round in range(1, 7):
        before = len(tap.sent)
        for _ in range(period):
            run.step()
        (other,) = set(schedule.members(round, me)) - {me}
        assert {to for to, _ in tap.all_left(before)} == {other}, round
        assert 0 < run.exchange.drift < 0.1
    seen = run.exchange.metrics()
    assert seen["bytes_sent"] == plan.over(range(6 * period)).bytes_sent
    legs = cycle(made, [(n, p.shape) for n, p in run.named], 4).due
    assert (
        sum(m.bytes_out for each in legs.values() for m in each)
        == plan.message(period - 1).bytes_sent
    )
    page = run.exchange.ledger()
    assert page.total.sent == seen["bytes_sent"] and page.other.sent == 0
    assert run.exchange.participants == [0, 1, 2, 3]
    run.exchange.finish()
    mark = [float(t.double().sum()) for t in run.tensors()]
    assert mark == MARKS.setdefault(name, mark)


MARKS: dict[str, list[float]] = {}  # of the islands, which are threads


@in_threads(3)
def test_pairs_of_an_odd_number(topology: Any) -> None:
    """Of three islands one stays alone in each round: it sends nothing, and takes its own step."""
    made = METHODS["noloco"]
    run, schedule = Noise(topology, made), PairSchedule(Pairs(), 3, 0)
    for round in range(1, 7):
        before = run.exchange.metrics()["bytes_sent"]
        run.step()
        run.step()
        alone = len(schedule.members(round, topology.island)) == 1
        assert (run.exchange.metrics()["bytes_sent"] == before) == alone
        assert (run.exchange.drift == 0.0) == alone
    run.exchange.finish()


@in_threads(4)
def test_pairs_state_goes_back(topology: Any) -> None:
    """A state that is loaded in mid-run brings each island its own parameters and anchor."""
    run = Noise(topology, METHODS["noloco"])
    for _ in range(5):
        run.step()
    kept, state = run.tensors(), run.exchange.state_dict()
    state = {**state, "channels": {
        name: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tree.items()}
        for name, tree in state["channels"].items()
    }}  # fmt: skip

    def to_nine() -> list[torch.Tensor]:
        while run.exchange.step < 9:
            run.step()
        return run.tensors()

    first = to_nine()
    for (_, p), t in zip(run.named, kept, strict=True):
        p.data.copy_(t)
    run.exchange.load_state_dict(state)
    assert all(map(torch.equal, to_nine(), first))
    run.exchange.finish()


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("changes, parts", [
    ({"pairs": None}, ("replace_sent", "noloco or saps")),
    ({"schedule.delay": 1}, ("ask nobody else",)),
    ({"local_steps": "by_speed"}, ("all islands settle",)),
    ({"clip_scope": "islands", "clip": 1.0}, ("all islands settle",)),
    ({"norm_limit": 100.0}, ("norm_limit",)),
    ({"backup_islands": 1}, ("backup_islands=1",)),
    ({"codec.select": "topk"}, ("'random' or 'stride'",)),
    ({"codec.transform": "dct"}, ("no transform",)),
    ({"codec.value_dtype": "int8"}, ("fp32 or bf16",)),
    ({"applier.mix": 0.5}, ("takes mix=0",)),
    ({"pairs": {"by": "bandwidth"}}, ("a row and a column",)),
    ({"pairs": {"by": "bandwidth", "bandwidth": [[0.0, 1.0]]}}, ("a row and a column",)),
])  # fmt: skip
def test_pairs_refuse(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    """What pairs do not go with is refused with the reason."""
    refusal(lambda: preset("saps", **changes), *parts)


def test_pairs_refuse_other_methods() -> None:
    """Methods whose replicas must stay equal take no pairs, nor does a check of all islands."""
    for name in ("full", "demo", "diloco", "local_sgd"):
        refusal(
            lambda name=name: preset(name, pairs={}, norm_limit=None), "pairs=", "noloco or saps"
        )  # type: ignore[misc]
    refusal(
        lambda: preset("noloco", **{"schedule.when": "on_change", "schedule.at_most": 0}),
        "ask nobody else",
    )
    found = {"by": "bandwidth", "bandwidth": [[0.0, 1.0], [1.0, 0.0]]}
    refusal(lambda: PairSchedule(preset("saps", pairs=found).pairs, 3, 0), "2 rows for 3 islands")


def test_pairs_refuse_islands_that_come_and_go() -> None:
    """Where islands may come and go pairs are refused, with what to set."""
    given = {"ISLAND_RANK": "0", "ISLAND_COUNT": "4", "ISLAND_ENDPOINT": "127.0.0.1:1"}
    refusal(
        lambda: refuse_pairs(METHODS["saps"], Topology.from_env(given)),
        "Set ISLAND_MIN to ISLAND_COUNT",
    )
    more = {**given, "ISLAND_MIN": "4", "ISLAND_SLOTS": "5"}
    refusal(lambda: refuse_pairs(METHODS["saps"], Topology.from_env(more)), "of 5")
    refuse_pairs(METHODS["saps"], Topology.from_env({**given, "ISLAND_MIN": "4"}))


@in_threads(2)
def test_pairs_refuse_a_stop_together(topology: Any) -> None:
    """A stop that travels in payloads would reach the partner alone."""
    run = Noise(topology, METHODS["saps"])
    refusal(lambda: run.exchange.request_stop(together=True), "SIGTERM")
    run.exchange.finish()


# ---- a loss, and a stop -------------------------------------------------------------------------

ENV = {**stops.ENV, "ISLAND_MIN": "4"}
CASES = {"noloco": preset("noloco", period=6), "saps": preset("saps", topk=400, seed=5)}


def run(me: Any, folder: Path, case: str, *more: Any) -> Any:
    """`stops.run` of a method in pairs."""
    stops.CASES |= CASES
    return stops.run(me, folder, case, *more)


@pytest.mark.parametrize("case, at, ranks", [
    # pairs of rounds 10 to 13 are (0, 1) and (2, 3): two islands are rounds ahead of two
    ("saps", {0: 9, 1: 9, 2: 12, 3: 12}, 1),
    pytest.param("noloco", {0: 9, 1: 8, 2: 11, 3: 10}, 1, marks=pytest.mark.slow),
    pytest.param("saps", {0: 9, 1: 9, 2: 12, 3: 12}, 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_pairs_stop_and_resume(run_ranks, tmp_path, case, at, ranks) -> None:
    """All islands that are told to end stop behind the same exchange, save each its own state and
    end with 75; the resumed run comes to the bits of one that was never interrupted.
    """
    whole = run_ranks(run, 4, ranks, env=ENV, args=(tmp_path / "whole", case, None))
    (cut := tmp_path / "cut").mkdir()
    found = run_ranks(run, 4, ranks, env=ENV, args=(cut, case, at, 0.0), check=False)
    assert [f.status for f in found] == [75] * 4 * ranks, [f.log for f in found]
    stopped = stops.saved(cut)
    if case == "saps":
        assert len(set(stopped)) == 1 and stopped[0] >= 13
    again = run_ranks(run, 4, ranks, env=ENV, args=(cut, case, None))
    assert [began for began, _ in again[::ranks]] == stopped
    for (_, one), (_, two) in zip(whole, again, strict=True):
        assert all(torch.equal(one[n], two[n]) for n in one)
    assert (
        all(torch.equal(p, again[0][1][n]) for _, two in again[::ranks] for n, p in two.items())
        or ranks > 1
    )


def killed(me: Any) -> None:
    """Train in pairs; island 2 dies."""
    run = Noise(Topology.from_env(), METHODS["saps"])
    with fsdp_demo.guard(run.exchange, save=lambda: None):
        while True:
            if me.island == 2 and run.exchange.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step()


def test_pairs_loss_ends_the_run(run_ranks: Any) -> None:
    """The loss of one island ends the attempt on all, partner or not, with a sentence."""
    env = {**ENV, "ISLAND_DEAD": "4"}
    found = run_ranks(killed, 4, 1, env=env, check=False)
    assert [f.status for f in found] == [75, 75, -9, 75]
    assert all(
        "island 2" in f.log and "4 must go on together" in f.log for f in (found[0], found[3])
    )


@in_threads(4)
def test_pairs_stop_in_a_mesh(topology: Any) -> None:
    """In a mesh, too, all that are told to end stop at one step, though two were three rounds
    ahead of the others when these were told.
    """
    run, ahead = Noise(topology, preset("saps", clip=None, seed=5)), topology.island > 1
    run.exchange.raise_stopped(False)
    while not run.exchange.stopped:
        if run.exchange.step == (12 if ahead else 9):
            run.exchange.request_stop()
        run.step()
    ends = ENDS.setdefault("stopped", [])
    ends.append(run.exchange.step)
    run.exchange.leave(stopped=True)
    while len(ends) < 4:
        time.sleep(0.01)
    run.exchange.detach()
    assert len(set(ends)) == 1 and ends[0] >= 13


ENDS: dict[str, list[int]] = {}
