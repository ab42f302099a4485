"""What all tests of the recipes share."""

from __future__ import annotations

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
