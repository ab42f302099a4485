"""Numbers of one pair, against what is known: a link of a known rate, counts of the kernel, a
connection that dies.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_demo.net.tcp import Counted
from fsdp_demo.peers.zeromq import Meeting
from fsdp_demo.store.client import WorldStore
from fsdp_demo.tools.doctor import probe
from fsdp_demo.tools.doctor.measured import Direction
from fsdp_demo.tools.doctor.probe import Pair, Probe, lost, pieces

from ...support.inside import in_a_process, in_ranks
from ...support.threaded import at_once
from ...support.threads import warm


def paired(fn: Callable[[Pair, int], Any], timeout: float = 10.0, **how: Any) -> list[Any]:
    """fn(pair, rank) on two threads; what each returned."""
    store, found = WorldStore(dist.HashStore(), "the test", 5.0), [None, None]
    warm()

    def work(rank: int) -> None:
        names = ("a", "b")
        meeting = Meeting(store, "pair", rank, 2, names, "127.0.0.1", timeout, **how)
        pair = Pair(meeting, time.monotonic() + 60)
        try:
            found[rank] = fn(pair, rank)
        finally:
            pair.close()

    at_once(work, 2, 100)
    return found


def slowed(pair: Pair, rate: float) -> None:
    """Let each piece that this side sends take its time at `rate` bit/s, on all connections
    together.
    """
    widen = pair.widen

    def slow(group: Any) -> None:
        send = group.send

        def late(tensor: Any, *to: int) -> Any:
            time.sleep(8 * tensor.numel() / rate)
            return send(tensor, *to)

        group.send = late

    def widened(connections: int) -> None:
        before = len(pair._groups)
        widen(connections)
        for group in pair._groups[before:]:
            slow(group)

    pair.widen = widened  # type: ignore[method-assign]
    for group in pair._groups:
        slow(group)


@in_a_process
def test_doctor_probe_known_rate() -> None:
    """The probe measures a link of a known rate."""
    probe.PAUSE = 0.05

    def fn(pair: Pair, rank: int) -> Direction:
        if rank:
            slowed(pair, 50e6)
        return Probe(pair, rank, 1 - rank, 4.0).run()

    fast, slow = paired(fn)
    assert fast.error == slow.error == ""
    # never faster than it is; a busy machine may make it slower
    assert all(1 < rate < 60 for rate in slow.mbit_s.values())
    assert max(fast.mbit_s.values()) > max(slow.mbit_s.values())


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO of Linux")
@in_ranks(1, 1, timeout=120)
def test_doctor_probe_kernel_counts() -> None:
    """The kernel counts the bytes that were sent."""
    both = threading.Barrier(2)  # who ends first closes the connections

    def fn(pair: Pair, rank: int) -> tuple[list[Counted], list[Counted]]:
        pair.widen(2)
        before = pair.counted()
        pair.message(rank == 0, pieces(64 << 20), 2)  # some ticks of the kernel's clock
        after = pair.counted()
        both.wait(30)
        return before, after

    (before, after), _ = paired(fn)
    assert len(before) == len(after) == 2
    packets = [b.packets - a.packets for a, b in zip(before, after, strict=True)]
    mss = after[0].mss
    assert all(n * mss >= 32 << 20 for n in packets)  # half of the message each
    assert after[0].mtu >= mss and after[0].busy > 0
    assert lost(before, after)["loss"] < 0.5


@in_a_process
def test_doctor_probe_encrypted() -> None:
    """With a token all measurements are encrypted."""
    probe.PAUSE = 0.05
    probed = lambda pair, rank: Probe(pair, rank, 1 - rank, 1.0).run()  # noqa: E731
    for one in paired(probed, token="a secret of these tests only"):
        assert one.error == "" and one.rate > 0


@in_a_process
def test_doctor_probe_dead_connection() -> None:
    """A connection that dies leaves what was measured before."""
    probe.SILENCE = 3.0

    def fn(pair: Pair, rank: int) -> Direction:
        probe = Probe(pair, rank, 1 - rank, 1.0)
        if rank:
            probe._grow = lambda leads: pair._groups[0].close()  # type: ignore[method-assign]
        return probe.run()

    for one in paired(fn, timeout=3.0):
        assert one.rtt_ms > 0 and one.error and not one.mbit_s


@in_ranks(1, 1, timeout=120)
def test_doctor_probe_deadline() -> None:
    """The probe ends when its time is over."""

    def fn(pair: Pair, rank: int) -> Direction:
        pair.message(rank == 0, [1])  # both have met
        pair._end = time.monotonic()
        return Probe(pair, rank, 1 - rank, 1.0).run()

    for one in paired(fn):
        assert one.error == "the time for this measurement is over"


def test_doctor_probe_losses() -> None:
    """Losses are counted between two readings of the kernel."""
    before = Counted(1448, 1500, 5, 1000, 1.0, 0.0, 0.0)
    after = before._replace(again=15, packets=1500)
    assert lost([before], [after]) == {"loss": 0.02, "mtu": 1500}
    assert lost([before], [before])["loss"] == 0.0
    assert lost([], []) == {} and lost([before], [after, after]) == {}
