"""Every program of recipes/ is started by a test of the usual run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..support.programs import played

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
HERE = ("compare.py", "doctor.py")
"""Programs that a test of this file starts."""

ELSEWHERE = {
    "check.py": "test_check.py",
    "prepare_data.py": "test_prepare_data.py",
    "pretrain.py": "test_pretrain.py",
    "pretrain_deepspeed.py": "test_pretrain_saves.py",
    "pretrain_trainer.py": "test_wrong_use.py",
    "start.py": "test_start.py",
}
"""Programs that another test of the usual run starts, and its file."""


def test_program_compare_prints_a_table(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """`compare.py` prints a row for each folder with a summary."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        numbers = {"loss_end": 2.5, "bytes_sent_per_island": 10, "ratio": 4.0}
        numbers |= {"tokens_per_second": 100.0, "wait_share": 0.1}
        (tmp_path / name / "summary.json").write_text(json.dumps({**numbers, "preset": "demo"}))
    words = [str(tmp_path), "one", "two"]
    ((status, out),) = run_ranks(played, 1, 1, args=(RECIPES / "compare.py", words))
    assert status == 0 and "preset  validation loss" in out
    assert re.search(r"(?m)^two +2\.500 +10 B", out), out


def test_program_doctor_says_its_options(run_ranks: Callable[..., Any]) -> None:
    """`doctor.py`, which needs two machines, is imported whole and says its options."""
    ((status, out),) = run_ranks(played, 1, 1, args=(RECIPES / "doctor.py", ["--help"]))
    assert status == 0 and out.startswith("usage: ")


def test_programs_are_all_started() -> None:
    """Every program of recipes/ is started by a test of the usual run."""
    programs = {p.name for p in RECIPES.glob("*.py") if "__main__" in p.read_text()}
    assert programs == {*HERE, *ELSEWHERE}
    for script, test in ELSEWHERE.items():
        there = (ROOT / "tests" / "recipes" / test).read_text()
        assert Path(script).stem in there, script
