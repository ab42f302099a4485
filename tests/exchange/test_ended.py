"""The last line of the log, where islands were lost or have joined."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_demo import Topology
from fsdp_demo.exchange import summary
from fsdp_demo.exchange.saved_state import History


@pytest.mark.parametrize(
    ("slots", "equal", "says"),
    [
        ((0, 1, 2), True, "for the link; islands agree, bit for bit"),
        ((0, 2), True, "3 islands began, 2 at the end: islands 0, 2; these agree, bit for bit"),
        ((0, 2), False, "3 islands began, 2 at the end: islands 0, 2; these differ"),
        ((0, 2), None, "2 at the end: islands 0, 2; these hold their mean, this one was off it"),
        ((0,), True, "3 islands began, 1 at the end: island 0: there is no other to agree with"),
    ],
)
def test_finish_log_names_islands(
    slots: tuple[int, ...], equal: bool | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The last line of the log names the islands that took part at the end, and whether
    they agree.
    """
    topology = Topology("islands", 0, 3, count=3, name="island0")
    queue = SimpleNamespace(history=History(3, slots=slots))
    runtime: Any = SimpleNamespace(topology=topology, peers=1, queue=queue, step=9, drift=0.25)
    found = {"exchanges": 4, "bytes_sent": 10, "seconds_waiting": 0.0}
    with caplog.at_level(logging.INFO, "fsdp_demo"):
        summary.ended(runtime, found, equal)
    assert says in caplog.text, caplog.text
