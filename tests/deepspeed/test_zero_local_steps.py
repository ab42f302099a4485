"""ZeRO where islands take unlike steps: the engine's own loop, and the Trainer with DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

import deepspeed_ext
from fsdp_demo.exchange.pace import Pace

from ..support import zero
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.trainer_runs import unlike_islands_resume


@pytest.mark.parametrize("stage", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
@in_ranks(timeout=180)
def test_zero_trainer_local_steps_resume(me: Any, stage: str) -> None:
    """Under the Trainer with DeepSpeed clock, rates, rows and a resume are as without it."""
    unlike_islands_resume(me, deepspeed=zero.for_trainer(stage))


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@in_ranks(timeout=120)
def test_zero_engine_local_steps(me: Any, stage: str) -> None:
    """An engine's counter and its own schedule follow the clock of the run."""
    pytest.MonkeyPatch().setattr(Pace, "seconds", lambda self, device: (1.0, 4.0)[self._slot])
    plan = {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1.0,
        "warmup_type": "linear"}}  # fmt: skip
    said = heard()
    engine = zero.engine(zero.settings(stage, scheduler=plan))
    exchange = deepspeed_ext.attach(engine, "diloco", period=8, local_steps="by_speed")
    while exchange.step < 24:
        zero.train(engine, range(exchange.steps_taken, exchange.steps_taken + 1), me.rank)
        assert engine.global_steps == exchange.step
        assert engine.lr_scheduler.last_batch_iteration + 1 == exchange.step  # it begins at -1
    assert exchange.steps_taken == (24, 12)[me.island]
    exchange.finish()
    assert exchange.digests_equal() and not [text for text in said if "rates differ" in text]
