"""Whole runs of a Trainer script that are the same whatever shards the model inside an island:
FSDP2 or DeepSpeed, an argument of `trainer_script.trainer`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from fsdp_demo.exchange.pace import Pace

from . import trainer_script as script


def moments(trained: Any) -> torch.Tensor:
    """All tensors that this rank's inner optimizer keeps, as one vector."""
    optimizer = trained.optimizer
    if trained.is_deepspeed_enabled:
        optimizer = trained.deepspeed.optimizer.optimizer
    kept = [v for state in optimizer.state.values() for v in state.values()]
    parts = [getattr(v, "to_local", lambda v=v: v)() for v in kept if torch.is_tensor(v)]
    return torch.cat([torch.empty(0), *(v.flatten().float() for v in parts)])


def resume_is_bit_for_bit(me: Any, preset: str, changes: dict[str, Any], **how: Any) -> None:
    """Ten steps, and from the checkpoint of step 5 again: parameters, moments, losses and counts
    are equal, and the abandoned end is the new life's.
    """
    plan = {"max_steps": 10, "save_steps": 5, "eval_strategy": "no", "logging_steps": 1, **how}
    out = []
    for resume in (None, str(me.folder / "out" / "checkpoint-5")):
        line = script.one_line(preset, **changes)
        trained = script.trained(me.folder / "out", line, resume=resume, **plan)
        lines = (Path(trained.args.output_dir) / "metrics.jsonl").read_text().splitlines()
        tokens = [json.loads(line)["tokens"] for line in lines]
        logged = [script.history(trained, key) for key in ("loss", "exchange/loss")]
        out.append((script.parameters(trained), moments(trained), tokens, *logged))
    whole, resumed = out
    assert torch.equal(whole[0], resumed[0]) and torch.equal(whole[1], resumed[1])
    assert whole[2] == resumed[2] and len(whole[2]) == 10  # the resume counts nothing twice
    assert whole[3] == resumed[3] and len(whole[3]) == 10 and whole[4][-5:] == resumed[4][-5:]
    assert script.whole_steps(Path(trained.args.output_dir)) == [5, 10]


class Term(TrainerCallback):
    """SIGTERM at the end of a step; `slow`: steps that end before both are told would be all."""

    def __init__(self, step: int, slow: bool = False):
        self.step, self.slow = step, slow

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.slow:
            time.sleep(0.2)


def sigterm_saves_and_resumes(
    me: Any,
    preset: str,
    changes: dict[str, Any],
    slow: bool = False,
    at: tuple[int, int] = (4, 4),
    **how: Any,
) -> int:
    """Twelve steps; the same where one rank of each island is told to end in step `at`, and with
    what is resumed from there. The step that was saved.
    """
    plan = {"max_steps": 12, "eval_strategy": "no", "save_steps": 100, "logging_steps": 1, **how}
    out = []
    told = Term(at[me.island] if me.proc == 0 else -1, slow)
    for where, callbacks, resume in (("whole", [], None), ("cut", [told], None), ("cut", [], True)):
        os.environ["ISLAND_RUN"] += f"-{where}-{resume}"
        line = script.one_line(preset, **changes)
        trained = script.trainer(me.folder / where, line, callbacks=callbacks, **plan)
        status = script.ended(trained, resume)
        rows = [row for row in trained.state.log_history if "loss" in row]
        losses = {row["step"]: row["loss"] for row in rows}
        saved = script.checkpoints(trained)
        step = trained.state.global_step
        out.append((status, step, saved, losses, script.parameters(trained)))
    whole, cut, resumed = out
    assert (whole[:2], resumed[:2]) == ((None, 12), (None, 12)) and cut[0] == 75
    assert 5 <= cut[1] < 12 and cut[2] == [f"checkpoint-{cut[1]}"]
    assert torch.equal(resumed[4], whole[4])
    # a step whose exchange was cut off is not logged
    assert resumed[3].items() <= whole[3].items() and len(resumed[3]) >= 11
    return int(cut[1])


def unlike_islands_resume(me: Any, **how: Any) -> None:
    """Sixteen steps in rounds of four, of which island 1 takes two after the first round; and from
    the checkpoint of step 8 again. Clock, rates, places in the data and all bits are the same.
    """
    speeds = pytest.MonkeyPatch()
    speeds.setattr(Pace, "seconds", lambda self, device: (1.0, 2.0)[self._slot])
    plan = {"max_steps": 16, "save_steps": 6, "eval_steps": 4, "logging_steps": 1, **how}
    seen = []
    for resume in (None, str(me.folder / "out" / "checkpoint-8")):
        rows: list[torch.Tensor] = []
        line = script.one_line("diloco", period=4, local_steps="by_speed", lr=1e-3)
        made = script.trainer(me.folder / "out", line, **plan)
        step = made.training_step
        made.training_step = lambda model, inputs, *args, step=step, rows=rows: (
            rows.append(inputs["input_ids"].clone()),
            step(model, inputs, *args),
        )[1]
        result = made.train(resume_from_checkpoint=resume)
        exchange, state = script.exchange_of(made), made.state
        own = (16, 10)[me.island]
        assert (state.global_step, exchange.step, exchange.steps_taken) == (16, 16, own)
        assert exchange.digests_equal() and exchange.local_steps == {0: 4, 1: 2}
        assert made.lr_scheduler.get_last_lr()[0] == 0.0  # linear to the end of the run
        losses = script.history(made, "loss")
        logged = [row["step"] for row in state.log_history if "loss" in row]
        assert logged == ([*range(1, 17)], [1, 2, 3, 4, 6, 8, 10, 12, 14, 16])[me.island]
        assert len(rows) == own - (0, (8, 6)[me.island])[resume is not None]
        fresh = losses[-len(rows) :]
        assert result.training_loss == pytest.approx(sum(fresh) / len(fresh), rel=1e-4)
        assert [r["step"] for r in state.log_history if "eval_loss" in r] == [4, 8, 12, 16]
        assert script.whole_steps(Path(made.args.output_dir)) == [8, 12, 16]
        seen.append((script.parameters(made), moments(made), losses, rows))
    (whole, one, losses, rows), (again, two, later, rest) = seen
    assert torch.equal(whole, again) and torch.equal(one, two) and losses == later
    assert all(torch.equal(a, b) for a, b in zip(rows[-len(rest) :], rest, strict=True))
