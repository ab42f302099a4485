"""Two islands with one folder for their checkpoints: refused at the start where one machine sees
both, and by a true sentence at the first save elsewhere.
"""

from __future__ import annotations

import pytest

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager
from fsdp_demo.checkpoint.folders import Fence, place
from fsdp_demo.errors import NeedsDecision, Superseded
from fsdp_demo.peers.votes import Ranks

from ..support.inside import in_ranks


@in_ranks(2, 1)
def test_one_folder_of_two_islands_refused(me):
    """Two islands with one folder are refused before attach."""
    kept = CheckpointManager(me.folder / "shared", fsdp_demo.Topology.from_env())
    with pytest.raises(NeedsDecision, match="island0, island1 have one folder.*topology.name"):
        kept.resume_point("auto")


def test_one_folder_error_names_other_island(tmp_path):
    """A save into a folder that another island of the run has taken is refused as that, not as a
    later life.
    """
    mine, other, later = (Fence(tmp_path, "run", f"island{i}") for i in (0, 1, 0))
    alone = Ranks(None, 0, 1)
    mine.take(alone)
    other.take(alone)
    with pytest.raises(Superseded, match="is also the folder of 'island1': 'island0' saves"):
        mine.check()
    later.take(alone)
    with pytest.raises(Superseded, match="belongs to a later life"):
        mine.check()


def test_one_folder_by_any_path(tmp_path):
    """A folder is one place by any path, also before it exists."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert place(tmp_path / "there" / "ck") == place(tmp_path / "link" / ".." / "there" / "ck")
    assert place(tmp_path / "a") != place(tmp_path / "b")
