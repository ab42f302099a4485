"""SIGTERM in what lasts long under the Trainer: an evaluation, a save, a step; and beside the
Trainer's own handler of it.
"""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from ..support import trainer_script as script
from ..support.inside import in_ranks
from ..support.small import same
from ..support.trainer_script import one_line


class InEvaluation(TrainerCallback):
    """Counts the batches of an evaluation, and is told to end in the second one."""

    def __init__(self, told):
        self.told, self.batches = told, 0

    def on_prediction_step(self, args, state, control, **kwargs):
        self.batches += 1
        if self.told and self.batches == 2:
            script.sigterm()
        time.sleep(0.25)


@in_ranks(timeout=120)
def test_trainer_sigterm_in_evaluation(me):
    """An island that is told to end in an evaluation leaves it after the same batch on all ranks,
    without metrics, saves that step and ends with 75; the other does not wait for its metrics.
    """
    # rank 1 of island 0, while all islands evaluate for the best checkpoint
    seen = InEvaluation(told=(me.island, me.proc) == (0, 1))
    best = {"load_best_model_at_end": True, "per_device_eval_batch_size": 1, "callbacks": [seen]}
    trained = script.trainer(me.folder / "out", one_line("diloco", period=4), **best)
    status, whole = script.ended(trained), script.parameters(trained)
    evaluated = [row["step"] for row in trained.state.log_history if "eval_loss" in row]
    if me.island:
        assert (status, trained.state.global_step) == (None, 8)
        assert (seen.batches, evaluated) == (16, [4, 8])
        return
    assert (status, trained.state.global_step, evaluated) == (75, 4, [])
    assert script.whole_steps(Path(trained.args.output_dir)) == [4] and seen.batches < 8
    # the island's own parameters are back
    every = [None] * me.procs
    torch.distributed.all_gather_object(every, (seen.batches, whole))
    assert same(*every)


@in_ranks(1, 1)
def test_trainer_sigterm_in_save(me):
    """A save in which an island is told to end is its last one: no step follows."""
    trained = script.alone(me)
    save = trained._save_rng_state
    trained._save_rng_state = lambda folder: (script.sigterm(), save(folder))
    assert (script.ended(trained), trained.state.global_step) == (75, 2)
    assert script.whole_steps(Path(trained.args.output_dir)) == [2]


def in_step(seconds=0.0):
    """A callback: told to end in the fourth step, which lasts `seconds` longer."""

    def told(*_, **__):
        script.sigterm()
        time.sleep(seconds)

    return script.At("on_step_begin", told, 3)


@in_ranks(1, 1)
def test_trainer_sigterm_beside_jit_checkpoint(me):
    """With `enable_jit_checkpoint` SIGTERM is the exchange's all the same: saved, status 75."""
    before = signal.getsignal(signal.SIGTERM)
    trained = script.alone(me, [in_step()], enable_jit_checkpoint=True)
    assert signal.getsignal(signal.SIGTERM) is before
    assert script.ended(trained) == 75
    assert script.whole_steps(Path(trained.args.output_dir)) == [2, 4]


def test_trainer_sigterm_in_long_step(run_ranks):
    """A step that lasts beyond ISLAND_STOP ends with 75 and without a save; the log names the last
    checkpoint.
    """

    def work(rank):
        logging.basicConfig(level=logging.INFO, force=True)
        script.alone(rank, [in_step(60)]).train()

    (out,) = run_ranks(work, islands=1, procs=1, env={"ISLAND_STOP": "2"}, check=False, timeout=50)
    assert out.status == 75 and "step 4 still is under way" in out.log
    assert "nothing is saved" in out.log and "checkpoint-2; to resume, start again with" in out.log


@in_ranks(1, 1)
def test_trainer_sigterm_after_last_step(me):
    """SIGTERM in the last evaluation leaves it; the last save is made, and training ends."""
    seen = InEvaluation(told=True)
    batches = {"per_device_eval_batch_size": 1, "save_steps": 6}
    trained = script.alone(me, [seen], eval_strategy="steps", eval_steps=6, **batches)
    trained.train()
    assert seen.batches == 2 and script.whole_steps(Path(trained.args.output_dir)) == [6]
