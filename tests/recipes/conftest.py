"""What all tests of the recipes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, everywhere: Any) -> None:
    """Nothing that a test maps may come from, or stay in, the user's cache of `datasets`."""
    import datasets

    everywhere.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
