"""Rate and round trip between islands that have just met, in two seconds."""

from __future__ import annotations

import time

import torch

from ..comm.peers import TCP_SHARE, PeerGroup
from .reading import LinkReading

SIZES = tuple(1 << n for n in (14, 16, 18, 20, 22, 24))
"""Bytes of the messages, 16 KiB to 16 MiB, each four times the one before."""


def quick_probe(peers: PeerGroup, seconds: float = 2.0) -> LinkReading | None:
    """Measure the link of a peer group with messages of the exchange itself: same connections, same
    framing, checksums and encryption.

    All ranks of the peer group call it at the same time, before the first step (`attach` has met
    the others, nothing is under way). Messages grow until the next one would not fit into the time.
    The first and the largest are sent twice, for cold code and TCP's slow start. Each island sends
    to all others at once, as the exchange does. The bytes count as `Meter.setup_bytes`.

    In a rehearsal (`peers.link`) nothing paces these messages: the rehearsed link bounds what is
    returned.

    Args:
        seconds: that it may take. A link on which 16 KiB take longer is measured with those.

    Returns:
        The same on all ranks: the slowest rank's rate, and its round trip. None for a single
        replica.

    Raises:
        PeerLost: an island is gone or silent.
    """
    if peers.size == 1:
        return None
    start, rtt, rates = time.monotonic(), peers.round_trip(), list[float]()

    def fits(size: int) -> bool:
        """Send a message; whether there is time for one that takes four times as long."""
        took = max(_slowest(peers, size) - rtt / 2, 1e-6)
        rates.append(8 * size * (peers.size - 1) / took)
        # the largest that a rank has, so that all ranks decide alike
        return _agreed(peers, time.monotonic() - start) + 4 * took + 2 * rtt < seconds

    fits(SIZES[0])  # the first message finds cold connections and code
    size = next((size for size in SIZES if not fits(size)), SIZES[-1])
    if _agreed(peers, time.monotonic() - start) + 8 * size / rates[-1] + 2 * rtt < seconds:
        fits(size)  # once more: the connections are beyond slow start now
    return _rehearsed(peers, LinkReading(max(rates), rtt))


def _slowest(peers: PeerGroup, size: int) -> float:
    """Seconds that a message of `size` bytes from each to all took, on the slowest rank."""
    data = torch.zeros(size, dtype=torch.uint8)
    start = time.monotonic()
    peers.all_gather(data)
    return _agreed(peers, time.monotonic() - start)


def _agreed(peers: PeerGroup, value: float) -> float:
    """The largest that a rank has."""
    mine = torch.tensor([value], dtype=torch.float64).view(torch.uint8)
    return max(float(theirs.clone().view(torch.float64)) for theirs in peers.all_gather(mine))


def _rehearsed(peers: PeerGroup, seen: LinkReading) -> LinkReading:
    """What a rehearsed link leaves of it."""
    if peers.link is None:
        return seen
    rate = peers.link.bits_per_second
    return LinkReading(
        min(seen.bits_per_second, rate * TCP_SHARE) if rate else seen.bits_per_second,
        seen.rtt + peers.link.rtt,
    )
