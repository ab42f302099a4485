"""The way out ends within ISLAND_STOP, also where a rank of the island does not come to the save,
is dead, or stands in its step: nothing is saved then, the status is 75, and a line says why.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager, RunState

from ..support.two_layers import step
from .test_survivors import Small, loss


def told(me: Any, strike: str) -> None:
    """An island that saves step 2, and is told to end in its fourth step; rank 1 strikes."""
    logging.basicConfig(level=logging.INFO, force=True)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    topology = fsdp_demo.Topology.from_env()
    manager = CheckpointManager(me.folder.parent / "saved", topology)
    state = RunState(manager, model, optimizer)
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, topology=topology)

    def extra() -> dict[str, Any]:
        if me.proc == 1 and strike == "hangs":
            time.sleep(60)
        if me.proc == 1 and strike == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    with fsdp_demo.guard(exchange, save=lambda: state.save(exchange, extra, last=True)):
        for t in range(400):
            if t == 0 and strike == "begins":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            if t == 2:
                state.save(exchange)
            if t == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                if strike == "stands":
                    time.sleep(60)
            step(optimizer, loss(model, me.island, t))


@pytest.mark.parametrize(("strike", "statuses", "says"), [
    ("comes", [75, 75], "saved; to resume, start again with"),
    ("hangs", [75, 75], "another rank of the island did not come to it"),
    ("dies", [75, -signal.SIGKILL], "nothing was saved: a rank of this island is gone"),
    ("stands", [75, 75], "step 4 still is under way: it ends, and nothing is saved"),
    ("begins", [75, 75], "to end before its first step, so there is nothing to save"),
])  # fmt: skip
def test_stop_ends_within_island_stop(run_ranks, tmp_path, strike, statuses, says) -> None:
    """The way out ends within ISLAND_STOP, whatever a rank of the island does."""
    env = {"ISLAND_COUNT": "1", "ISLAND_STOP": "3" if strike in ("hangs", "stands") else "20"}
    found = run_ranks(told, 1, 2, env=env, args=(strike,), check=False, timeout=50)
    assert [f.status for f in found] == statuses, [f.log for f in found]
    assert any(says in f.log for f in found)
    whole = tmp_path.glob("*/checkpoint-*/manifest.json")
    steps = sorted(int(p.parent.name.split("-")[1]) for p in whole)
    assert steps[:1] == [2] * (strike != "begins")
    assert len(steps) == {"comes": 2, "begins": 0}.get(strike, 1)


def stopped_alone(me: Any, how: int) -> None:
    """Two islands train; rank 1 of the second one gets the signal `how`. Nothing is saved, so the
    process ends as soon as it has left.
    """
    logging.basicConfig(level=logging.INFO, force=True)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model)
    with fsdp_demo.guard(exchange):
        for t in range(100):
            if t == 10 and (me.island, me.proc) == (1, 1):
                os.kill(os.getpid(), how)
            time.sleep(0.05)
            step(optimizer, loss(model, me.island, t))


@pytest.mark.parametrize(
    ("how", "says", "never"),
    [(signal.SIGTERM, "has left", "is lost"), (signal.SIGKILL, "is lost", "has left")],
)
def test_stop_in_order_is_no_loss_for_the_others(run_ranks, how, says: str, never: str) -> None:
    """The others log that an island has left where all its ranks were stopped, and that it is lost
    where one of them was killed.
    """
    found = run_ranks(stopped_alone, 2, 2, args=(how,), check=False, timeout=60)
    for log in (f.log for f in found[:2]):
        assert f"island 1 (island1) {says}: " in log and f"island 1 (island1) {never}" not in log
    assert f"epoch 1: island 1 (island1) {says}, training" in found[0].log
