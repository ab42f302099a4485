"""What the tests of hosts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..support import threaded
from ..support.threaded import values


@pytest.fixture
def islands(run_ranks: Any) -> Callable[..., list[Any]]:
    """`islands(fn, count=2)`: fn(topology) on threads, in a process of their own; what must hold is
    asserted inside.
    """

    def call(fn: Callable[[Any], Any], count: int = 2) -> list[Any]:
        return run_ranks(
            lambda me: values(threaded.islands(lambda i, topology: fn(topology), count)), 1, 1
        )[0]

    return call
