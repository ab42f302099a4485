"""What all tests of the recipes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def own_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study puts products of its own into torch's Muon, where a processor is slow in bf16
    (`recipes/study/precision.py`). They end with the test.
    """
    if (muon := getattr(torch.optim, "_muon", None)) is not None:
        name = "_zeropower_via_newtonschulz"
        monkeypatch.setattr(muon, name, getattr(muon, name))


@pytest.fixture
def own_cache(tmp_path: Path, everywhere: Any) -> None:
    """Nothing that a test maps may come from, or stay in, the user's cache of `datasets`."""
    import datasets

    everywhere.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
