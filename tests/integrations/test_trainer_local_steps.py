"""The Trainer where islands take unlike steps: its clock, rates, saves, resume, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from ..support import trainer_script as script
from ..support.inside import in_ranks
from ..support.refused import refusal
from ..support.trainer_runs import unlike_islands_resume

BY_SPEED = {"period": 4, "local_steps": "by_speed"}


@pytest.mark.parametrize("procs, fsdp", [(1, False), (2, True)], ids=["single", "fsdp2"])
@in_ranks(2, timeout=180)
def test_trainer_local_steps_resume(me: Any, procs: int, fsdp: bool) -> None:
    """The Trainer's step, schedule and checkpoints follow the clock of the run, its rows the own
    steps of the island; a resume goes on bit for bit.
    """
    script.need_moments(fsdp)
    unlike_islands_resume(me, fsdp=fsdp)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"save_strategy": "epoch"}, "save_strategy='epoch' beside local_steps='by_speed'"),
    "best": (
        {"load_best_model_at_end": True, "eval_steps": 6, "save_steps": 6},
        "set eval_steps to a multiple of it",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@in_ranks(2, 1)
def test_trainer_local_steps_refused(me: Any, name: str) -> None:
    """What unlike steps do not go with is refused by name."""
    changes, text = WRONG[name]
    line = script.one_line("diloco", **BY_SPEED)
    refusal(lambda: script.trained(me.folder / "out", line, max_steps=12, **changes), text)
