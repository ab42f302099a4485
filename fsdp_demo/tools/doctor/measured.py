"""The records of an examination: what an island knows of itself, what was measured between two
islands, and the findings. Islands send each other these records as JSON (msgspec knows dataclasses;
a field that another release has added is ignored).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Island:
    """The facts of one island.

    Attributes:
        island, name, host: number of the island, its name, and the name of its machine.
        address: address at which the other islands reach it.
        versions: versions of python, torch, fsdp_demo and the wire format, by name.
        interface: name of the interface that holds the address. speed_mbit, mtu: its speed in
            Mbit/s and the bytes of its largest packet, where the kernel knows them.
        congestion, slow_start_after_idle: settings of Linux for TCP.
        disk_mb_s: MB/s at which a file reaches the disk; None: not measured.
        step_seconds: seconds of a training step; None: not measured.
        open_files, open_files_needed: hard limit of descriptors, and how many a rank needs at most.
    """

    island: int
    name: str
    host: str
    address: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    interface: str = ""
    speed_mbit: int | None = None
    mtu: int | None = None
    congestion: str = ""
    slow_start_after_idle: bool | None = None
    disk_mb_s: float | None = None
    step_seconds: float | None = None
    open_files: int | None = None
    open_files_needed: int | None = None

    @property
    def label(self) -> str:
        """The island as errors name it."""
        return f"island {self.island} ({self.name})"


OK, REFUSED, TIMEOUT, UNREACHABLE, OTHER = "ok", "refused", "timeout", "unreachable", "other"
"""Outcomes of a connection: it stood; the port is closed; nothing came back; the system knows no
way there; another program answered."""

BECAME = {
    TIMEOUT: "nothing comes back",
    REFUSED: "the connection is refused",
    OTHER: "somebody else answers",
}


@dataclass(frozen=True)
class Reach:
    """Whether `sender` can connect to `receiver`, by a plain TCP connection to a port of its own.

    Attributes:
        state: one of the above, at the address that the receiver names.
        address: the address that the receiver names.
        other: an address at which the receiver is reached instead, "" if there is none.
        forth, back: whether 32 KiB came over in packets of the usual size, to the receiver and from
            it. None: not tried.
        packet: bytes of the largest packet with which both came over, where the usual one did not;
            0: none.
    """

    sender: int
    receiver: int
    state: str
    address: str = ""
    other: str = ""
    forth: bool | None = None
    back: bool | None = None
    packet: int | None = None

    @property
    def whole(self) -> bool:
        """Whether data passes both ways."""
        return self.state == OK and self.forth is not False and self.back is not False

    @property
    def became(self) -> str:
        """The outcome of a connection that does not stand, in words."""
        return BECAME.get(self.state, "there is no way there, or nobody listens")


@dataclass(frozen=True)
class Direction:
    """The measurements of the messages from `sender` to `receiver`, over connections of the
    exchange's kind.

    Attributes:
        rtt_ms, jitter_ms: round trip of a short message: median, and mean difference of one to the
            next (RFC 3550).
        loss: share of the packets with data that were sent again. mtu: bytes of the largest
            packet that the path takes.
        clock_offset_ms: clock of the receiver less that of the sender (RFC 5905).
        connections: number of connections that the exchange uses at this round trip.
        mbit_s: rate by number of connections.
        first_after_idle_ms, warm_ms: milliseconds of a message of `idle_bytes` after a second
            without messages, and right behind other messages.
        held_here, held_there: with one connection, share of the time that the kernel waited for
            room in the send buffer, and for the receiver's window.
        error: why the measurement ended before its time, "" where it did not.
    """

    sender: int
    receiver: int
    rtt_ms: float | None = None
    jitter_ms: float | None = None
    loss: float | None = None
    mtu: int | None = None
    clock_offset_ms: float | None = None
    connections: int = 1
    mbit_s: dict[str, float] = field(default_factory=dict)
    first_after_idle_ms: float | None = None
    warm_ms: float | None = None
    idle_bytes: int | None = None
    held_here: float | None = None
    held_there: float | None = None
    error: str = ""

    @property
    def rate(self) -> float | None:
        """Mbit/s with as many connections as the exchange uses."""
        return self.mbit_s.get(str(self.connections))

    @property
    def best(self) -> float | None:
        """The highest rate in Mbit/s, with any number of connections."""
        return max(self.mbit_s.values(), default=None)


@dataclass(frozen=True)
class Examination:
    """The facts and measurements of all islands.

    Attributes:
        islands: in their order. reaches, directions: by (sender, receiver).
    """

    islands: tuple[Island, ...]
    reaches: dict[tuple[int, int], Reach] = field(default_factory=dict)
    directions: dict[tuple[int, int], Direction] = field(default_factory=dict)

    def label(self, i: int) -> str:
        """An island by its number, as findings name it."""
        return self.islands[i].label

    def usual(self, i: int, j: int) -> int:
        """Bytes of the packets that two islands send each other: of the smaller interface."""
        return min((m for k in (i, j) if (m := self.islands[k].mtu)), default=1500)

    def measured(self) -> Iterator[tuple[int, int, Direction]]:
        """(sender, receiver, what was measured) of the directions that have a rate."""
        return ((i, j, d) for (i, j), d in sorted(self.directions.items()) if d.best is not None)

    @property
    def misplaced(self) -> set[int]:
        """Islands that nobody reaches at the address that they name, but some island at another."""
        reached = {to for (_, to), reach in self.reaches.items() if reach.state == OK}
        return {to for (_, to), reach in self.reaches.items() if reach.other} - reached


# ---- what is wrong -----------------------------------------------------------------------------

PAGE = "docs/doctor.md"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, as a rule names it.

    Attributes:
        says: sentence on what was found, with its numbers. cure: what to do.
        stops: whether a run cannot start or go on with it.
        name: name of the rule (`findings` gives it), and anchor of its section in `PAGE`.
    """

    says: str
    cure: str
    stops: bool = False
    name: str = ""

    @property
    def see(self) -> str:
        """The section of the docs that explains this finding."""
        return f"{PAGE}#{self.name}"
