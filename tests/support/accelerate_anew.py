"""What Accelerate and the Trainer keep in a process ends with each test of a module that imports
this fixture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "WANDB_", "ISLAND_")
WRITTEN = (
    "ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "FSDP_VERSION",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
)  # fmt: skip
WRITTEN += (
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE",
    "WANDB_RUN_GROUP",
)


@pytest.fixture(autouse=True)
def accelerate_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither variables nor Accelerate's state reach the next test; a forked rank would inherit
    both.
    """
    state = pytest.importorskip("accelerate.state")
    for name in {name for name in os.environ if name.startswith(PREFIXES)} | set(WRITTEN):
        monkeypatch.setenv(name, "")  # so that it goes at the end, whoever sets it
        monkeypatch.delenv(name)
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    yield
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
