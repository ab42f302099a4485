"""SIGTERM in what lasts long under the Trainer: an evaluation, a save, a step; and beside the
Trainer's own handler of it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer

from ..support import trainer_script as script
from ..support.trainer_script import one_line


def tell() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class InEvaluation(TrainerCallback):
    """Counts the batches of an evaluation, and is told to end in the second one."""

    def __init__(self, told):
        self.told, self.batches = told, 0

    def on_prediction_step(self, args, state, control, **kwargs):
        self.batches += 1
        if self.told and self.batches == 2:
            tell()
        time.sleep(0.25)


def left_evaluation(rank):
    """Rank 1 of island 0 is told to end while all islands evaluate for the best checkpoint."""
    seen = InEvaluation(told=(rank.island, rank.proc) == (0, 1))
    best = {"load_best_model_at_end": True, "per_device_eval_batch_size": 1}
    trained = script.trainer(
        rank.folder / "out", one_line("diloco", period=4), callbacks=[seen], **best
    )
    how = None
    try:
        trained.train()
    except SystemExit as error:
        how = error.code
    history = trained.state.log_history
    evaluated = [row["step"] for row in history if "eval_loss" in row]
    saved = script.whole_steps(Path(trained.args.output_dir))
    return how, trained.state.global_step, seen.batches, evaluated, saved, script.shards(trained)


def test_trainer_sigterm_in_evaluation(run_ranks):
    """An island that is told to end in an evaluation leaves it after the same batch on all ranks,
    without metrics, saves that step and ends with 75; the other does not wait for its metrics.
    """
    first, second, *others = run_ranks(left_evaluation, islands=2, procs=2, timeout=120)
    assert first[:2] == second[:2] == (75, 4) and first[4] == second[4] == [4]
    assert first[2] == second[2] < 8 and first[3] == second[3] == []
    assert torch.equal(first[5], second[5])  # the island's own parameters are back
    for other in others:
        assert other[:2] == (None, 8) and other[2] == 16 and other[3] == [4, 8]


def alone(rank, callbacks=(), **settings):
    """One island, whose preset has an optimizer of its own; the status of its end, and what it
    saved.
    """
    logging.basicConfig(level=logging.INFO, force=True)
    extra = {"optimizer_cls_and_kwargs": exchange_optimizer("demo", lr=1e-3)}
    settings = {"max_steps": 6, "eval_strategy": "no", "save_steps": 2, **settings}
    callbacks = [*callbacks, ExchangeCallback("demo")]
    return script.trainer(rank.folder / "out", extra, callbacks=callbacks, **settings)


def test_trainer_sigterm_in_save(run_ranks):
    """A save in which an island is told to end is its last one: no step follows."""

    def work(rank):
        trained = alone(rank)
        save = trained._save_rng_state
        trained._save_rng_state = lambda folder: (tell(), save(folder))
        with pytest.raises(SystemExit) as ended:
            trained.train()
        saved = script.whole_steps(Path(trained.args.output_dir))
        return ended.value.code, trained.state.global_step, saved

    assert run_ranks(work, islands=1, procs=1) == [(75, 2, [2])]


class InStep(TrainerCallback):
    """Is told to end in the fourth step, which lasts `seconds` longer."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            tell()
            time.sleep(self.seconds)


def test_trainer_sigterm_beside_jit_checkpoint(run_ranks):
    """With `enable_jit_checkpoint` SIGTERM is the exchange's all the same: saved, status 75."""

    def work(rank):
        before = signal.getsignal(signal.SIGTERM)
        trained = alone(rank, [InStep()], enable_jit_checkpoint=True)
        assert signal.getsignal(signal.SIGTERM) is before
        with pytest.raises(SystemExit) as ended:
            trained.train()
        return ended.value.code, script.whole_steps(Path(trained.args.output_dir))

    assert run_ranks(work, islands=1, procs=1) == [(75, [2, 4])]


def test_trainer_sigterm_in_long_step(run_ranks):
    """A step that lasts beyond ISLAND_STOP ends with 75 and without a save; the log names the last
    checkpoint.
    """

    def work(rank):
        alone(rank, [InStep(60)]).train()

    (out,) = run_ranks(work, islands=1, procs=1, env={"ISLAND_STOP": "2"}, check=False, timeout=50)
    assert out.status == 75 and "step 4 still is under way" in out.log
    assert "nothing is saved" in out.log and "checkpoint-2; to resume, start again with" in out.log


def test_trainer_sigterm_after_last_step(run_ranks):
    """SIGTERM in the last evaluation leaves it; the last save is made, and training ends."""

    def work(rank):
        seen = InEvaluation(told=True)
        batches = {"per_device_eval_batch_size": 1, "save_steps": 6}
        trained = alone(rank, [seen], eval_strategy="steps", eval_steps=6, **batches)
        trained.train()
        return seen.batches, script.whole_steps(Path(trained.args.output_dir))

    ((batches, saved),) = run_ranks(work, islands=1, procs=1)
    assert batches == 2 and saved == [6]
