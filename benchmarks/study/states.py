"""Where a long run of the study stands, on disk: the state of each replica every so many steps, so
that a run of hours goes on after an interrupt.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from study.cells import Run

LONG = 1e13
"""Parameters times tokens from which a run is saved: some ten minutes of a core."""

PARTS = 16
"""A run is saved at the end of each of so many parts, but the last."""

_NAME = re.compile(r"step(\d+)-replica\d+\.pt")


class States:
    """The states of one run.

    Args:
        folder: of this run alone; None, nothing is saved.
    """

    def __init__(self, folder: Path | None, run: Run):
        # trials whose state the library does not know, and a start in the middle, run in one go
        whole = run.cell.gain or run.cell.owners or run.cell.attach_at
        self._folder = None if whole or run.size < LONG else folder
        self._steps, self._replicas = run.setting.steps, run.cell.replicas

    def due(self, step: int) -> bool:
        """Whether the replicas save after so many steps."""
        if self._folder is None or step >= self._steps:
            return False
        return step * PARTS // self._steps > (step - 1) * PARTS // self._steps

    def newest(self) -> int:
        """The last step that all replicas have saved; 0 if there is none."""
        saved = Counter(self._saved().values())
        return max((s for s, count in saved.items() if count == self._replicas), default=0)

    def write(self, step: int, replica: int, state: dict[str, Any]) -> None:
        """Save the state of one replica, whole or not at all."""
        path = self._path(step, replica)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        torch.save(state, beside)
        beside.replace(path)

    def read(self, step: int, replica: int) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self._path(step, replica), weights_only=True)
        return state

    def forget_before(self, step: int) -> None:
        """Once all replicas have saved `step`."""
        for path, of in self._saved().items():
            if of < step:
                path.unlink()

    def _path(self, step: int, replica: int) -> Path:
        assert self._folder is not None
        return self._folder / f"step{step}-replica{replica}.pt"

    def _saved(self) -> dict[Path, int]:
        """The step of each file."""
        if self._folder is None or not self._folder.is_dir():
            return {}
        found = {path: _NAME.fullmatch(path.name) for path in self._folder.iterdir()}
        return {path: int(match[1]) for path, match in found.items() if match}
