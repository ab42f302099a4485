"""All islands are told to end, as by a scheduler's time limit: they stop between the same messages,
and a resume comes to the bits of a run that was never interrupted.

Real processes over ZeroMQ, with `guard` around the loop and `RunState` as the saver.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.checkpoint import CheckpointManager, RunState

from ..support.two_layers import step, train
from .test_local_steps import given_speeds
from .test_survivors import BY_SGD, Small, loss, optimizer_for

ENV = {"ISLAND_DEAD": "8", "ISLAND_STOP": "20"}
STEPS = 24
CASES = {
    "full": preset("full"),
    "demo": preset("demo"),
    "demo, late": preset("demo", **{"schedule.delay": 2}),
    "diloco": preset("diloco", period=6, momentum_warmup=0),
    "diloco, far": preset("diloco", period=500),  # no exchange is near
    "diloco, int4": preset("diloco", period=7, momentum_warmup=0, value_dtype="int4"),
    "sparse_loco": preset("sparse_loco", period=6),
    "sign_loco": preset("sign_loco", period=7, momentum_warmup=1),
    "muloco": preset("muloco", period=6),
    "decoupled_momentum": preset("decoupled_momentum", period=6),
    "decoupled_momentum, late": preset("decoupled_momentum", period=6, **{"schedule.delay": 3}),
    "streaming_diloco": preset("streaming_diloco", period=8, delay=3, layers=1),
    "local_sgd, late": preset("local_sgd", period=6, **{"schedule.delay": 2, "applier.mix": 0.5}),
    "desloc": preset("desloc", period=7),
}
BY_SPEED = {
    "by speed": preset("diloco", period=6, momentum_warmup=0, local_steps="by_speed"),
    "by speed, late": preset("sparse_loco", period=6, local_steps="by_speed",
        **{"schedule.delay": 2}),
}  # fmt: skip
QUICK = ("demo", "diloco, far", "sparse_loco", "streaming_diloco")


def run(
    me, folder, case: str, at: dict[int, int] | None, late: float = 0.0, dies: bool = False
) -> Any:
    """Train to STEPS, or until this island is told to end ahead of its step `at[island]`. The
    island with the highest number is told while it trains on, as far as it comes, so it may stand
    in an exchange; the others are told `late` seconds later. late below 0: it is told at once, and
    alone. dies: it is killed instead.
    """
    config, model = {**CASES, **BY_SPEED}[case], Small()
    given_speeds((1.0, 3.0))
    optimizer = optimizer_for(case, model)
    topology = fsdp_demo.Topology.from_env()
    manager = CheckpointManager(folder / topology.name, topology)
    state = RunState(manager, model, optimizer, facts={})
    state.restore("auto")
    given = {"topology": topology, "step": state.step, "state": state.saved}
    exchange = fsdp_demo.attach(optimizer, config, model=model, **given)
    began, last = exchange.step, me.island == topology.islands - 1
    go = folder / "told"

    def tell() -> None:
        while not go.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL if dies else signal.SIGTERM)

    with fsdp_demo.guard(exchange, save=lambda: state.save(exchange, last=True)):
        while exchange.step < STEPS:
            if exchange.step == 6:
                state.save(exchange)  # what a resume would go back to
            if at is not None and exchange.step == at[me.island]:
                (folder / f"at{me.island}").touch()
                if last and late < 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                elif last:
                    threading.Thread(target=tell, daemon=True).start()
                else:
                    while not all((folder / f"at{i}").exists() for i in at):
                        time.sleep(0.01)
                    time.sleep(0.3)  # the last one has come as far as it can
                    go.touch()
                    time.sleep(max(late, 0.0))
                    os.kill(os.getpid(), signal.SIGTERM)
            elif at is not None and last and exchange.step > at[me.island]:
                time.sleep(0.1)  # so that it is told before it comes to the end
            step(optimizer, loss(model, me.island, exchange.step))
        exchange.finish()
    return began, {n: p.detach().clone() for n, p in model.named_parameters()}


def interrupted(run_ranks, folder, case, at: dict[int, int], ranks=1, late=0.0) -> list[Any]:
    args = (folder, case, at, late)
    found = run_ranks(run, len(at), ranks, env=ENV, args=args, check=False)
    assert [f.status for f in found] == [75] * len(at) * ranks, [f.log for f in found]
    return found


def saved(folder: Path) -> list[int]:
    """The steps that the islands have saved."""
    return [
        max(int(path.name.split("-")[1]) for path in island.glob("checkpoint-*"))
        for island in sorted(folder.glob("island*"))
    ]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
@pytest.mark.parametrize("at", [
    {0: 9, 1: 11}, {0: 8, 1: 8}, pytest.param({0: 11, 1: 10}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_stop_resume_equals_uninterrupted_run(run_ranks, tmp_path, case, at) -> None:
    """After a common stop the resumed run comes to the bits of a run without interruption."""
    if case.startswith(BY_SGD):  # nobody comes further than the other: they exchange in each step
        at = {i: min(at.values()) for i in at}
    check(run_ranks, tmp_path, case, at)


def check(run_ranks, folder, case: str, at: dict[int, int], ranks: int = 1, late=0.0) -> None:
    """Nobody loses a step of its own, and the end is that of a run without interruption."""
    whole = run_ranks(run, len(at), ranks, env=ENV, args=(folder / "whole", case, None))
    (cut := folder / "cut").mkdir()
    assert "stopped after step" in interrupted(run_ranks, cut, case, at, ranks, late)[0].log
    stopped = saved(cut)
    found = run_ranks(run, len(at), ranks, env=ENV, args=(cut, case, None))
    assert [began for began, _ in found[::ranks]] == stopped
    assert all(step >= at[i] for i, step in enumerate(stopped))
    for (_, one), (_, two) in zip(whole, found, strict=True):
        assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("at", [{0: 10, 1: 9}, pytest.param({0: 7, 1: 6}, marks=pytest.mark.slow)])
def test_stop_islands_of_unlike_speed(run_ranks, tmp_path, at) -> None:
    """Islands that take unlike steps (6 and 2 in a round) stop between the same messages, none in
    the midst of ticks that it leaves out, and resume bit for bit.
    """
    check(run_ranks, tmp_path, "by speed", at)


@pytest.mark.slow
def test_stop_in_the_midst_of_left_out_steps(run_ranks, tmp_path) -> None:
    """An island that waits for a late message in a tick that it leaves out, and is told to end,
    resumes there with a step of its own: all islands end at one step with one model.
    """
    interrupted(run_ranks, tmp_path, "by speed, late", {0: 14, 1: 15})
    assert saved(tmp_path)[1] == 20  # it takes steps 18 and 21
    found = run_ranks(run, 2, 1, env=ENV, args=(tmp_path, "by speed, late", None))
    assert [began for began, _ in found] == saved(tmp_path)
    (_, one), (_, two) = found
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_stop_run_can_start_again(run_ranks: Any) -> None:
    """A run that stopped can start again under its name; a run that finished cannot."""

    def life(me: Any, last: bool) -> Any:
        model = Small()
        optimizer = optimizer_for("demo", model)
        exchange = fsdp_demo.attach(optimizer, "demo", model=model)
        train(optimizer, lambda t: loss(model, me.island, t), 3)
        if last:
            exchange.finish()
        else:
            exchange.leave(stopped=False)
            exchange.detach()
        return exchange.step

    more = {"env": {"ISLAND_RUN": f"again-{os.getpid()}-{time.time_ns()}"}}
    for last in (False, True):
        assert run_ranks(life, 2, 1, **more, args=(last,)) == [3, 3]
    errors = [o.error or "" for o in run_ranks(life, 2, 1, **more, args=(True,), check=False)]
    assert all("has finished" in e and "new ISLAND_RUN" in e for e in errors)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["demo, late", "diloco", "streaming_diloco"])
def test_stop_three_islands_unlike_steps(run_ranks: Any, tmp_path: Path, case: str) -> None:
    """Three islands that are told to stop at unlike steps stop between the same messages."""
    at = {0: 10, 1: 9, 2: 10}
    check(run_ranks, tmp_path, case, at if case != "demo, late" else dict.fromkeys(at, 9))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sparse_loco", "decoupled_momentum, late"])
def test_stop_islands_of_two_ranks(run_ranks, tmp_path: Path, everywhere: Any, case: str) -> None:
    """Islands of two ranks that are told to stop resume bit for bit."""
    everywhere.setattr("fsdp_demo.peers.votes", "VOTE_EVERY", 0.0)
    check(run_ranks, tmp_path, case, {0: 9, 1: 10}, ranks=2)


@pytest.mark.slow
def test_stop_during_long_exchange(run_ranks: Any, tmp_path: Path) -> None:
    """An island that waits seven seconds in an exchange still saves. The time to save is what the
    launcher leaves (ISLAND_STOP), not less.
    """
    check(run_ranks, tmp_path, "diloco", {0: 9, 1: 11}, late=7.0)


@pytest.mark.slow
def test_stop_one_told_long_before(run_ranks: Any, tmp_path: Path) -> None:
    """One island is told to stop long before the other. Its part counts in an exchange that it has
    not applied. So it takes over from the other, and nobody goes back.
    """
    at = {0: 14, 1: 8}  # the one with the highest number is told first, and leaves
    interrupted(run_ranks, tmp_path, "diloco", at, late=-1.0)
    stopped = saved(tmp_path)
    assert stopped[0] in (14, 15) and 8 <= stopped[1] < 12
    found = run_ranks(run, 2, 1, env=ENV, args=(tmp_path, "diloco", None))
    assert [began for began, _ in found] == [stopped[0]] * 2
    (_, one), (_, two) = found
    assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["diloco", "decoupled_momentum, late"])
def test_stop_one_dies_meanwhile(run_ranks: Any, tmp_path: Path, case: str) -> None:
    """One island dies while all are told to stop. The others stop together without it; nobody goes
    back to the last checkpoint.
    """
    at = {0: 9, 1: 10, 2: 9}
    args = (tmp_path, case, at, 0.0, True)
    found = run_ranks(run, 3, 1, env=ENV, args=args, check=False)
    assert [f.status for f in found[:2]] == [75, 75], [f.log for f in found]
    stopped = saved(tmp_path)[:2]  # the third died behind an earlier checkpoint
    assert [step >= at[i] for i, step in enumerate(stopped)] == [True, True]
    found = run_ranks(run, 3, 1, env=ENV, args=(tmp_path, case, None))
    # where an island takes over, all begin at one step: the furthest
    assert all(began >= step for (began, _), step in zip(found, stopped, strict=False))
    (_, one), (_, two), (_, three) = found
    assert all(torch.equal(one[n], two[n]) and torch.equal(one[n], three[n]) for n in one)
