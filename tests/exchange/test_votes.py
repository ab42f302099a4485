"""The ranks of one island ask each other at every exchange whether they stop, and otherwise about
once a second: they still stop at one step.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.peers import votes as pacing
from fsdp_demo.peers.votes import VOTE_STEPS, VotePace

from ..support import probe
from ..support.everywhere import Everywhere
from ..support.inside import in_ranks

FAR = preset("diloco", period=1000, inner_optimizers="as_is", clip=None)


class Votes:
    """An exchange over whole copies, which have nothing else to say to each other: the steps at
    which the island has voted, and which n it has agreed on.
    """

    def __init__(self, config: Any):
        self.model = probe.Probe(only=["bias", "one"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.exchange = fsdp_demo.attach(self.optimizer, config, model=self.model)
        self.note()

    def note(self) -> None:
        """From here on."""
        self.voted: list[int] = []
        self.agreed: list[int] = []
        pace = self.exchange._runtime._pace
        agree = pace.agreed

        def agreed(slowest: float) -> None:
            agree(slowest)
            self.voted.append(self.exchange.step)
            self.agreed.append(pace.steps)

        pace.agreed = agreed

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()


def test_vote_first_step_then_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks vote at the first step, and then about once a second."""
    now = [100.0]
    monkeypatch.setattr(pacing.time, "monotonic", lambda: now[0])
    ranks = [VotePace(), VotePace()]
    voted, steps = [], []
    for step in range(400):
        now[0] += 0.05 if step < 300 else 5.0
        due = [r.due() for r in ranks]
        assert due[0] == due[1]
        if due[0]:
            voted.append(step)
            slowest = max(r.seconds() for r in ranks)
            for r in ranks:
                r.agreed(slowest)
            steps.append(ranks[0].steps)
    assert voted[:4] == [0, 1, 3, 7] and steps[:2] == [1, 2]  # it doubles at most
    assert {b - a for a, b in zip(voted, voted[1:], strict=False) if 100 < a < 270} <= {19, 20}
    assert voted[-50:] == list(range(350, 400))  # slow steps vote each


def test_vote_after_many_quick_steps() -> None:
    """Quick steps go without a vote for at most VOTE_STEPS steps."""
    pace = VotePace()
    for _ in range(20):
        pace.agreed(1e-6)
    assert pace.steps == VOTE_STEPS
    assert [pace.due() for _ in range(VOTE_STEPS)] == [False] * (VOTE_STEPS - 1) + [True]
    assert pace.due(now=True)


def test_vote_island_stops_at_one_step(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """All ranks of an island stop at one step. SIGTERM to one rank between two votes. The other
    islands are far from an exchange.
    """

    def run(me: Any) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        votes = Votes(FAR)

        def save() -> None:
            torch.save((votes.exchange.step, votes.agreed), me.folder / f"saved{me.rank}")

        with fsdp_demo.guard(votes.exchange, save):
            for t in range(900):
                if t == 40 and me.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.02 * (1 + me.proc))
                votes.step()

    outcomes = run_ranks(run, 1, 2, timeout=60, check=False)
    assert [o.status for o in outcomes] == [75, 75], [o.log for o in outcomes]
    folder = next(tmp_path.glob("ranks-*"))
    (step, agreed), other = (torch.load(folder / f"saved{r}") for r in range(2))
    assert (step, agreed) == other, "the ranks have counted alike"
    assert 41 <= step <= 41 + VOTE_STEPS and len(agreed) < step / 2


def test_vote_dead_rank_ends_others(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """A rank that dies ends the other ranks of its island."""

    def run(me: Any) -> None:
        votes = Votes(FAR)
        for t in range(900):
            if t == 30 and me.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
            (me.folder / f"step{me.rank}").write_text(str(t))
            votes.step()

    outcomes = run_ranks(run, 1, 2, timeout=60, check=False)
    assert outcomes[1].status == -signal.SIGKILL
    assert outcomes[0].status != 0 and outcomes[0].error, outcomes[0].log
    at = int((next(tmp_path.glob("ranks-*")) / "step0").read_text())
    assert 30 <= at <= 30 + VOTE_STEPS


@pytest.mark.parametrize("config", [
    preset("diloco", period=8, inner_optimizers="as_is").changed({"schedule.delay": 3}),
    preset("demo", value_dtype="fp32").changed({"schedule.sync_every": 8, "schedule.delay": 3}),
], ids=["after the step", "before the step"])  # fmt: skip
def test_vote_at_send_and_apply(run_ranks, everywhere: Everywhere, config: Any) -> None:
    """The ranks vote when an exchange leaves and when it is applied, also with a delay; both
    islands agree in the end.
    """
    everywhere.setattr(pacing, "VOTE_EVERY", 1e9)  # else at most every VOTE_STEPS steps

    def run(me: Any) -> Any:
        votes = Votes(config)
        for _ in range(40):
            votes.step()
        voted = [s - 1 for s in votes.voted]
        left = [r.step for r in votes.exchange.timeline()]
        applied = [r.applied for r in votes.exchange.timeline()]
        votes.exchange.finish()
        return voted, left, applied, votes.exchange.digests_equal()

    found = run_ranks(run, 2, 2, timeout=90)
    voted, left, applied, equal = found[0]
    assert all(f == found[0] for f in found) and equal
    assert len(left) >= 4 and [a - b for a, b in zip(applied, left, strict=True)] == [3] * len(left)
    assert {*left, *applied} <= set(voted)
    # beside the doubling at the start
    assert len(voted) <= len({*left, *applied}) + 10


def test_vote_stop_together_lands_with_exchange(run_ranks, everywhere: Everywhere) -> None:
    """`request_stop(together=True)` on one rank: at the same step on all ranks of all islands."""
    config = preset("diloco", period=8, inner_optimizers="as_is").changed({"schedule.delay": 3})
    everywhere.setattr(pacing, "VOTE_EVERY", 1e9)

    def run(me: Any) -> Any:
        votes = Votes(config)
        for t in range(60):
            if t == 12 and me.rank == 3:
                votes.exchange.request_stop(together=True)
            try:
                votes.step()
            except fsdp_demo.Stopped:
                break
        votes.exchange.detach()
        return votes.exchange.step

    assert run_ranks(run, 2, 2, timeout=90) == [19] * 4  # leaves in step 15, applied in 18


@in_ranks(1)
def test_vote_first_step_after_resume(me: Any) -> None:
    """A resumed run votes at its first step."""
    votes = Votes(FAR)
    for _ in range(5):
        votes.step()
    state = votes.exchange.state_dict()
    votes.exchange.detach()
    os.environ["ISLAND_RUN"] += "-again"
    given = {"model": votes.model, "state": state, "step": 5}
    votes.exchange = fsdp_demo.attach(votes.optimizer, FAR, **given)
    votes.note()
    for _ in range(3):
        votes.step()
    votes.exchange.detach()
    assert votes.voted[:2] == [6, 7]
