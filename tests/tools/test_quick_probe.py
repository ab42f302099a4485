"""The short measurement: all ranks get the same numbers, a held link bounds them, and a rehearsed
one, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fsdp_demo import Link, PeerLost
from fsdp_demo.automatic.measuring import SIZES, quick_probe
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.membership.protocol_types import Member
from fsdp_demo.net.link import TCP_SHARE
from fsdp_demo.rendezvous.mesh import mesh_peers

from ..support.elastic import Islands
from ..support.inside import in_ranks
from ..support.threaded import islands, values


def alone(run_ranks: Any, run: Callable[[], Any]) -> Any:
    """run() in a process of its own: threads and sockets end with it."""
    return run_ranks(lambda me: run(), 1, 1, timeout=120)[0]


def slow(line: Any, rate: float) -> list[int]:
    """Let what a line sends take its time; returns where its bytes are counted."""
    sent = [0]

    def post_send(send: Any, piece: Any, number: int) -> None:
        sent[0] += piece.size
        time.sleep(8 * piece.size / rate)
        send(piece, number)

    for (wire,) in line._driver.connections.values():
        wire.post_send = partial(post_send, wire.post_send)
    return sent


def test_quick_probe_single_replica() -> None:
    """A single replica has no link."""
    assert quick_probe(PeerGroup(Member(0), {0: "island0"}, [0], 1.0)) is None


@pytest.mark.parametrize("count", [2, 3])
@in_ranks(1, 1, timeout=120)
def test_quick_probe_equal_on_all_islands(count) -> None:
    """All islands of an elastic run get equal numbers."""
    found = Islands(count).run(lambda line: (quick_probe(line, 0.5), line.meter))
    readings = {reading for reading, _ in found.values()}
    assert len(readings) == 1
    (reading,) = readings
    assert reading.rtt > 0 and reading.bits_per_second > 1e4
    for _, meter in found.values():
        assert meter.setup_bytes > SIZES[0] and meter.bytes_sent == 0


@in_ranks(1, 1, timeout=120)
def test_quick_probe_slow_island() -> None:
    """A slow island bounds the rate of all."""

    def fn(i: int, topology: Any) -> Any:
        line = mesh_peers(topology, None)
        sent = slow(line, 20e6 if i else 1e12)
        return quick_probe(line, 1.0), sent[0]

    (mine, sent), (theirs, same) = values(islands(fn))
    assert mine == theirs and sent == same
    assert 1e4 < mine.bits_per_second < 40e6  # of 20 and 1e6 Mbit/s the slow one's
    assert sent < SIZES[-1]  # at 20 Mbit/s 16 MiB take seven seconds


@in_ranks(1, 1, timeout=120)
def test_quick_probe_rehearsed_link() -> None:
    """The rehearsed link bounds the numbers that are returned."""

    def fn(i: int, topology: Any) -> Any:
        return quick_probe(mesh_peers(topology, Link(1e4, 0.5)), 0.2)

    for reading in values(islands(fn)):
        assert reading.bits_per_second == 1e4 * TCP_SHARE and 0.5 < reading.rtt < 2


@in_ranks(1, 1, timeout=120)
def test_quick_probe_silent_island() -> None:
    """A silent island is an error."""
    told = threading.Event()

    def fn(i: int, topology: Any) -> Any:
        line = mesh_peers(topology, None)
        if i:
            assert told.wait(10)
            return None
        with pytest.raises(PeerLost, match="island 1"):
            quick_probe(line, 0.2)
        told.set()
        return None

    values(islands(fn, timeout=2.0))
