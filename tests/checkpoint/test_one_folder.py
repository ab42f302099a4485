"""Two islands with one folder for their checkpoints: refused at the start where one machine sees
both, and by a true sentence at the first save elsewhere.
"""

from __future__ import annotations

import pytest

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager
from fsdp_demo.checkpoint.folders import Fence, place
from fsdp_demo.errors import NeedsDecision, Superseded


def test_islands_that_share_a_folder_are_refused_before_attach(run_ranks):
    def job(me):
        kept = CheckpointManager(me.folder.parent / "shared", fsdp_demo.Topology.from_env())
        try:
            return kept.resolve_resume_step("auto")
        except NeedsDecision as error:
            return str(error)

    for said in run_ranks(job, islands=2, procs=1):
        assert "island0, island1 have one folder" in said and "topology.name" in said


def test_a_folder_that_another_island_of_the_run_took_is_no_later_life(tmp_path):
    mine, other, later = (Fence(tmp_path, "run", f"island{i}") for i in (0, 1, 0))
    mine.begin("a")
    other.begin("b")
    with pytest.raises(Superseded, match="is also the folder of 'island1': 'island0' saves"):
        mine.check()
    later.begin("c")
    with pytest.raises(Superseded, match="belongs to a later life"):
        mine.check()


def test_a_place_is_one_by_any_path_and_before_it_is_there(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert place(tmp_path / "there" / "ck") == place(tmp_path / "link" / ".." / "there" / "ck")
    assert place(tmp_path / "a") != place(tmp_path / "b")
