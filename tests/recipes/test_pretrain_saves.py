"""recipes/pretrain.py and its checkpoints: a full disk, no checkpoint to begin at, a run that saves
nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from types import SimpleNamespace

import pytest

from fsdp_demo.checkpoint import run_state

from .test_pretrain_resume import RECIPES, source, train  # noqa: F401

ONE = {"islands": 2, "procs": 1, "timeout": 100, "env": {"LOCAL_RANK": "-1"}}  # without a launcher
DILOCO = ["--no-shard", "--exchange", "diloco", "--set", "period=4"]


def apart(rank, source, where, options, at=None):  # noqa: F811
    """As `train`, each island in an output of its own: no machine sees another's checkpoints."""
    # pytest's handlers would keep it
    logging.basicConfig(format="%(message)s", level=logging.INFO, force=True)
    return train(rank, source, source / where / f"machine{rank.island}", options, at)


def held(source, where):  # noqa: F811
    found = (source / where).glob("machine*/island*/*-*")
    return sorted(f"{p.parent.name[-1]}/{p.name}" for p in found if p.name[0] != ".")


def last(source, where, island):  # noqa: F811
    folder = source / where / f"machine{island}" / f"island{island}"
    return json.loads((folder / "summary.json").read_text())


def test_pretrain_resume_auto_without_checkpoints_begins(run_ranks, source):  # noqa: F811
    """`--resume auto` begins at step 0 where no island holds a checkpoint."""
    options = [*DILOCO, "--save-every", 4, "--steps", 4, "--resume", "auto"]
    out = run_ranks(apart, **ONE, args=(source, "run", options))
    assert out[0]["steps"] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", [[], ["--save-async"]])
def test_pretrain_save_full_disk_on_one_island(run_ranks, source, how):  # noqa: F811
    """A full disk on one island ends no run."""
    options = [*DILOCO, "--save-every", 2, "--keep", 9, "--log-every", 2, *how]

    def job(rank):
        written = run_state.write_part

        def full(folder, *args, **kwargs):
            if rank.island == 1 and "checkpoint-4" in str(folder):
                raise OSError(errno.ENOSPC, "No space left on device")
            return written(folder, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_state, "write_part", full)
            apart(rank, source, "run", options)

    out = run_ranks(job, **ONE, check=False)
    assert [o.status for o in out] == [0, 0]
    assert "checkpoint of step 4 not saved ([Errno 28] No space" in out[1].log
    assert [last(source, "run", i)["failed_saves"] for i in (0, 1)] == [0, 1]
    kept = [n for n in held(source, "run") if n.startswith("1/")]
    assert kept == [f"1/checkpoint-{s}" for s in (10, 2, 6, 8)]


@pytest.mark.parametrize("options", [["--resume", "auto"], ["--save-every", 4, "--resume"], []])
def test_pretrain_warns_of_a_run_that_saves_nothing(run_ranks, source, options):  # noqa: F811
    """A run with `--resume auto` that saves nothing says so."""
    args = (source, f"unsaved{len(options)}", [*DILOCO, *options])
    found = run_ranks(apart, **ONE | {"islands": 1}, args=args, check=False)
    text = "no checkpoints are written: a run that loses all islands begins again at step 0; add"
    assert [o.status for o in found] == [0], found[0].log
    assert (text in found[0].log) is (options == ["--resume", "auto"])
    # a line of its own, not the end of the progress bar's
    (line,) = [t for t in re.split("[\r\n]", found[0].log) if "finished at step" in t]
    assert line.startswith("island0: finished at step 10"), line


def test_pretrain_deepspeed_warns_of_a_run_that_saves_nothing(caplog):
    """The DeepSpeed recipe warns of a run with `--resume` that saves nothing."""
    from wrong_use import warn_unsaved

    for resume, every, rank, lines in ((True, 0, 0, 1), (True, 0, 1, 1), (True, 5, 0, 1)):
        warn_unsaved(SimpleNamespace(resume=resume, save_every=every), rank)
        assert len(caplog.records) == lines
    text = (RECIPES / "pretrain_deepspeed.py").read_text()
    assert "warn_unsaved(args, world.process_index)" in text
