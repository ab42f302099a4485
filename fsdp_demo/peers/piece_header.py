"""The frame that stands before every piece on the connections between islands (`zeromq.py`).

36 bytes, little-endian:

    4s   magic "FDXP"
    u8   version
    u8   kind
    u16  zero
    u32  epoch
    u32  number of the message on its peer group
    u32  piece of that message on this connection, from 0
    u64  bytes of the piece
    u32  newest record that the sender knows
    u32  messages that it has delivered

The last two are for `membership/machine.py`.

It is read before any room is made for the piece. What a message says about itself stands in
`header.py`, within its first piece.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..errors import WireError

MAGIC, VERSION = b"FDXP", 2
FRAME = struct.Struct("<4sBBHIIIQII")

HELLO, PIECE, NOTE = range(3)
"""NOTE: a short word (JSON) that nobody waits for; it belongs to no message, and overtakes all
pieces that wait.
"""

LARGEST = 1 << 20
"""Bytes of a piece at most: nobody can make a receiver allocate more at a time."""

LONGEST = 1 << 16
"""Bytes of a note at most."""


class PieceHeader(NamedTuple):
    """What a piece says about itself."""

    kind: int
    epoch: int
    number: int
    piece: int
    length: int
    record: int = 0
    landed: int = 0

    def pack(self) -> bytes:
        """The 36 bytes."""
        return FRAME.pack(
            MAGIC,
            VERSION,
            self.kind,
            0,
            self.epoch,
            self.number,
            self.piece,
            self.length,
            self.record,
            self.landed,
        )


def read(data: bytes) -> PieceHeader:
    """The frame in `data`.

    Raises:
        WireError: it is none, or announces more than `LARGEST` bytes.
    """
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
