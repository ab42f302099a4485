"""Seconds of a message on a link, from what TCP and the transport do.

A message is one or two legs, each of which everybody ends before the next begins
(`comm/membership.py`). A leg takes half a round trip, and its bytes over the rate of the island's
line, which all its ranks share and which carries headers besides. Two things make it longer on a
long link. A connection has a window, so that n connections carry at most n windows per round trip.
And TCP begins with ten segments and doubles them once per round trip (RFC 6928, RFC 5681); a
connection that was idle for k timeouts begins with its window halved k times (RFC 2861, Linux).
Congestion controls with a rate of their own (BBR) do not begin anew after a pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from ..comm.link import Link
from ..comm.peers import PIECE, TCP_SHARE, streams
from .counting import Leg

SEGMENT = 1448  # payload bytes
FIRST_WINDOW = 10 * SEGMENT  # RFC 6928
LEAST_TIMEOUT = 0.2  # seconds; Linux adds the round trip


@dataclass(frozen=True)
class System:
    """How machines and line behave, apart from rate and round trip.

    Attributes:
        overlap_backward: the gradients of a layer leave as soon as its backward has ended, as in
            torch's HSDP and in simulations; False: after the step, as all exchanges here do.
        share: of the rate that carries payload; 1 for a line without packet headers.
        window: bytes of a connection that may be under way; None for no limit.
        slow_start: connections begin slowly, and after a pause again.
        restarts: whether a pause lets them begin again (not under BBR).
        bytes_per_parameter: see `counting.cycle`.
        compression: whether coding and transport take time.
    """

    overlap_backward: bool = False
    share: float = TCP_SHARE
    window: float | None = 4 * 2**20
    slow_start: bool = True
    restarts: bool = True
    bytes_per_parameter: float | None = None
    compression: bool = True


SIMULATED = System(
    overlap_backward=True, share=1.0, window=None, slow_start=False, compression=False
)
"""What papers simulate (Streaming DiLoCo, arXiv 2501.18512, section 4.1): bytes over a rate, which
begin to move layer by layer in the last backward."""


def message_seconds(
    legs: Sequence[Leg],
    link: Link,
    system: System,
    peers: int,
    idle: float = 0.0,
    num_peers: int = 1,
) -> float:
    """Seconds from the hand-over of a message to its end.

    Args:
        legs: bytes out of the island and into it, of each leg.
        peers: pairs of ranks that talk: shards x (islands - 1).
        idle: seconds for which the connections were idle before.
        num_peers: that one rank has.
    """
    if not link:
        return 0.0
    rate = link.bits_per_second * system.share / 8 if link.bits_per_second else float("inf")
    if not link.rtt:
        return sum(max(leg) for leg in legs) / rate
    total, open_window = 0.0, 0.0
    for i, leg in enumerate(legs):
        size = max(leg)
        most = streams(link.rtt, num_peers)
        used = peers * min(most, max(ceil(size / max(peers, 1) / PIECE), 1))
        pace = min(rate, used * system.window / link.rtt) if system.window else rate
        if system.slow_start and i == 0:
            open_window = _window(pace * link.rtt, used, idle, link.rtt, system.restarts)
        seconds, open_window = (
            _rounds(size, pace, link.rtt, open_window)
            if system.slow_start
            else (size / pace, open_window)
        )
        total += link.rtt / 2 + seconds
    return total


def _window(full: float, connections: int, idle: float, rtt: float, restarts: bool) -> float:
    """Bytes that may leave in the first round trip after a pause, of connections that have carried
    messages before.
    """
    first = float(connections * FIRST_WINDOW)
    halved = floor(idle / (LEAST_TIMEOUT + rtt)) if restarts else 0
    return max(first, full / 2**halved if halved < 60 else 0.0)


def _rounds(size: float, pace: float, rtt: float, window: float) -> tuple[float, float]:
    """(seconds until the last of `size` bytes leaves, the window then): a window per round trip,
    doubled by each, until windows fill the line.
    """
    seconds, full = 0.0, pace * rtt
    if pace == float("inf"):
        full = float("inf")
    while window < full and size > window:
        size, seconds, window = size - window, seconds + rtt, 2 * window
    return seconds + (size / pace), window
