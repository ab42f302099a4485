"""Descriptors and threads over a hundred changes of members: as many as after the first ones."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from fsdp_demo.membership import protocol_events

from ..support.elastic import Islands, agree, descriptors, exchanged
from ..support.inside import in_ranks

CHANGES = 100
WARM = 10


def counts() -> tuple[int, int, int]:
    """Open files, threads of the process, threads of Python."""
    return *descriptors(), threading.active_count()


def settled_at(most: tuple[int, int, int]) -> tuple[int, int, int]:
    """`counts` when they are at most these, or after a while: a thread that asked the store may be
    about to end.
    """
    until = time.monotonic() + 20
    found = counts()
    while (
        any(now > then for now, then in zip(found, most, strict=True)) and time.monotonic() < until
    ):
        time.sleep(0.05)
        found = counts()
    return found


@pytest.mark.slow
@in_ranks(1, 1, timeout=280)
def test_membership_changes_leak_no_descriptor_or_thread() -> None:
    """A hundred changes of members leave no descriptor and no thread. Three islands freeze, report,
    write a record and adopt it, again and again; messages pass between.
    """
    here, found = Islands(3), list[tuple[int, int, int]]()

    def fn(line: Any) -> Any:
        out, driver = [], line._driver
        for n in range(CHANGES):
            view, before = driver.machine.record.view, driver.changes
            out.append(exchanged(line, n))
            line.wait_stable(20)
            if line.slot == n % 3:
                driver.do(lambda view=view: driver._step(protocol_events.FrozenHeard(view)))
            while driver.changes == before:
                time.sleep(0.01)
            if line.slot == 0 and n == WARM:
                found.append(counts())
        if line.slot == 0:
            found.append(settled_at(found[0]))
        assert driver.changes >= CHANGES
        return out

    here.run(fn, 250)
    assert agree(here.survivors()) == [(0, 1, 2)] * CHANGES
    warm, after = found
    assert all(now <= then for now, then in zip(after, warm, strict=True)), (warm, after)
