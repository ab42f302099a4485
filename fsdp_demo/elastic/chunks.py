"""Pieces of messages on the connections to the other islands: cut into megabytes, dealt to the
connections, put together again.

Room is made only for what this rank waits for. The first megabyte of a piece holds its header, and
is read where the library has it; room is made when its length is as it must be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import Mismatch, WireError
from ..membership.protocol_types import Member, Piece
from ..peers.connection import PeerConnection, QueuedPiece
from ..peers.header import HEADER, Header, Sealed, check_body, claimed, memory, open_head
from ..peers.pieces import LARGEST
from ..peers.poller import Poller
from .message_state import EarlyMessage, RoundMessage

STREAMS = 8
"""Connections to one peer at most. Between islands, pieces are dealt to several of them on a long
link, since one TCP window (4 MiB where nobody has raised it) does not fill it."""
STREAM_RTT = 0.0125
"""Seconds of round trip for which one connection is enough: it has 1.6 MB in flight then, at 1
Gbit/s. Measured at that rate: at 20 ms more of them gain nothing, at 100 ms eight take 32 MB over
in 0.6 of the time of one."""
BUDGET = 32
"""Connections to all peers together. They share the island's line: 50 MB are in flight at 1.6 MB
each, which is 10 Gbit/s at 40 ms. Each takes time in every step, and five descriptors."""
SLOTS = 128
"""Islands that a run can have at most: pieces are numbered by the slot they are of."""


class Stream:
    """A piece that a peer sends to this rank.

    Attributes:
        message, piece: what is received. sender: the peer. owners: of the parts of the message, in
            the view in which the piece was asked for.
        sealed: header and body, complete when no room of `moving` is open.
    """

    def __init__(
        self,
        message: RoundMessage | EarlyMessage,
        piece: Piece,
        sender: Member,
        owners: tuple[Member, ...],
    ):
        self.message, self.piece, self.sender, self.owners = message, piece, sender, owners
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.sealed = Sealed(nothing, nothing)
        self.header: Header | None = None
        self.moving: deque[QueuedPiece] = deque()
        self._crc = 0

    def take(self, moving: QueuedPiece, label: str) -> None:
        """Take the next megabyte that has come. The first one has the header, by which room for the
        body is made. Raises WireError: see `open_head`; or the megabyte is shorter than it must be:
        the rest of its room holds old bytes, which may even be the right ones.
        """
        opens, whole, first = self.header is None, moving.size, self.sealed.body[:0]
        if opens:
            # of one that is too short the checksum of the header does not fit
            self._open(bytes(moving.view[: HEADER.size]).ljust(HEADER.size, b"\0"), label)
            first = _cut(self.sealed.body)[0]
            whole = HEADER.size + first.numel()
        if moving.came != whole:
            raise WireError(f"{label} sent {moving.came} of {whole} bytes of a piece: damaged")
        if first.numel():
            memoryview(memory(first)).cast("B")[:] = moving.view[HEADER.size :]

    def _open(self, head: bytes, label: str) -> None:
        theirs, length = claimed(head)
        limit = self.message.limit(self.piece.what, self.piece.of, self.owners)
        loose = self.message.longest is not None and self.piece.what in ("body", "early")
        if loose and not 0 < length <= limit:
            raise WireError(f"{label} claims a text of {length} bytes: allowed are 1 to {limit}")
        message = self.message
        expected = message.expected(self.piece.what, theirs)
        self.header, self._crc = open_head(head, expected, length if loose else limit, label)
        body = message.room(self.piece, self.owners, length)
        self.sealed = Sealed(torch.frombuffer(bytearray(head), dtype=torch.uint8), body)

    def check(self, label: str) -> None:
        """Compare the body with its checksum. Raises WireError."""
        assert self.header is not None
        check_body(self.sealed.body, self._crc, self.header, label)


class Streams:
    """All pieces that one rank waits for.

    Args:
        connections: the connections for messages to each peer. refused: called with a peer and an
            error, when what it sends is damaged.
        labels: how errors name an island, by slot.
    """

    def __init__(
        self,
        poller: Poller,
        connections: Mapping[Member, Sequence[PeerConnection]],
        refused: Callable[[Member, WireError], None],
        labels: Callable[[int], str] = str,
    ):
        self._poller = poller
        self._connections = connections
        self._refused = refused
        self._labels = labels
        self._waiting: dict[tuple[int, Piece], Stream] = {}

    def send(
        self, message: RoundMessage | EarlyMessage, piece: Piece, data: Sealed, to: Member
    ) -> None:
        """Hand a piece to a peer's connections. Only the body's first megabyte is copied."""
        wires, touched = self._connections[to][: message.num_connections], []
        first, rest = _cut(data.body)
        with self._poller.lock:
            for i, part in enumerate([torch.cat([data.head, first]), *rest]):
                wire = wires[i % len(wires)]
                wire.post_send(QueuedPiece(self._poller, part), _number(message.n, piece))
                touched += [wire] if i < len(wires) else []
        for wire in touched:
            self._poller.nudge(wire)

    def expect(
        self,
        message: RoundMessage | EarlyMessage,
        piece: Piece,
        sender: Member,
        owners: tuple[Member, ...] = (),
    ) -> None:
        """Wait for the first megabyte of a piece, unless it is waited for already."""
        if (message.n, piece) in self._waiting or sender not in self._connections:
            return
        stream = self._waiting[message.n, piece] = Stream(message, piece, sender, owners)
        self._post(stream, [None], 0)

    def _post(self, stream: Stream, rooms: Sequence[Tensor | None], first: int) -> None:
        wires = self._connections[stream.sender][: stream.message.num_connections]
        number = _number(stream.message.n, stream.piece)
        for i, room in enumerate(rooms, first):
            moving = QueuedPiece(self._poller, room)
            stream.moving.append(moving)
            self._poller.post_recv(wires[i % len(wires)], moving, number)

    def done(self) -> Iterator[Stream]:
        """The pieces that have become complete since the last call."""
        for key, stream in list(self._waiting.items()):
            if self._waiting.get(key) is not stream:  # a refusal has ended all
                continue
            while stream.moving and stream.moving[0].is_completed():
                moving = stream.moving.popleft()
                if moving.error is not None:
                    del self._waiting[key]
                    if isinstance(moving.error, WireError):
                        self._refused(stream.sender, moving.error)
                    break
                if not self._taken(key, stream, moving):
                    break
            else:
                if stream.header is not None and not stream.moving:
                    del self._waiting[key]
                    yield stream

    def _taken(self, key: tuple[int, Piece], stream: Stream, moving: QueuedPiece) -> bool:
        """Take a megabyte, and make room for the rest after the first; False if it is refused."""
        opens = stream.header is None
        try:
            stream.take(moving, self._labels(stream.piece.of.slot))
        except Mismatch as error:  # the sender does something else: no other members would help
            del self._waiting[key]
            if isinstance(stream.message, RoundMessage):
                stream.message.tasks.put(error)
            return False
        except WireError as error:
            del self._waiting[key]
            self._refused(stream.sender, error)
            return False
        if opens:
            self._post(stream, _cut(stream.sealed.body)[1], 1)
        return True

    def forget(self, n: int) -> None:
        """Wait for no piece of a message any more."""
        for key in [key for key in self._waiting if key[0] == n]:
            del self._waiting[key]

    def clear(self) -> None:
        """Wait for no piece any more."""
        self._waiting.clear()


def _cut(body: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """The part of a body that goes with the header, and the megabytes behind it."""
    first = LARGEST - HEADER.size
    return body[:first], body[first:].split(LARGEST) if body.numel() > first else ()


def _number(n: int, piece: Piece) -> int:
    """The number of a piece on its connections, from 1, of the 3 x SLOTS + 1 of a message."""
    of = {
        "body": piece.of.slot,
        "part": SLOTS + piece.of.slot,
        "share": 2 * SLOTS,
        "early": 2 * SLOTS + 1 + piece.of.slot,
    }[piece.what]
    return (n * (3 * SLOTS + 1) + of) % (2**32 - 1) + 1


def streams(rtt: float, num_peers: int) -> int:
    """Connections to each of so many peers for a round trip of `rtt` seconds.

    >>> [streams(seconds, 1) for seconds in (0.001, 0.02, 0.05, 0.1, 0.3)]
    [1, 1, 4, 8, 8]
    >>> [streams(0.1, num_peers) for num_peers in (1, 4, 7, 15, 31)]
    [8, 8, 4, 2, 1]
    """
    return min(max(int(rtt / STREAM_RTT + 0.1), 1), most_streams(num_peers))


def most_streams(num_peers: int) -> int:
    """Connections to each of so many peers at most, however long the link is."""
    return min(max(BUDGET // max(num_peers, 1), 1), STREAMS)
