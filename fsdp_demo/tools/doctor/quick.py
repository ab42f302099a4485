"""Rate and round trip between islands that have just met, in two seconds."""

from __future__ import annotations

import time

import torch

from ...elastic.peer_group import PeerGroup
from ...net.link import TCP_SHARE
from ...peers.votes import Ranks
from .reading import LinkReading

SIZES = tuple(1 << n for n in (14, 16, 18, 20, 22, 24))
"""Bytes of the messages, 16 KiB to 16 MiB, each four times the one before."""

ALONE = Ranks(None, 0, 1)
"""An island of one rank."""


def quick_probe(
    peers: PeerGroup | None, seconds: float = 2.0, island: Ranks = ALONE
) -> LinkReading | None:
    """Measure the link of a peer group with messages of the exchange itself: same connections, same
    framing, checksums and encryption.

    All ranks of all islands call it at the same time, before the first step (`attach` has met
    the others, nothing is under way). Messages grow until the next one would not fit into the time.
    The first and the largest are sent twice, for cold code and TCP's slow start. Each island sends
    to all others at once, as the exchange does. The bytes count as `Meter.setup_bytes`.

    In a rehearsal (`peers.link`) nothing paces these messages: the rehearsed link bounds what is
    returned.

    Args:
        peers: None on a rank that exchanges nothing; it takes part in what the island decides.
        seconds: that it may take. A link on which 16 KiB take longer is measured with those.
        island: the ranks of this island. A message is complete when all of them hold theirs, so
            all send equally many.

    Returns:
        The same on all ranks of a peer group: the slowest rank's rate, and its round trip. None
        for a single replica, and where all others were lost meanwhile.

    Raises:
        PeerLost: an island is gone or silent.
    """
    line = peers if peers is not None and peers.size > 1 else None
    start, rtt = time.monotonic(), 0.0 if line is None else line.round_trip()
    rates, took = list[float](), 0.0

    def fits(more: float) -> bool:
        """Whether there is time for something that takes `more` times what the last message took.

        All ranks of all islands decide alike: by the largest of what they have.
        """
        needed = 0.0
        if line is not None:
            needed = _agreed(line, time.monotonic() - start) + more * took + 2 * rtt
        return island.max(needed)[0] < seconds

    def send(size: int) -> float:
        if line is None:
            return 0.0
        seen = max(_slowest(line, size) - rtt / 2, 1e-6)
        rates.append(8 * size * (line.size - 1) / seen)
        return seen

    took = send(SIZES[0])  # the first message finds cold connections and code
    for size in SIZES:
        took = send(size)
        if not fits(4):
            break
    if fits(1):
        send(size)  # once more: the connections are beyond slow start now
    if line is None or not max(rates):
        return None
    return _rehearsed(line, LinkReading(max(rates), rtt))


def _slowest(peers: PeerGroup, size: int) -> float:
    """Seconds that a message of `size` bytes from each to all took, on the slowest rank."""
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    start = time.monotonic()
    peers.all_gather(data)
    return _agreed(peers, time.monotonic() - start)


def _agreed(peers: PeerGroup, value: float) -> float:
    """The largest that a rank has."""
    mine = torch.tensor([value], dtype=torch.float64, device="cpu").view(torch.uint8)
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
