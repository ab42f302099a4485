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

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from transformers import TrainerCallback  # noqa: E402

import fsdp_demo  # noqa: E402
from fsdp_demo.checkpoint import CheckpointManager  # noqa: E402
from fsdp_demo.checkpoint.folders import Fence  # noqa: E402
from fsdp_demo.errors import NeedsDecision, Superseded
from fsdp_demo.integrations.trainer import state  # noqa: E402
from fsdp_demo.peers.votes import Ranks  # noqa: E402

from ..support import trainer_script as script  # noqa: E402
from .test_trainer import history  # noqa: E402
from .test_trainer_resume import extra  # noqa: E402

SETTINGS = {"eval_strategy": "no", "logging_steps": 1}
LINE = {"period": 3}


def made(rank, callbacks=(), fresh=False, **settings):
    logging.basicConfig(level=logging.WARNING, force=True)
    line = {**LINE, "fresh": True} if fresh else LINE
    return script.trainer(
        rank.folder / "out", extra("diloco", line), callbacks=callbacks, **{**SETTINGS, **settings}
    )


def own(rank):
    return rank.folder / "out" / f"island{rank.island}"


def again():
    os.environ["ISLAND_RUN"] += "-again"


def test_trainer_save_flipped_bit_found(run_ranks):
    """A flipped bit in a checkpoint is found at the resume."""

    def work(rank):
        made(rank, max_steps=4, save_steps=2).train()
        files = json.loads((own(rank) / "checkpoint-4" / "manifest.json").read_text())["files"]
        if rank.island == 1:
            with open(own(rank) / "checkpoint-4" / "model.safetensors", "r+b") as file:
                file.seek(-3, os.SEEK_END)
                last = file.read(1)
                file.seek(-3, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
        again()
        try:
            made(rank, max_steps=6, save_steps=2).train(resume_from_checkpoint=True)
        except Exception as error:
            return all(f["crc32"] is not None for f in files.values()), str(error)
        return files, ""

    out = run_ranks(work, islands=2, procs=1, check=False, env={"ISLAND_TIMEOUT": "5"})
    assert out[1].value[0] and "model.safetensors: checksum does not fit" in out[1].value[1]


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


def test_trainer_save_nan_refused(run_ranks):
    """A model with NaN makes no checkpoint."""

    def work(rank):
        trained = made(rank, callbacks=[Poison()] if rank.island else [], max_steps=6, save_steps=2)
        trained.train()
        return (
            script.whole_steps(own(rank)),
            sorted(p.name for p in own(rank).glob("*")),
            history(trained, "exchange/failed_saves"),
        )

    zero, one = run_ranks(work, islands=2, procs=1)
    assert zero[0] == [2, 4, 6] and one[0] == [2, 6] and "checkpoint-4" not in one[1]
    assert zero[2][-1] == 0 and one[2][-2:] == [1, 1]


@pytest.mark.parametrize("where", ["exchange", "model"])
@pytest.mark.parametrize("always", [False, True])
def test_trainer_save_full_disk_third_failure(run_ranks, where, always):
    """A full disk is a warning, and the third failure in a row is an error."""

    def work(rank):
        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        trained = made(rank, max_steps=8, save_steps=2)
        save, model = state.save_state, trained.save_model

        def now():
            return rank.island == 1 and (always or trained.state.global_step == 4)

        state.save_state = lambda *a: full() if now() and where == "exchange" else save(*a)
        trained.save_model = lambda *a, **k: (
            full() if now() and where == "model" else model(*a, **k)
        )
        try:
            trained.train()
        except OSError as error:
            return str(error), script.whole_steps(own(rank))
        except Exception as error:  # the other island is gone
            return type(error).__name__, script.whole_steps(own(rank))
        finally:
            state.save_state = save
        return "", script.whole_steps(own(rank))

    zero, one = run_ranks(work, islands=2, procs=1, env={"ISLAND_TIMEOUT": "10"})
    if always:
        assert "No space left" in one[0] and one[1] == [] and zero == ("", [2, 4, 6, 8])
    else:
        assert (zero, one) == (("", [2, 4, 6, 8]), ("", [2, 6, 8]))


class Told(TrainerCallback):
    """SIGTERM in one step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


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
        handler, lines = logging.Handler(), []
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("fsdp_demo").addHandler(handler)
        try:
            made(rank, [Late(rank)], max_steps=9, save_steps=100).train()
        except SystemExit as end:
            return end.code, script.whole_steps(own(rank)), lines
        return None, script.whole_steps(own(rank)), lines

    zero, one = run_ranks(work, islands=2, procs=1)
    assert (zero[:2], one[:2]) == ((75, [4]), (None, [9]))
    (line,) = (line for line in zero[2] if "to resume" in line)
    assert line == zero[2][-1] and "checkpoint-4; to resume, start this island (and each" in line
    assert line.endswith("resume_from_checkpoint=True (auto). It ends with status 75")
    assert any("has left: it was stopped" in line for line in one[2])
    assert not any("to resume" in line for line in one[2])


@pytest.mark.parametrize("full", [False, True])
def test_trainer_save_failed_at_end(run_ranks, full):
    """A save that fails at the end does not count as a save."""

    def work(rank):
        def fails(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        trained = made(rank, [Told(4)], max_steps=8, save_steps=100)
        save = state.save_state
        state.save_state = fails if full else save
        try:
            trained.train()
        except SystemExit as ended:
            return ended.code, script.whole_steps(own(rank))
        finally:
            state.save_state = save
        return None, []

    out = run_ranks(work, islands=2, procs=1)
    assert out == [(1, []) if full else (75, [5])] * 2


@pytest.mark.parametrize("several", [True, False])
def test_trainer_resume_auto_other_number_of_islands(run_ranks, several):
    """`auto` does not begin anew beside checkpoints of another number of islands. From one island
    to several, and back: they keep checkpoints in other folders. What the sentence names works.
    """

    def work(rank):
        environment = dict(os.environ)
        if rank.island == 0 or not several:
            if several:
                os.environ["ISLAND_COUNT"] = "1"
            made(rank, max_steps=2, save_steps=2).train()
            os.environ.update(environment)
        meet(rank, 1)
        again()
        if not several:
            if rank.island == 1:
                return "auto' finds no", 4
            os.environ["ISLAND_COUNT"] = "1"
        with pytest.raises(NeedsDecision) as refused:
            made(rank, max_steps=4).train(resume_from_checkpoint="auto")
        again()
        named = re.search(r"resume_from_checkpoint='([^']*checkpoint-2)'", str(refused.value))[1]
        trainer = made(rank, max_steps=4, fresh=True)
        trainer.train(resume_from_checkpoint=named)
        return str(refused.value), trainer.state.global_step

    for text, step in run_ranks(work, islands=2, procs=1):
        assert "auto' finds no" in text and step == 4


def test_trainer_save_swapped_folders_refused(run_ranks):
    """Swapped folders are refused, and a refused start leaves all checkpoints usable."""

    def work(rank):
        made(rank, max_steps=6, save_steps=2).train()
        every = script.whole_steps(own(rank))
        meet(rank, 1)
        if rank.island == 0:
            shutil.move(rank.folder / "out" / "island0", rank.folder / "x")
            shutil.move(rank.folder / "out" / "island1", rank.folder / "out" / "island0")
            shutil.move(rank.folder / "x", rank.folder / "out" / "island1")
        meet(rank, 2)
        again()
        with pytest.raises(NeedsDecision, match="folders of islands are swapped"):
            made(rank, max_steps=8).train(resume_from_checkpoint="auto")
        kept = CheckpointManager(own(rank), fsdp_demo.Topology.from_env())
        return every == list(kept.whole()), [h.owner for h in kept.held()]

    assert run_ranks(work, islands=2, procs=1) == [(True, [1, 1, 1]), (True, [0, 0, 0])]


def meet(rank, turn):
    (rank.folder / f"turn{turn}.{rank.rank}").touch()
    while len(list(rank.folder.glob(f"turn{turn}.*"))) < rank.islands * rank.procs:
        time.sleep(0.01)


class Usurped(TrainerCallback):
    """A later life takes the folder."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            Fence(Path(args.output_dir), "later").take(Ranks(None, 0, 1))


def test_trainer_save_earlier_life_writes_nothing(run_ranks):
    """A process of an earlier life writes nothing."""

    def work(rank):
        with pytest.raises(Superseded, match="belongs to a later life"):
            made(rank, callbacks=[Usurped()], max_steps=6, save_steps=2).train()
        return sorted(p.name for p in own(rank).glob("checkpoint-*"))

    assert run_ranks(work, islands=2, procs=1) == [["checkpoint-2"]] * 2


def test_trainer_save_limit_on_each_node(run_ranks):
    """`save_total_limit` holds on each node of an island whose nodes have a disk each."""

    def work(rank):
        folder = rank.folder / f"node{rank.proc}" / "out"
        each = {"save_on_each_node": True, "save_total_limit": 2, "max_steps": 4, "save_steps": 1}
        script.trainer(folder, extra("demo", {}), **SETTINGS, **each).train()
        return sorted(p.name for p in (folder / f"island{rank.island}").glob("checkpoint-*"))

    def node(rank):
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # accelerate asks for them, no more
        return {**at, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank.proc)}

    out = run_ranks(work, islands=2, procs=2, timeout=120, env=node)
    assert out == [["checkpoint-3", "checkpoint-4"]] * 4


def test_trainer_save_checksums_of_all_ranks(run_ranks):
    """The manifest has a checksum of every file, of whichever rank it is."""

    def work(rank):
        trained = script.trainer(
            rank.folder / "out", extra("demo", {}), fsdp=True, **SETTINGS, max_steps=2, save_steps=2
        )
        trained.train()
        files = json.loads((own(rank) / "checkpoint-2" / "manifest.json").read_text())["files"]
        there = {
            str(p.relative_to(own(rank) / "checkpoint-2"))
            for p in (own(rank) / "checkpoint-2").rglob("*")
            if p.is_file()
        }
        return (
            there - set(files),
            all(f["crc32"] is not None for f in files.values()),
            torch.distributed.get_world_size(),
        )

    assert run_ranks(work, islands=2, procs=2, timeout=120) == [({"manifest.json"}, True, 2)] * 4
