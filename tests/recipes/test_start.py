"""What a start takes, by part; and what it does not import."""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")

ROOT = Path(__file__).resolve().parents[2]

from start import Start  # noqa: E402

from ..support.programs import fresh_python  # noqa: E402


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> float:
    """A launch a minute before this process began."""
    import psutil

    moment = psutil.Process().create_time() - 60.0
    monkeypatch.setenv("ISLAND_LAUNCHED", str(moment))
    return moment


def test_start_line_has_every_part_once(launched: float, caplog: Any) -> None:
    """The line of the start has every part once."""
    gc.disable()
    start = Start()
    assert gc.isenabled()
    gc.unfreeze()
    start.mark("model")
    start.mark("data")
    start.mark("model")
    with caplog.at_level(logging.INFO, logger="fsdp_demo"):
        start.first_step("island0")
        start.first_step("island0")
    (said,) = (r.getMessage() for r in caplog.records)
    assert said.startswith("island0: start: ") and "launcher 60.0, imports " in said
    assert list(start.parts) == ["launcher", "imports", "model", "data", "first step"]
    assert abs(sum(start.parts.values()) - (time.time() - launched)) < 5


def test_start_without_a_launcher_counts_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a launcher counts from its own start."""
    monkeypatch.delenv("ISLAND_LAUNCHED", raising=False)
    start = Start()
    assert start.parts["launcher"] == 0.0 and start.parts["imports"] > 0.0


def test_start_of_a_rehearsal_does_not_import_torch() -> None:
    """A rehearsal without a GPU does not wait for torch."""
    program = (
        "import sys\n"
        "from fsdp_demo.launch import rehearsal\n"
        "rehearsal.may_have_gpus = lambda: False\n"
        f"plan = rehearsal.Rehearsal(2, 2, ({__file__!r},), 'torchrun')\n"
        "assert rehearsal.devices(plan) == (['', ''], 'on the CPU')\n"
        "assert 'torch' not in sys.modules\n"
    )
    fresh_python(program, ROOT)
