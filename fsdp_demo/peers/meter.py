"""The one place where bytes, messages and waiting are counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Meter:
    """Counts of one rank. Bytes are those handed to the connections, to the byte: its frames
    (`zeromq.py`) and TCP/IP headers come on top.

    Attributes:
        exchanges: ticks on which something was exchanged.
        messages: rounds of sends on the replicate axis (a payload: one; a reduce: header and two
            legs, three).
        bytes_sent, bytes_received: to and from the other replicas.
        seconds_exchanging: from when an exchange is on the host to its end, in flight.
        seconds_waiting: in which training stood still for the link. The time in which it stood
            still for its own GPU, which had to end the step first, is not among them.
        setup_bytes: bytes sent before the first step and in digests (initial broadcast); not part
            of `bytes_sent`.

    Example: `Exchange.metrics()` shows these counts.
        >>> from fsdp_demo import Meter
        >>> Meter(messages=1, bytes_sent=3000).bytes_sent
        3000
    """

    exchanges: int = 0
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_exchanging: float = 0.0
    seconds_waiting: float = 0.0
    setup_bytes: int = 0

    def count(self, sent: int, received: int, rounds: int = 1) -> None:
        """Rounds of sends."""
        self.messages += rounds
        self.bytes_sent += sent
        self.bytes_received += received

    def add(self, other: Meter) -> None:
        """Add another meter's counts."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def ring_all_reduce_bytes(replicas: int, payload: int) -> int:
    """Bytes one rank sends in a ring all-reduce of `payload` bytes: 2 (R - 1) / R times the
    payload.

    Example:
        >>> from fsdp_demo import ring_all_reduce_bytes
        >>> ring_all_reduce_bytes(2, 1000)
        1000
    """
    return 2 * payload * (replicas - 1) // replicas
