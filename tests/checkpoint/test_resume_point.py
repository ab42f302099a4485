"""From where islands go on where one has another history, or a damaged checkpoint."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager, folders
from fsdp_demo.errors import NeedsDecision

from ..support.damage import changed_head, flip
from .test_run_state import Job
from .test_saves import leave, names, single


def moved(model: Path) -> None:
    """Add one to all tensors in a model's files."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            about, tensors = file.metadata(), {k: file.get_tensor(k) + 1 for k in file.keys()}  # noqa: SIM118
        save_file(tensors, path, about)


def parted(me: Any) -> Any:
    """Three islands save step 4, right after an exchange; the third one's has then another history
    and other weights. What `take_over` finds, then steps and weights of `auto`, and its log.
    """
    logging.getLogger().handlers.clear()  # as in a script that sets up no logging
    job = Job(me.folder, False, 5)
    job.until(4)
    job.state.save(job.exchange, job.extra)
    with job.exchange.outer_parameters(job.model):
        anchor = weights(job)
    job.exchange.finish()
    job.state.finish()
    home = me.folder / f"island{me.island}"
    if me.island == 2:
        moved(home / "checkpoint-4" / "model")
        changed_head(home / "checkpoint-4", history="b" * 16)
    else:
        changed_head(home / "checkpoint-4", participants=[0, 1])
    os.environ["ISLAND_RUN"] += "-again"
    manager = CheckpointManager(home, fsdp_demo.Topology.from_env())
    point = manager.resume_point(take_over=True)
    assert point is not None and point.tells and point.step == 4 and manager.common == -1
    again = Job(me.folder, "auto", 6 + me.island)
    begun = point.folder == home / "checkpoint-4", again.state.step, again.exchange.step
    equal = torch.equal(weights(again), anchor)
    again.exchange.detach()
    return begun, equal, me.log.read_text()


def weights(job: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in job.model.parameters()])


def test_resume_unlike_history_takes_over(run_ranks: Any) -> None:
    """An island whose checkpoint has another history than those of the others does not load it: all
    begin at the anchor. What is logged before `attach` is seen.
    """
    for island, (begun, equal, said) in enumerate(run_ranks(parted, islands=3, procs=1)):
        assert begun == ((False, 0, 4) if island == 2 else (True, 4, 4)) and equal
        resumed = f"[island{island}] resumed from checkpoint of step 4" in said
        assert resumed == (island < 2), said
        assert ("holds nothing of step 4 that fits" in said) == (island == 2)


def test_resume_damaged_only_refused(tmp_path: Path, caplog: Any) -> None:
    """A run does not begin anew where a checkpoint is there, though damaged."""
    for spoil in (flip, Path.unlink):
        for name in ("exchange/rank0.json", folders.MANIFEST):
            place = leave(single(tmp_path), 5)
            spoil(place / name)
            for resume in ("auto", True, False):
                with pytest.raises(NeedsDecision, match="no island holds a whole") as found:
                    single(tmp_path).resume_point(resume)
            assert str(place) in str(found.value) and "fresh" not in str(found.value)
            folders.remove(place)
    (tmp_path / "checkpoint-7").mkdir()  # of another tool
    assert single(tmp_path).resume_point("auto") is None


def test_resume_damaged_newest_all_fall_back(run_ranks: Any) -> None:
    """Where the newest checkpoint of an island is damaged, all go on from the one before it; an
    island that has damaged ones alone takes over.
    """

    def job(me: Any) -> Any:
        home, topology = me.folder / f"home{me.island}", fsdp_demo.Topology.from_env()
        first = CheckpointManager(home, topology)
        for step in (4, 8):
            flipped = leave(first, step, delta=step)
            if me.island == 0 and step == 8:
                flip(flipped / "exchange" / "rank0.json")
        one = CheckpointManager(home, topology).resume_point("auto")
        found = names(home)
        if me.island == 0:
            flip(home / "checkpoint-4" / "exchange" / "rank0.json")
        two = CheckpointManager(home, topology).resume_point("auto")
        return one.step, found, two.step, two.folder is None, me.log.read_text()

    (a, b) = run_ranks(job, islands=2, procs=1)
    assert a[0] == b[0] == 4 and b[1] == ["checkpoint-4"]
    assert a[2:4] == (8, True) and b[2:4] == (8, False)
    assert "checkpoint-8/exchange/rank0.json is damaged" in a[4] and "it is left out" in a[4]
    assert "newer than step 4, from which training goes on: checkpoint-8" in b[4]
