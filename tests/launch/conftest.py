"""What the tests of launchers share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from .rehearsals import processes_of


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> Iterator[str]:
    """A run id by which every process of the test is found; none may be left at the end."""
    name = f"test-{os.getpid()}-{time.time_ns()}"
    yield name
    left = processes_of(name)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left behind: {left}"
