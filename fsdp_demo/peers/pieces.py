"""The pieces of messages on the connections between islands (`zeromq.py`): the frame before each,
and where it goes when it arrives.

A frame has 36 bytes, little-endian:

    4s   magic "FDXP"
    u8   version
    u8   kind
    u16  zero
    u32  view of the members (`membership/protocol_types.py`), 0 at the start
    u32  number of the message on its peer group
    u32  piece of that message on this connection, from 0
    u64  bytes of the piece
    u32  newest record that the sender knows
    u32  messages that it has delivered

The last two are for `membership/machine.py`. A frame is read before any room is made for its
piece. What a message says about itself stands in `header.py`, within its first piece.

A piece that arrives goes into the room that waits for it, aside if none does yet, or away. That is
bookkeeping alone, without a socket and without a clock. Nothing is copied: a connection asks
`Inbox.place` with the frame of a piece, before it reads the piece itself.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import Enum
from typing import Any, NamedTuple

from ..errors import WireError

MAGIC, VERSION = b"FDXP", 2
FRAME = struct.Struct("<4sBBHIIIQII")

HELLO, PIECE, NOTE = range(3)
"""NOTE: a note (`elastic/notes.py`), which belongs to no message, and overtakes all
pieces that wait.
"""

LARGEST = 1 << 20
"""Bytes of a piece at most: nobody can make a receiver allocate more at a time."""

LONGEST = 1 << 16
"""Bytes of a note at most."""


class PieceHeader(NamedTuple):
    """What a piece says about itself."""

    kind: int
    view: int
    number: int
    piece: int
    length: int
    record: int = 0
    landed: int = 0

    def pack(self) -> bytes:
        """The frame as its 36 bytes."""
        return FRAME.pack(MAGIC, VERSION, self[0], 0, *self[1:])


def read(data: bytes) -> PieceHeader:
    """The frame in `data`. Raises WireError: it is none, or announces more than `LARGEST` bytes."""
    if len(data) != FRAME.size:
        raise WireError(
            f"a frame of {len(data)} bytes, expected {FRAME.size}: somebody else connects here, or "
            "another release"
        )
    magic, version, kind, _, *rest = FRAME.unpack(data)
    if magic != MAGIC or version != VERSION:
        wanted = f"expected {MAGIC!r} version {VERSION}"
        raise WireError(
            f"a frame starts with {magic!r} version {version}, {wanted}: use one release everywhere"
        )
    if kind not in (HELLO, PIECE, NOTE):
        raise WireError(
            f"a frame of kind {kind}, known are {HELLO} to {NOTE}: use one release everywhere"
        )
    frame = PieceHeader(kind, *rest)
    if frame.length > (LONGEST if kind == NOTE else LARGEST):
        raise WireError(
            f"a piece of {frame.length} bytes is announced, allowed are "
            f"{LONGEST if kind == NOTE else LARGEST}"
        )
    return frame


MOST_UNCLAIMED_BYTES = 16 << 20
"""Bytes of pieces for which nobody waits yet that one connection keeps; more stay with the sender.
A short message behind them is reached as long as what has left the sender of a long one is less,
so it is more than the kernels of both sides hold by default."""


class NoRoom(Enum):
    """What is done with a piece that has no room of its own."""

    DROP = "it is of an earlier view"
    ASIDE = "nobody waits for it yet: keep it"
    LATER = "nobody waits for it, and enough is kept, or it is of a later view: do not read it yet"


class Inbox:
    """The rooms, and the pieces that nobody waits for yet, of one connection.

    Args:
        view: the only one whose pieces are taken: earlier ones are dropped, later ones wait.

    Attributes:
        rooms: what waits, by number of the message, in order. kept: pieces that came before their
            room, likewise.
    """

    def __init__(self, view: int):
        self.view = view
        self.rooms: dict[int, deque[Any]] = {}
        self.kept: dict[int, deque[Any]] = {}
        self._bytes, self._taken = 0, Counts()

    def place(self, frame: PieceHeader) -> Any:
        """The room for a piece, which is taken from `rooms` (it has `size`, in bytes), or a
        `NoRoom`. Ask again after LATER. Raises WireError: it is not the next of its message, or
        longer than its room.
        """
        if frame.view > self.view:
            return NoRoom.LATER
        if frame.view < self.view:
            return NoRoom.DROP
        rooms = self.rooms.get(frame.number)
        if not rooms and self._bytes + frame.length > MOST_UNCLAIMED_BYTES:
            return NoRoom.LATER
        expected = self._taken.next(frame.number)
        if frame.piece != expected:
            raise WireError(
                f"piece {frame.piece} of message {frame.number} came, expected piece {expected}"
            )
        if not rooms:
            return NoRoom.ASIDE
        self._must_fit(frame.number, frame.length, rooms[0])
        return self._first(self.rooms, frame.number)

    def keep(self, number: int, data: Any, size: int) -> Any:
        """Put a piece aside; the room for it, if it was posted since `place` was asked."""
        if self.rooms.get(number):
            self._must_fit(number, size, self.rooms[number][0])
            return self._first(self.rooms, number)
        self.kept.setdefault(number, deque()).append((data, size))
        self._bytes += size
        return None

    def wait_for(self, number: int, room: Any) -> Any:
        """Post a room for the next piece of a message: the piece, if it came before; None if it is
        to come. Raises WireError: what came is longer.
        """
        if self.kept.get(number):
            data, size = self._first(self.kept, number)
            self._bytes -= size
            self._must_fit(number, size, room)
            return data
        self.rooms.setdefault(number, deque()).append(room)
        return None

    def withdraw(self) -> list[Any]:
        """Take all rooms back."""
        rooms = [room for waiting in self.rooms.values() for room in waiting]
        self.rooms.clear()
        return rooms

    @staticmethod
    def _must_fit(number: int, size: int, room: Any) -> None:
        if size > room.size:
            raise WireError(
                f"a piece of message {number} has {size} bytes, there is room for {room.size}"
            )

    @staticmethod
    def _first(queues: dict[int, deque[Any]], number: int) -> Any:
        queue = queues[number]
        first = queue.popleft()
        if not queue:
            del queues[number]
        return first


class Counts:
    """How many pieces of each message there were, of the latest messages.

    >>> counts = Counts()
    >>> [counts.next(7), counts.next(7), counts.next(8)]
    [0, 1, 0]
    """

    def __init__(self, latest: int = 4096):
        self._counts: dict[int, int] = {}
        self._latest = latest

    def next(self, number: int) -> int:
        """The index of the next piece of a message, counted."""
        count = self._counts.get(number, 0)
        self._counts[number] = count + 1
        if len(self._counts) > self._latest:
            del self._counts[next(iter(self._counts))]
        return count
