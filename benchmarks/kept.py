"""The figures that the repository keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "benchmarks" / "figures", ROOT / "docs" / "figures")
"""The second has what docs/results.md shows, too."""


def find(name: str) -> Path:
    """A file of figures."""
    return next(path for folder in FOLDERS if (path := folder / name).exists())


def load(name: str) -> Any:
    """What a file of figures holds."""
    return json.loads(find(name).read_text(encoding="utf-8"))
