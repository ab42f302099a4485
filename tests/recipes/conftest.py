"""What all tests of the recipes share. Without the extra `hf` nothing here is collected."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))  # its modules are imported plainly
collect_ignore_glob = [] if find_spec("transformers") and find_spec("datasets") else ["test_*.py"]


@pytest.fixture
def own_cache(tmp_path: Path, everywhere: Any) -> None:
    """Nothing that a test maps may come from, or stay in, the user's cache of `datasets`."""
    import datasets

    everywhere.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
