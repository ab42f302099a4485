"""What all tests of the benchmarks share: where plain imports find the study, the recipes and the
figures of docs/; torch's own Muon. Without the extra `hf` nothing here is collected.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# at the end: `tests` is the folder of the repository, not the one beside the study
sys.path += [str(ROOT / folder) for folder in ("recipes", "benchmarks", "docs/figures")]
collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]


@pytest.fixture(autouse=True)
def own_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study puts products of its own into torch's Muon, where a processor is slow in bf16
    (`benchmarks/study/precision.py`). They end with the test.
    """
    if (muon := getattr(torch.optim, "_muon", None)) is not None:
        name = "_zeropower_via_newtonschulz"
        monkeypatch.setattr(muon, name, getattr(muon, name))
