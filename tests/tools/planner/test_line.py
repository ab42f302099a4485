"""Seconds of a message against a line that is played round trip by round trip, in segments."""

from __future__ import annotations

import math

import pytest

from fsdp_demo import Link
from fsdp_demo.net.link import TCP_SHARE
from fsdp_demo.tools.planner.line import SIMULATED, System, message_seconds


def played(size: int, rate: float, rtt: float, window: float, cap: float) -> float:
    """One connection: `rate` bytes a second, segment by segment; what was sent is acknowledged a
    round trip later and lets two segments go for one.
    """
    segment, now, sent, free = 1448, 0.0, 0, float(window)
    acks: list[float] = []
    at = 0
    while sent < size:
        while at < len(acks) and acks[at] <= now + 1e-12:
            free, at = min(free + 2 * segment, cap), at + 1
        if free >= segment:
            n = min(segment, size - sent)
            sent, free, now = sent + n, free - segment, now + n / rate
            acks.append(now + rtt)
        else:
            now = acks[at]
    return now + rtt / 2


@pytest.mark.parametrize("rtt", [0.01, 0.02, 0.012])
@pytest.mark.parametrize("megabits", [10, 100, 1000])
@pytest.mark.parametrize("size", [3_000, 140_000, 3_000_000])
def test_planner_line_slow_start(size: int, megabits: int, rtt: float) -> None:
    """The seconds of one connection after a long pause are those of the played line."""
    rate = megabits * 1e6 / 8
    system = System(share=1.0, window=None)
    found = message_seconds([(size, size)], Link(8 * rate, rtt), system, 1, idle=100.0)
    slow = played(size, rate, rtt, 14480, math.inf)
    # a window as a whole per round trip, where the oracle doubles ack by ack
    assert found == pytest.approx(slow, rel=0.25, abs=rtt)
    assert found >= rtt / 2 + size / rate - 1e-9


def test_planner_line_short_pause() -> None:
    """After a short pause the window is still open."""
    link, legs = Link(100e6, 0.02), [(164_000, 164_000)]
    open_, cold = (message_seconds(legs, link, System(), 1, idle) for idle in (0.1, 60.0))
    assert open_ == pytest.approx(0.01 + 8 * 164_000 / 100e6 / TCP_SHARE)
    assert cold > open_ + 2 * 0.02
    assert message_seconds(legs, link, System(restarts=False), 1, 60.0) == open_
    # halved once per timeout: in between
    assert open_ < message_seconds(legs, link, System(), 1, 0.7) < cold


def test_planner_line_window_limit() -> None:
    """A window limits a long link, and more connections lift the limit."""
    link, size = Link(10e9, 0.1), 1_000_000_000
    one = message_seconds([(size, size)], link, System(slow_start=False), 1)
    # 100 ms: 8 connections (`peers.streams`), 4 MiB each per round trip
    assert one == pytest.approx(0.05 + size / (8 * 4 * 2**20 / 0.1))
    eight = message_seconds([(size, size)], link, System(slow_start=False), 8)
    assert eight == pytest.approx(0.05 + 8 * size / 10e9 / TCP_SHARE)
    short = message_seconds([(1000, 1000)], Link(10e9, 0.3), System(slow_start=False), 1)
    assert short == pytest.approx(0.15, rel=1e-3)


def test_planner_line_legs() -> None:
    """Legs follow each other, and in each the larger direction counts."""
    system = System(share=1.0, slow_start=False, window=None)
    found = message_seconds([(5e6, 1e6), (1e6, 2e6)], Link(8e6, 0.04), system, 3)
    assert found == pytest.approx(2 * 0.02 + 5 + 2)


def test_planner_line_without_rate() -> None:
    """Without a rate only the round trips are left."""
    assert message_seconds([(5e9, 5e9)], Link(), System(), 4) == 0.0
    free = System(slow_start=False, window=None)
    assert message_seconds([(5e9, 5e9)] * 2, Link(None, 0.1), free, 4) == pytest.approx(0.1)
    assert message_seconds([(1e9, 1e9)], Link(8e9, 0.0), SIMULATED, 1) == pytest.approx(1.0)
