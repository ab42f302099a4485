"""The Trainer's checkpoints through faults: flipped bits, a full disk, a NaN, swapped folders, an
older life, auto.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager
from fsdp_demo.errors import NeedsDecision
from fsdp_demo.integrations.trainer import state

from ..support import trainer_script as script
from ..support.damage import flip
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.trainer_script import history, one_line

SETTINGS = {"eval_strategy": "no", "logging_steps": 1}
LINE = {"period": 3}


def made(rank, callbacks=(), fresh=False, **settings):
    logging.basicConfig(level=logging.WARNING, force=True)
    line = {**LINE, "fresh": True} if fresh else LINE
    return script.trainer(
        rank.folder / "out",
        one_line("diloco", **line),
        callbacks=callbacks,
        **{**SETTINGS, **settings},
    )


def own(rank):
    return rank.folder / "out" / f"island{rank.island}"


def again():
    os.environ["ISLAND_RUN"] += "-again"


def test_trainer_save_flipped_bit_found(run_ranks):
    """A flipped bit in a checkpoint is found at the resume."""

    def work(rank):
        made(rank, max_steps=4, save_steps=2).train()
        place = own(rank) / "checkpoint-4"
        files = json.loads((place / "manifest.json").read_text())["files"]
        assert all(f["crc32"] is not None for f in files.values())
        if rank.island == 1:
            flip(place / "model.safetensors", -3)
        again()
        with pytest.raises(Exception) as found:
            made(rank, max_steps=6, save_steps=2).train(resume_from_checkpoint=True)
        return str(found.value)

    out = run_ranks(work, islands=2, procs=1, check=False, env={"ISLAND_TIMEOUT": "5"})
    assert "model.safetensors: checksum does not fit" in out[1].value


class Poison(TrainerCallback):
    """A NaN in the inner optimizer's state at one save."""

    trainer = None

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        kept = next(s for s in optimizer.state.values() if "exp_avg" in s)["exp_avg"].view(-1)
        if state.global_step == 4:
            self.kept, self.value = kept, kept[0].clone()
            kept[0] = float("nan")

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.kept[0] = self.value


@in_ranks(2, 1)
def test_trainer_save_nan_refused(me):
    """A model with NaN makes no checkpoint."""
    trained = made(me, callbacks=[Poison()] if me.island else [], max_steps=6, save_steps=2)
    trained.train()
    failed = history(trained, "exchange/failed_saves")
    if me.island:
        assert script.whole_steps(own(me)) == [2, 6] and failed[-2:] == [1, 1]
        assert not (own(me) / "checkpoint-4").exists()
    else:
        assert script.whole_steps(own(me)) == [2, 4, 6] and failed[-1] == 0


def disk_full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["exchange", "model"])
@pytest.mark.parametrize("always", [False, True])
@in_ranks(2, 1, env={"ISLAND_TIMEOUT": "10"})
def test_trainer_save_full_disk_third_failure(me, where, always):
    """A full disk is a warning, and the third failure in a row is an error."""
    trained = made(me, max_steps=8, save_steps=2)
    owner, name = (state, "save_state") if where == "exchange" else (trained, "save_model")
    save = getattr(owner, name)

    def now():
        return me.island == 1 and (always or trained.state.global_step == 4)

    setattr(owner, name, lambda *a, **k: disk_full() if now() else save(*a, **k))
    if always and me.island:
        with pytest.raises(OSError, match="No space left"):
            trained.train()
        assert script.whole_steps(own(me)) == []
    else:
        trained.train()
        assert script.whole_steps(own(me)) == ([2, 6, 8] if me.island else [2, 4, 6, 8])


class Late(TrainerCallback):
    """Island 0 goes into the exchange of step 3; island 1 comes later, and before that a SIGTERM
    reaches island 0.
    """

    def __init__(self, rank):
        self.rank, self.place = rank, rank.folder / "waits"

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step != 2:
            return
        if self.rank.island == 0:
            self.place.with_suffix(".part").write_text(str(os.getpid()))
            self.place.with_suffix(".part").replace(self.place)
            return
        while not self.place.exists():
            time.sleep(0.02)
        time.sleep(1.0)  # it waits for this island's payload by now
        os.kill(int(self.place.read_text()), signal.SIGTERM)
        time.sleep(0.5)


