"""The short measurement: all ranks get the same numbers, a held link bounds them, and a rehearsed
one, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_demo import Link, PeerLost
from fsdp_demo.comm.peers import TCP_SHARE, PeerGroup
from fsdp_demo.tools.doctor.quick import SIZES, quick_probe

from ...support.elastic import Islands
from ...support.threaded import islands, values


def alone(run_ranks: Any, run: Callable[[], Any]) -> Any:
    """run() in a process of its own: threads and sockets end with it."""
    return run_ranks(lambda me: run(), 1, 1, timeout=120)[0]


class Slow:
    """Stands before a group: every send takes `8 * bytes / rate` seconds more, one after another,
    and counts."""

    def __init__(self, group: Any, rate: float):
        self.group, self.rate, self.bytes = group, rate, 0

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.bytes += tensors[0].numel()
        time.sleep(8 * tensors[0].numel() / self.rate)
        return self.group.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self.group.recv(tensors, rank, tag)


def test_a_single_replica_has_no_link() -> None:
    assert quick_probe(PeerGroup(None, 0, 1, ["island0"], 1.0)) is None


@pytest.mark.parametrize("count", [2, 3])
def test_islands_that_come_and_go_get_equal_numbers(run_ranks, count) -> None:
    def run() -> None:
        found = Islands(count).run(lambda line: (quick_probe(line, 0.5), line.meter))
        readings = {reading for reading, _ in found.values()}
        assert len(readings) == 1
        (reading,) = readings
        assert reading.rtt > 0 and reading.bits_per_second > 1e4
        assert reading.link == Link(reading.bits_per_second, reading.rtt)
        for _, meter in found.values():
            assert meter.setup_bytes > SIZES[0] and meter.bytes_sent == 0

    alone(run_ranks, run)


def test_a_slow_island_bounds_the_rate_of_all(run_ranks) -> None:
    def run() -> None:
        def fn(i: int, topology: Any) -> Any:
            slow = Slow(topology.peer_group, 20e6 if i else 1e12)
            return quick_probe(PeerGroup(slow, i, 2, ["a", "b"], 10.0), 1.0), slow.bytes

        (mine, sent), (theirs, same) = values(islands(fn))
        assert mine == theirs and sent == same
        assert 1e4 < mine.bits_per_second < 40e6  # of 20 and 1e6 Mbit/s the slow one's
        assert sent < SIZES[-1]  # at 20 Mbit/s 16 MiB take seven seconds

    alone(run_ranks, run)


def test_the_rehearsed_link_bounds_what_is_returned(run_ranks) -> None:
    def run() -> None:
        def fn(i: int, topology: Any) -> Any:
            link = Link(1e4, 0.5)
            peers = PeerGroup(topology.peer_group, i, 2, ["a", "b"], 10.0, link)
            return quick_probe(peers, 0.2)

        for reading in values(islands(fn)):
            assert reading.bits_per_second == 1e4 * TCP_SHARE and 0.5 < reading.rtt < 2

    alone(run_ranks, run)


def test_a_silent_island_is_an_error(run_ranks) -> None:
    def run() -> None:
        def fn(i: int, topology: Any) -> Any:
            if i:
                time.sleep(2)
                return None
            with pytest.raises(PeerLost, match="island 1"):
                quick_probe(PeerGroup(topology.peer_group, i, 2, ["a", "b"], 0.5), 0.2)
            return None

        values(islands(fn))

    alone(run_ranks, run)
