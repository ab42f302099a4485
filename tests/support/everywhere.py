"""Patches for the test process and its ranks, which are no children of it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


class Everywhere:
    """As `monkeypatch.setattr`; `patches` is what `run_ranks` sends with its next calls. Both end
    with the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch
        self.patches: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Set the attribute of a module (also by its name) or of a class. The value must travel, as
        functions for ranks do.
        """
        target = importlib.import_module(target) if isinstance(target, str) else target
        self._monkeypatch.setattr(target, name, value)
        self.patches.append((target, name, value))