def test_trainer_sigterm_during_exchange(run_ranks):
    """An island that gets SIGTERM in an exchange saves and leaves, and the others train on. Its log
    ends with how to resume, and with the status.
    """

    def work(rank):
        lines = heard(logging.INFO)
        status = script.ended(made(rank, [Late(rank)], max_steps=9, save_steps=100))
        return status, script.whole_steps(own(rank)), lines

    zero, one = run_ranks(work, islands=2, procs=1)
    assert (zero[:2], one[:2]) == ((75, [4]), (None, [9]))
    (line,) = (line for line in zero[2] if "to resume" in line)
    assert line == zero[2][-1] and "checkpoint-4; to resume, start this island (and each" in line
    assert line.endswith("resume_from_checkpoint=True (auto). It ends with status 75")
    assert any("has left: it was stopped" in line for line in one[2])
    assert not any("to resume" in line for line in one[2])


@pytest.mark.parametrize("full", [False, True])
@in_ranks(2, 1)
def test_trainer_save_failed_at_end(me, full):
    """A save that fails at the end does not count as a save."""
    trained = made(me, [script.At("on_step_begin", script.sigterm, 4)], max_steps=8, save_steps=100)
    if full:
        state.save_state = disk_full
    assert script.ended(trained) == (1 if full else 75)
    assert script.whole_steps(own(me)) == ([] if full else [5])


@pytest.mark.parametrize("several", [True, False])
@in_ranks(2, 1)
def test_trainer_resume_auto_other_number_of_islands(me, several):
    """`auto` does not begin anew beside checkpoints of another number of islands. From one island
    to several, and back: they keep checkpoints in other folders. What the sentence names works.
    """
    alone, count = me.island == 0, os.environ["ISLAND_COUNT"]
    if alone or not several:
        os.environ["ISLAND_COUNT"] = "1" if several else count
        made(me, max_steps=2, save_steps=2).train()
    me.meet(1)
    again()
    if not several and not alone:
        return
    os.environ["ISLAND_COUNT"] = count if several else "1"
    with pytest.raises(NeedsDecision, match="auto' finds no") as refused:
        made(me, max_steps=4).train(resume_from_checkpoint="auto")
    again()
    named = re.search(r"resume_from_checkpoint='([^']*checkpoint-2)'", str(refused.value))[1]
    trainer = made(me, max_steps=4, fresh=True)
    trainer.train(resume_from_checkpoint=named)
    assert trainer.state.global_step == 4


@in_ranks(2, 1)
def test_trainer_save_swapped_folders_refused(me):
    """Swapped folders are refused, and a refused start leaves all checkpoints usable."""
    made(me, max_steps=6, save_steps=2).train()
    every = script.whole_steps(own(me))
    me.meet(1)
    if me.island == 0:
        shutil.move(me.folder / "out" / "island0", me.folder / "x")
        shutil.move(me.folder / "out" / "island1", me.folder / "out" / "island0")
        shutil.move(me.folder / "x", me.folder / "out" / "island1")
    me.meet(2)
    again()
    with pytest.raises(NeedsDecision, match="folders of islands are swapped"):
        made(me, max_steps=8).train(resume_from_checkpoint="auto")
    kept = CheckpointManager(own(me), fsdp_demo.Topology.from_env())
    assert every == list(kept.whole()) and [h.owner for h in kept.held()] == [1 - me.island] * 3


def node(rank):
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # accelerate asks for them, no more
    return {**at, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank.proc)}


@in_ranks(timeout=120, env=node)
def test_trainer_save_limit_on_each_node(me):
    """`save_total_limit` holds on each node of an island whose nodes have a disk each."""
    folder = me.folder / f"node{me.proc}" / "out"
    each = {"save_on_each_node": True, "save_total_limit": 2, "max_steps": 4, "save_steps": 1}
    trained = script.trained(folder, one_line("demo"), **SETTINGS, **each)
    assert Path(trained.args.output_dir) == folder / f"island{me.island}"
    assert script.checkpoints(trained) == ["checkpoint-3", "checkpoint-4"]


@in_ranks(timeout=120)
def test_trainer_save_checksums_of_all_ranks(me):
    """The manifest has a checksum of every file, of whichever rank it is."""
    script.trained(
        me.folder / "out", one_line("demo"), fsdp=True, **SETTINGS, max_steps=2, save_steps=2
    )
    files = json.loads((own(me) / "checkpoint-2" / "manifest.json").read_text())["files"]
    folder = own(me) / "checkpoint-2"
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert there - set(files) == {"manifest.json"} and torch.distributed.get_world_size() == 2
    assert all(f["crc32"] is not None for f in files.values())
