"""Pieces of a message: the header of each, and where it goes when it comes."""

from __future__ import annotations

import pytest

from fsdp_demo import WireError
from fsdp_demo.peers.pieces import (
    LARGEST,
    MOST_UNCLAIMED_BYTES,
    PIECE,
    Inbox,
    NoRoom,
    PieceHeader,
    read,
)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n", "16 bytes, expected 36"),
        (b"FDX2" + bytes(32), "use one release everywhere"),
        (b"FDXP\x01" + bytes(31), "version 1"),
        (b"FDXP\x02\x09" + bytes(30), "kind 9"),
        (PieceHeader(PIECE, 0, 1, 0, LARGEST + 1).pack(), "1048577 bytes is announced"),
    ],
)
def test_piece_header_malformed_is_refused(data: bytes, says: str) -> None:
    """Bytes that are no header of a piece are refused with what was found."""
    with pytest.raises(WireError, match=says):
        read(data)


def test_piece_header_reads_back() -> None:
    """The header of a piece reads back from its 36 bytes."""
    frame = PieceHeader(PIECE, 3, 70_000, 5, LARGEST)
    assert read(frame.pack()) == frame and len(frame.pack()) == 36


class Room:
    def __init__(self, size: int):
        self.size = size


def test_inbox_places_pieces() -> None:
    """A piece goes to the room that waits for it, aside if it is early, later if it does not fit,
    and nowhere if it is of an older view.
    """
    inbox = Inbox(view=2)
    room, other = Room(10), Room(10)
    assert inbox.wait_for(1, room) is None and inbox.wait_for(1, other) is None
    assert (
        inbox.place(PieceHeader(PIECE, 1, 1, 0, 10)) is NoRoom.DROP
    )  # of an older view: does not count
    assert inbox.place(PieceHeader(PIECE, 2, 1, 0, 10)) is room
    assert inbox.place(PieceHeader(PIECE, 2, 1, 1, 4)) is other
    assert inbox.place(PieceHeader(PIECE, 2, 2, 0, 10)) is NoRoom.ASIDE
    assert inbox.keep(2, b"0123456789", 10) is None
    assert inbox.wait_for(2, Room(10)) == b"0123456789"
    assert inbox.place(PieceHeader(PIECE, 2, 3, 0, MOST_UNCLAIMED_BYTES)) is NoRoom.ASIDE
    assert inbox.keep(3, "long", MOST_UNCLAIMED_BYTES) is None
    # asked again below, which counts once
    assert inbox.place(PieceHeader(PIECE, 2, 4, 0, 1)) is NoRoom.LATER
    # of a later view: until this rank is there
    assert inbox.place(PieceHeader(PIECE, 3, 1, 0, 10)) is NoRoom.LATER


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (PieceHeader(PIECE, 2, 1, 1, 10), "expected piece 0"),
        (PieceHeader(PIECE, 2, 1, 0, 11), "11 bytes, there is room for 10"),
    ],
)
def test_inbox_refuses_a_piece_that_does_not_fit(frame: PieceHeader, says: str) -> None:
    """A piece out of order, or larger than its room, is refused."""
    inbox = Inbox(view=2)
    inbox.wait_for(1, Room(10))
    with pytest.raises(WireError, match=says):
        inbox.place(frame)
