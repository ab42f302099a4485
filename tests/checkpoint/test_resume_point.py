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
from ..support.inside import in_ranks
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


def weights(job: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in job.model.parameters()])


@in_ranks(3, 1)
def test_resume_unlike_history_takes_over(me: Any) -> None:
    """An island whose checkpoint has another history than those of the others does not load it: all
    begin at the anchor. What is logged before `attach` is seen. Three islands save step 4, right
    after an exchange; the third one's has then another history and other weights.
    """
    logging.getLogger().handlers.clear()  # as in a script that sets up no logging
    job = Job(me.folder, False, 5)
    job.until(4)
    job.state.save(job.exchange, job.extra)
    with job.exchange.outer_parameters(job.model):
        anchor = weights(job)
    job.exchange.finish()
    job.state.finish()
    other, place = me.island == 2, me.folder / f"island{me.island}" / "checkpoint-4"
    if other:
        moved(place / "model")
        changed_head(place, history="b" * 16)
    else:
        changed_head(place, participants=[0, 1])
    os.environ["ISLAND_RUN"] += "-again"
    manager = CheckpointManager(place.parent, fsdp_demo.Topology.from_env())
    point = manager.resume_point(take_over=True)
    assert point is not None and point.tells and point.step == 4 and manager.common == -1
    assert (point.folder == place) == (not other)
    again = Job(me.folder, "auto", 6 + me.island)
    assert (again.state.step, again.exchange.step) == (0 if other else 4, 4)
    assert torch.equal(weights(again), anchor)
    again.exchange.detach()
    said = me.log.read_text()
    assert (f"[island{me.island}] resumed from checkpoint of step 4" in said) == (not other), said
    assert ("holds nothing of step 4 that fits" in said) == other


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


@in_ranks(2, 1)
def test_resume_damaged_newest_all_fall_back(me: Any) -> None:
    """Where the newest checkpoint of an island is damaged, all go on from the one before it; an
    island that has damaged ones alone takes over.
    """
    home, damaged = me.folder / f"home{me.island}", me.island == 0
    topology = fsdp_demo.Topology.from_env()
    first = CheckpointManager(home, topology)
    for step in (4, 8):
        place = leave(first, step, delta=step)
    if damaged:
        flip(place / "exchange" / "rank0.json")
    assert CheckpointManager(home, topology).resume_point("auto").step == 4
    assert damaged or names(home) == ["checkpoint-4"]
    if damaged:
        flip(home / "checkpoint-4" / "exchange" / "rank0.json")
    point, log = CheckpointManager(home, topology).resume_point("auto"), me.log.read_text()
    assert point.step == 8 and (point.folder is None) == damaged
    if damaged:
        assert "checkpoint-8/exchange/rank0.json is damaged" in log and "it is left out" in log
    else:
        assert "newer than step 4, from which training goes on: checkpoint-8" in log
