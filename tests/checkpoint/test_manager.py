"""`CheckpointManager`: whole checkpoints, written beside the training, and which of them stay; what
all islands hold.
"""

import json

import pytest

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager
from fsdp_demo.checkpoint.folders import MANIFEST, UNFINISHED, found, unsealed
from fsdp_demo.checkpoint.manager import ResumePoint

from ..support.damage import cut
from ..support.inside import in_ranks


def single(tmp_path, keep=2):
    return CheckpointManager(tmp_path, fsdp_demo.Topology(), keep)


def write(text="x"):
    return lambda folder: (folder / "a.txt").write_text(text) and None


def test_save_whole_or_absent(tmp_path):
    """A checkpoint is whole or not there."""
    kept = single(tmp_path)
    kept.save(10, write())
    assert list(kept.whole()) == [10]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".life.json", "checkpoint-10"]
    content = json.loads((kept.path(10) / MANIFEST).read_text())
    assert content["version"] == 1
    assert content["step"] == 10
    assert content["files"]["a.txt"]["bytes"] == 1

    def fails(folder):
        (folder / "a.txt").write_text("half")
        raise OSError("disk full")

    kept.save(20, fails)  # a warning: test_saves.py
    assert list(kept.whole()) == [10] and not (tmp_path / "checkpoint-20").exists()
    kept.save(20, write())
    assert list(kept.whole()) == [10, 20]
    (kept.path(20) / "a.txt").write_text("xy")  # another size
    assert list(kept.whole()) == [10]
    kept.save(20, write("z"))
    (kept.path(20) / "a.txt").write_text("y")  # the same size
    assert list(kept.whole()) == [10, 20]
    kept.verify(kept.path(10))
    with pytest.raises(ValueError, match="a.txt: checksum does not fit"):
        kept.verify(kept.path(20))


def test_link_is_no_checkpoint(tmp_path):
    """A link to a checkpoint beside it (`last-checkpoint` of `swift sft`) is no other one."""
    kept, link = single(tmp_path), tmp_path / "last-checkpoint"
    for step in (1, 2, 3):
        kept.save(step, write())
        link.unlink(missing_ok=True)
        link.symlink_to(f"checkpoint-{step}")
        (kept.path(step) / UNFINISHED).touch()
        again = single(tmp_path)
        again.adopt()
        assert again.whole()[step] == kept.path(step)
    assert list(kept.whole()) == [2, 3]
    (kept.path(3) / MANIFEST).unlink()
    (kept.path(3) / "exchange").mkdir()
    assert unsealed(tmp_path, found(tmp_path)) == [(-1, kept.path(3))]


def test_rotation_keeps_newest(tmp_path):
    """The newest checkpoints stay."""
    kept = single(tmp_path)
    for step in range(1, 5):
        kept.save(step, write())
    assert list(kept.whole()) == [3, 4] and kept.common == 4
    assert single(tmp_path).resume_point() == ResumePoint(4, kept.path(4), False)
    assert single(tmp_path / "other").resume_point() is None
    with pytest.raises(ValueError, match=r"holds checkpoints of steps \[3, 4\]: go on from there"):
        single(tmp_path).resume_point(resume=False)
    cut(kept.path(4) / MANIFEST, 20)
    assert single(tmp_path).resume_point().step == 3
    manifest = kept.path(3) / MANIFEST
    manifest.write_text(
        json.dumps(json.loads(manifest.read_text()) | {"version": 2, "package": "9.1"})
    )
    with pytest.raises(ValueError, match="version 2, written by fsdp_demo 9.1"):
        single(tmp_path).resume_point()
    with pytest.raises(ValueError, match="keep=0"):
        single(tmp_path, 0)


def test_save_in_background(tmp_path):
    """Training goes on while a checkpoint is written."""
    import threading

    kept, may = single(tmp_path), threading.Event()
    kept.save(1, lambda folder: lambda: may.wait(20) and write("late")(folder), wait=False)
    assert list(kept.whole()) == []
    may.set()
    kept.save(2, write(), wait=False)
    kept.close()
    assert list(kept.whole()) == [1, 2] and (kept.path(1) / "a.txt").read_text() == "late"
    kept.save(3, lambda folder: lambda: 1 / 0, wait=False)
    with pytest.raises(ZeroDivisionError):
        kept.wait()
    assert list(kept.whole()) == [1, 2]


def plays(me, plan, keep=2, resume=True, take_over=False):
    """Saves the steps of `plan` for this island in turns with the others, then what is there and
    what is agreed on in the next run.
    """
    topology = fsdp_demo.Topology.from_env()
    kept = CheckpointManager(me.folder / f"home{me.island}", topology, keep)
    for turn, (island, steps) in enumerate(plan):
        for step in steps if island == me.island else ():
            kept.save(step, lambda folder: (folder / f"rank{me.proc}").write_text("x") and None)
        me.meet(turn)
    kept.close()
    whole, again = list(kept.whole()), CheckpointManager(kept.root, topology, keep)
    try:
        point = again.resume_point(resume, take_over)
        return whole, point and point.step
    except ValueError as error:
        return whole, str(error)


def test_rotation_keeps_what_others_need(run_ranks):
    """No island removes a checkpoint that another still needs. Island 0 is far ahead; island 1 has
    said that it holds 2, and later 8.
    """
    ahead = [(0, [2]), (1, [2]), (0, [4, 6, 8, 10]), (1, [])]
    assert (
        run_ranks(plays, islands=2, procs=2, args=(ahead,))
        == [([2, 4, 6, 8, 10], 2)] * 2 + [([2], 2)] * 2
    )
    after = [*ahead, (1, [4, 6, 8]), (0, [12])]
    (mine, step), _, (theirs, _), _ = run_ranks(plays, islands=2, procs=2, args=(after,))
    assert step == 8 and mine == [8, 10, 12] and theirs == [6, 8]


def test_resume_nothing_in_common_refused(run_ranks):
    """A resume without a common checkpoint is refused, and the error lists what each
    island holds.
    """
    plan = [(0, [4]), (1, [6])]
    for _, text in run_ranks(plays, islands=2, procs=1, args=(plan,)):
        assert "no checkpoint is held by all islands (island0: 4; island1: 6)" in text
        assert "--take-over" in text
    for islands, procs, saved, step in ((2, 2, plan, 6), (2, 1, [(0, [4])], 4), (3, 1, [], None)):
        found = run_ranks(plays, islands, procs, args=(saved, 2, True, saved != []))
        assert {chosen for _, chosen in found} == {step}


@in_ranks()
def test_resume_islands_differ_refused(me):
    """An island that resumes beside one that does not is refused."""
    with pytest.raises(ValueError, match="islands differ in resume .island0: True, island1: False"):
        CheckpointManager(me.folder / str(me.island), fsdp_demo.Topology.from_env()).resume_point(
            resume=me.island == 0
        )
