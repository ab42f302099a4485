"""recipes/pretrain.py through faults: `--resume auto` after a kill, a full disk, a NaN, a preset
that does not fit.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
from types import SimpleNamespace

import pytest

from fsdp_demo import Exchange, NotFinite, PeerLost
from fsdp_demo.checkpoint import RunState, run_state

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


def test_pretrain_save_islands_stopped_at_unlike_steps(run_ranks, source):  # noqa: F811
    """Islands stopped between the same exchanges, at steps 2 and 3, before the first regular
    checkpoint, go on together: nobody's work is thrown away.
    """
    options = ["--no-shard", "--exchange", "diloco", "--set", "period=5", "--save-every", 20]

    def stops(rank):
        def lose(rank):
            raise PeerLost("gone")

        apart(rank, source, "run", options, {1 + rank.island: lose})

    first = run_ranks(stops, **ONE, check=False)
    assert [o.status for o in first] == [75, 75]
    left = held(source, "run")
    steps = [int(name.split("-")[1]) for name in left]
    assert len(left) == 2 and steps[1] == steps[0] + 1
    again = run_ranks(apart, **ONE, args=(source, "run", [*options, "--resume"]), check=False)
    assert [o.status for o in again] == [0, 0], again[0].error
    for step, o in zip(steps, again, strict=True):
        assert f"resumed from checkpoint of step {step}" in o.log
    assert last(source, "run", 0)["digests_equal"] is True
    assert all(o.value["steps"][-1] == 10 for o in again)


def test_pretrain_resume_auto_without_checkpoints_begins(run_ranks, source):  # noqa: F811
    """`--resume auto` begins at step 0 where no island holds a checkpoint."""
    options = [*DILOCO, "--save-every", 4, "--steps", 4, "--resume", "auto"]
    out = run_ranks(apart, **ONE, args=(source, "run", options))
    assert out[0]["steps"] == [1, 2, 3, 4]


def test_pretrain_resume_refused_keeps_checkpoints(run_ranks, source):  # noqa: F811
    """A resume that is refused costs nothing. Island 1 sees the first checkpoint only, and the
    preset is a wrong one: both keep all they have, and go on from the newest.
    """
    options = [*DILOCO, "--save-every", 2, "--keep", 9, "--steps", 8]
    run_ranks(apart, **ONE, args=(source, "run", options))
    before, mount = held(source, "run"), source / "run" / "machine1" / "island1"
    mount.rename(source / "mount")
    shutil.copytree(source / "mount" / "checkpoint-2", mount / "checkpoint-2")
    wrong = ["--no-shard", "--exchange", "demo", "--save-every", 2, "--resume"]
    refused = run_ranks(apart, **ONE, args=(source, "run", wrong), check=False)
    assert all("does not fit this optimizer" in o.error for o in refused)
    shutil.rmtree(mount)
    (source / "mount").rename(mount)
    again = run_ranks(apart, **ONE, args=(source, "run", [*options[:-2], "--resume"]))
    assert [o["steps"] for o in again] == [[9, 10]] * 2 and set(before) <= set(held(source, "run"))


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


def test_pretrain_save_refuses_a_nan(run_ranks, source):  # noqa: F811
    """No checkpoint with a NaN is sealed."""
    options = ["--no-shard", "--exchange", "full", "--lr", 0.01, "--save-every", 2, "--steps", 6]

    def job(rank):
        with pytest.MonkeyPatch.context() as patch:
            before = RunState.save

            def poisoned(self, exchange, *args, **kwargs):
                if exchange.step == 4:
                    kept = next(iter(self.optimizers[0].state.values()))["exp_avg"].view(-1)
                    value, kept[0] = kept[0].clone(), float("nan")
                    before(self, exchange, *args, **kwargs)
                    with pytest.raises(NotFinite, match="not finite"):
                        before(self, exchange, last=True)
                    kept[0] = value
                else:
                    before(self, exchange, *args, **kwargs)

            patch.setattr(RunState, "save", poisoned)
            apart(rank, source, "run", options)

    out = run_ranks(job, **ONE, check=False)
    assert [o.status for o in out] == [0, 0], out[0].error
    assert "checkpoint of step 4 not saved (replica.optimizer." in out[0].log
    assert "holds values that are not finite" in out[0].log
    assert held(source, "run") == [f"{i}/checkpoint-{s}" for i in (0, 1) for s in (2, 6)]


def test_pretrain_save_of_a_broken_exchange(run_ranks, source):  # noqa: F811
    """A broken exchange seals no checkpoint. The state says that what is under way was lost, once:
    the save in the loop seals nothing, the one on the way out does; status 75.
    """

    def job(rank):
        with pytest.MonkeyPatch.context() as patch:
            asked = Exchange.state_dict

            def lost(self):
                if self.step == 4 and not getattr(self, "said", False):
                    self.said = True
                    raise PeerLost("what was under way is lost")
                return asked(self)

            patch.setattr(Exchange, "state_dict", lost)
            apart(rank, source, "run", [*DILOCO, "--save-every", 2])

    out = run_ranks(job, **ONE, check=False)
    assert [o.status for o in out] == [75, 75], out[0].log
    assert held(source, "run") == [f"{i}/checkpoint-{s}" for i in (0, 1) for s in (2, 4)]


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
