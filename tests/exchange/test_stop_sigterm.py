"""SIGTERM: every island stops after its current step, tells the others, and what they save goes on
as if nothing had been.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsdp_demo
from fsdp_demo import Topology, preset

from ..support.small import Small, same

PERIOD = 500
CONFIG = preset("diloco", period=PERIOD, inner_optimizers="as_is")


def stopped(me: Any, config: Any, strike: Callable[[Any, Small, int], None]) -> None:
    """Trains under guard, slowly; `strike(me, small, t)` runs ahead of each step. What is saved
    lies in the folder of the test.
    """
    logging.basicConfig(level=logging.INFO, force=True)
    small = Small(Topology.from_env(), config)

    def save() -> None:
        torch.save((time.time(), *small.save()), me.folder / f"saved{me.rank}")

    with fsdp_demo.guard(small.exchange, save, resume="python job.py --resume"):
        for t in range(1, 400):
            strike(me, small, t)
            small.train(t)
            time.sleep(0.02 + 0.01 * me.island)  # one island is slower: they part by steps


def saved_by(tmp_path: Path, ranks: int) -> list[Any]:
    folder = next(tmp_path.glob("ranks-*"))
    return [torch.load(folder / f"saved{i}", weights_only=True) for i in range(ranks)]


def wait_for(folder: Path, count: int, what: str) -> None:
    until = time.monotonic() + 20
    while len(list(folder.glob(f"{what}*"))) < count and time.monotonic() < until:
        time.sleep(0.005)


def test_stop_sigterm_all_and_resume(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Every preemption: no exchange is near, each island stands at a step of its own, and the next
    life is the uninterrupted run.
    """

    def strike(me: Any, small: Small, t: int) -> None:
        if t == 12:
            (me.folder / f"here{me.island}").write_text(str(os.getpid()))
            if me.island == 0:
                wait_for(me.folder, 2, "here")
                for path in me.folder.glob("here*"):
                    os.kill(int(path.read_text()), signal.SIGTERM)
        if t == 7 and me.island == 1:
            time.sleep(0.5)

    outcomes = run_ranks(
        stopped, 2, 1, timeout=40, env={"ISLAND_TIMEOUT": "30"}, check=False, args=(CONFIG, strike)
    )
    assert [o.status for o in outcomes] == [75, 75], [o.log for o in outcomes]
    saved = saved_by(tmp_path, 2)
    steps = [s[3]["step"] for s in saved]
    assert all(12 <= s < 60 for s in steps) and "stopped after step" in outcomes[0].log

    def on(me: Any, resumed: bool) -> Any:
        small = Small(Topology.from_env(), CONFIG, saved=saved[me.island][1:] if resumed else None)
        begun = small.exchange.step
        small.train(70)
        small.exchange.finish()
        return begun, [p.detach().clone() for p in small.params], small.exchange.digests_equal()

    again, whole = run_ranks(on, 2, 1, args=(True,)), run_ranks(on, 2, 1, args=(False,))
    assert [b for b, _, _ in again] == steps and all(equal for _, _, equal in again)
    assert all(same(a[1], b[1]) for a, b in zip(again, whole, strict=True))


def test_stop_run_can_start_again(run_ranks: Callable[..., Any]) -> None:
    """A run that stopped can start again under its name; a run that finished cannot."""

    def run(me: Any, last: bool) -> Any:
        small = Small(Topology.from_env(), preset("demo"))
        small.train(3)
        if last:
            small.exchange.finish()
        else:
            small.exchange.leave(stopped=False)
            small.exchange.detach()
        return small.exchange.step

    env = {"ISLAND_RUN": f"again-{os.getpid()}-{time.time_ns()}"}
    assert run_ranks(run, 2, 1, env=env, args=(False,)) == [3, 3]
    assert run_ranks(run, 2, 1, env=env, args=(True,)) == [3, 3]
    outcomes = run_ranks(run, 2, 1, env=env, args=(True,), check=False)
    errors = [o.error or "" for o in outcomes]
    assert all("has finished" in e and "new ISLAND_RUN" in e for e in errors)
