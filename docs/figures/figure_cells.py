"""What the tables of this folder have in common: where things lie, and how numbers are written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "benchmarks")]

Rows = list[list[str]]


def load(name: str) -> Any:
    """What a file of this folder holds."""
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def is_there(name: str) -> bool:
    """Whether this folder has such a file."""
    return (HERE / name).exists()


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
