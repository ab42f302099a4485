"""One connection of ZeroMQ to one peer, and what waits on it. `poller.py` moves it."""

from __future__ import annotations

import heapq
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from ..errors import WireError
from ..net.tcp import gather, stood
from ..store.connection import REFUSED
from . import pieces
from .header import memory
from .pieces import Counts, Inbox, NoRoom, PieceHeader

TURN = 4  # pieces that one connection takes or gives before the next has its turn
WAITING = 2  # pieces that wait in the library: what is there cannot be overtaken any more
KNOWN = 4096  # messages of which a wire knows whether they are short
AGAIN = 0.2  # seconds between two tries to connect
# bytes: a message whose first piece is not longer overtakes others; it is also copied when it is
# read before its room is made
SHORT = 1 << 16

GATHERED = 1 << 18  # bytes of a long message for which the kernel wakes the library at once
ALONE = 1.0  # seconds without a frame after which it wakes it for every byte again

AT_ONCE, BRIEF, LONG = range(3)
"""The order in which what waits is sent: notes, pieces of short messages, the others."""

# plain numbers: those of an enum take five times as long, and every turn asks
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
NOBLOCK, SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
NOT_THERE = zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED


class QueuedPiece:
    """One piece that is being sent or received.

    Args:
        data: what is sent, or the room for what comes; None: what comes is read where the library
            has put it.

    Attributes:
        size: bytes to send, or bytes of the room of a piece to come. came: bytes received.
        view: the bytes; None until they have come, where they have no room here. there: they have
            come, or the library has them.
    """

    def __init__(self, poller: Any, data: Tensor | None):
        self._poller, self.came = poller, 0
        self.size = pieces.LARGEST if data is None else data.numel()
        # it keeps the tensor: the library reads from it when nobody waits any more
        self.view: Any = None if data is None else memoryview(memory(data)).cast("B")
        self.there = False
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self.there or self.error is not None

    def wait(self, timeout: timedelta) -> None:
        """Wait until the piece is here, or is handed to the library, which may read from its memory
        for as long as the connection stands. Raises WireError: the piece that came is refused.
        RuntimeError: the peer is gone, or was silent for `timeout`.
        """
        self._poller.wait(self, timeout.total_seconds())
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def fill(self, data: Any, size: int) -> None:
        """Take a piece that the library has read."""
        if self.view is None:
            self.view = data
        elif size:
            self.view[:size] = data
        self.came, self.there = size, True


class PeerConnection:
    """A PAIR socket to exactly one peer.

    Methods that touch the socket are called in the poller's thread, all others under its lock.

    Attributes:
        ready: the peer has greeted. gone: why the connection has ended, "" while it stands.
            trouble: why it did not come to `ready` so far.
        notes: received notes. heard_at: time of the last frame (`time.monotonic`).
        most: notes that are kept at most; more stay with the sender. None: no limit.
        doubted: time at which something could not be decrypted, 0 for never. A stranger may have
            sent it, whom the library sends away. If the peer did, the library says nothing more,
            and reads no more (libzmq 4.3.5).
        record, landed: of the peer, as its last frame said. said: the same of this rank, for its
            frames.
    """

    def __init__(self, poller: Any):
        self.poller, self.inbox, self.counts = poller, Inbox(0), Counts()
        self.socket: Any = poller.socket()
        self.monitor: Any = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | NOT_THERE | REFUSED
        )
        self.ready, self.gone, self.trouble = False, "", ""
        self._hello = self._mine = self._theirs = b""
        self._address, self._dial_at = "", 0.0
        self._file = -1  # descriptor of the connection
        self.notes: deque[bytes] = deque()
        self.heard_at, self.record, self.landed = time.monotonic(), 0, 0
        self.doubted = 0.0
        self.said = (0, 0)
        self.most: int | None = None
        self._queue: list[tuple[int, int, PieceHeader, QueuedPiece]] = []
        self._order, self._late = 0, dict[int, bool]()
        self._head: PieceHeader | None = None  # of a piece that is not read yet
        self._paced_until = 0.0
        self._gathers = False

    # ---- the pace of the kernel, in the poller's thread ----------------------------------------

    def keep_pace(self, now: float) -> None:
        """Let the kernel gather pieces of long messages for some seconds: called by the driver at
        least once a second. A message that has stopped on the way is gathered no more.
        """
        self._paced_until = now + 2 * ALONE
        if self._gathers and now - self.heard_at > ALONE:
            self._gather(False)

    def _pace(self, frame: PieceHeader) -> None:
        """Gather, after a piece, while a whole one and another behind it are sure to follow: the
        sender has handed over all pieces of a message at once.
        """
        waiting = len(self.inbox.rooms.get(frame.number, ()))
        whole = frame.length == pieces.LARGEST and frame.view == self.inbox.view
        wanted = whole and waiting >= 2 and time.monotonic() < self._paced_until
        if wanted != self._gathers:
            self._gather(wanted)

    def _gather(self, on: bool) -> None:
        self._gathers = gather(self._file, GATHERED if on else 1) and on

    # ---- what others ask for, under the lock ---------------------------------------------------

    def post_send(self, piece: QueuedPiece, number: int) -> None:
        """Queue a piece; those of short messages go first."""
        if self.gone:
            piece.error = RuntimeError(self.gone)
            return
        count = self.counts.next(number)
        frame = PieceHeader(pieces.PIECE, self.inbox.view, number, count, piece.size)
        if frame.piece == 0:
            self._late[number] = piece.size > SHORT
        self._push(LONG if self._late.get(number, True) else BRIEF, frame, piece)
        if len(self._late) > 2 * KNOWN:
            self._late = {n: late for n, late in self._late.items() if n > number - KNOWN}

    def post_note(self, piece: QueuedPiece) -> None:
        """Queue a note, ahead of all pieces."""
        if self.gone:
            piece.error = RuntimeError(self.gone)
            return
        self._push(AT_ONCE, PieceHeader(pieces.NOTE, 0, 0, 0, piece.size), piece)

    def _push(self, rank: int, frame: PieceHeader, piece: QueuedPiece) -> None:
        self._order += 1
        heapq.heappush(self._queue, (rank, self._order, frame, piece))

    def renew(self, view: int) -> None:
        """Begin another view of the members on the same connection. Waits of the old view end, and
        its late pieces are dropped. The same view again changes nothing: pieces that came before,
        from a peer that had begun it before, are kept.
        """
        if view == self.inbox.view:
            return
        error = RuntimeError(f"view {view} has begun")
        for piece in [
            *self.inbox.withdraw(),
            *(piece for rank, _, _, piece in self._queue if rank != AT_ONCE),
        ]:
            piece.error = error
        self._queue = [entry for entry in self._queue if entry[0] == AT_ONCE]
        self.inbox, self.counts, self._late = Inbox(view), Counts(), {}

    def post_recv(self, piece: QueuedPiece, number: int) -> None:
        """Wait for a piece, or take the one that came before its room."""
        try:
            if (data := self.inbox.wait_for(number, piece)) is not None:
                piece.fill(data, len(data))
            elif self.gone and (self.socket.closed or not self.stuck):
                self.end(RuntimeError(self.gone))
        except WireError as error:
            piece.error, self.gone = error, str(error)

    def end(self, error: Exception) -> None:
        """End all waits with `error`. Pieces that the library has count as sent."""
        for piece in [*self.inbox.withdraw(), *(piece for *_, piece in self._queue)]:
            if not piece.is_completed():
                piece.error = error
        self._queue = []

    @property
    def waiting(self) -> int:
        """Pieces and notes that are not handed to the library yet."""
        return len(self._queue)

    @property
    def stood(self) -> float | None:
        """Seconds since the last byte came, also of a piece; None: the kernel does not tell."""
        return None if self.gone or not self.ready else stood(self._file)

    @property
    def descriptor(self) -> int:
        """Of the TCP connection, for questions to the kernel; -1 where there is none."""
        return self._file if self.ready and not self.gone else -1

    @property
    def met(self) -> bool:
        """Whether both sides have greeted."""
        return self.ready and not self._hello

    @property
    def stuck(self) -> bool:
        """Whether a piece waits in the socket: it is of a later view, or too many are kept."""
        return self._head is not None

    def wants(self) -> int:
        """The events that the poller waits for; none until it is known which peer may greet."""
        if self.socket.closed or not self._theirs:
            return 0
        full = self.most is not None and len(self.notes) >= self.most
        reads = self._head is None and not self.gone and not full
        return POLLIN * reads | POLLOUT * bool(self._queue or self._hello)

    # ---- meeting -------------------------------------------------------------------------------

    def greet(self, mine: bytes, theirs: bytes) -> None:
        """Send the greeting `mine` first, and accept only a peer that sends `theirs`."""
        self._hello = self._mine = mine
        self._theirs = theirs

    def dial(self, address: str) -> None:
        """Connect to an address."""
        self._address = address
        self.socket.ipv6 = "[" in address
        self.socket.connect(address)

    def dial_again(self) -> None:
        """Connect once more, if it is time."""
        if self._dial_at and time.monotonic() > self._dial_at:
            self._dial_at, self._hello = 0.0, self._mine
            self.socket.connect(self._address)

    def _not_there(self, event: int) -> None:
        """A connection ended ungreeted: a listening end waits on, a dialling one retries."""
        if event & REFUSED:
            self.trouble = "the other side could not prove that it knows ISLAND_TOKEN"
        if self._address and not self._dial_at:
            self._dial_at = time.monotonic() + AGAIN
            self.trouble = self.trouble or "the connection is refused or does not last"
            with suppress(zmq.ZMQError):
                self.socket.disconnect(self._address)
        elif not self._address and event & zmq.EVENT_DISCONNECTED:
            self._hello = self._mine

    # ---- in the poller's thread ----------------------------------------------------------------

    def serve(self, events: int) -> None:
        """Send and receive as much as the socket takes and gives now."""
        try:
            if events & POLLIN or self.stuck:
                self._take()
            if events & POLLOUT:
                self._give()
        except WireError as error:
            self._refuse(error)
        except zmq.ZMQError as error:
            self.lose(f"the connection failed: {error}")

    def watch(self, _: int = 0) -> None:
        """Take what libzmq has to say of the connection: established, refused, closed."""
        with suppress(zmq.Again):
            while not self.monitor.closed:
                message = recv_monitor_message(self.monitor, NOBLOCK)
                if not self.ready:
                    self._not_there(message["event"])
                elif message["event"] & zmq.EVENT_DISCONNECTED and message["value"] == self._file:
                    # and not a second one, which a socket of this kind sends away
                    self.lose("connection closed by peer")
                elif message["event"] & REFUSED:
                    self.doubted = time.monotonic()

    def lose(self, reason: str) -> None:
        """Note the connection's end, and why; pieces are still read, other waits end."""
        self._drain()
        with self.poller.lock:
            self.gone = self.gone or reason
        self.settle()

    def settle(self) -> None:
        """End the waits of a connection that is gone, after what is still there was read."""
        if self.stuck:
            self._drain()
        with self.poller.lock:
            self.end(RuntimeError(self.gone))

    def _drain(self) -> None:
        with suppress(WireError, zmq.ZMQError):
            while not self.socket.closed and self._take():
                pass

    def _refuse(self, error: WireError) -> None:
        with self.poller.lock:
            self.gone = str(error)
            self.end(error)
        self.close(0)

    def _take(self) -> bool:
        """Read pieces into their rooms; whether something was read."""
        for n in range(TURN):
            if self._head is None:
                try:
                    data = self.socket.recv(NOBLOCK)
                except zmq.Again:
                    return n > 0
                if not self.socket.get(zmq.RCVMORE):
                    raise WireError(f"{len(data)} bytes without a piece behind them")
                self._head = pieces.read(data)
                self.heard_at = time.monotonic()
                self.record = self._head.record
                self.landed = self._head.landed
            if not self._read(self._head):
                return n > 0
            self._pace(self._head)
            if self.socket.get(zmq.RCVMORE):
                raise WireError("more than one piece behind a frame")
            self._head = None
        return True

    def _read(self, frame: PieceHeader) -> bool:
        """Read the piece behind a frame; False if it has to stay where it is."""
        if frame.kind == pieces.HELLO:
            greeting = self.socket.recv(copy=False)
            if greeting.bytes != self._theirs:
                raise WireError(
                    "somebody else greets: another peer group, or another start of this run"
                )
            self.ready, self._file = True, greeting.get(zmq.SRCFD)
            return True
        if not self.ready:
            raise WireError("a piece came before a greeting")
        if frame.kind == pieces.NOTE:
            data = self.socket.recv()
            self._fits(frame, len(data))
            self.notes.append(data)
            return True
        with self.poller.lock:
            room: Any = self.inbox.place(frame)
        if room is NoRoom.LATER:
            return False
        try:
            if isinstance(room, QueuedPiece) and room.view is not None and frame.length:
                self._fits(frame, self.socket.recv_into(room.view))
                room.came, room.there = frame.length, True
                return True
            data = self.socket.recv(copy=frame.length <= SHORT)
            data = data if isinstance(data, bytes) else data.buffer
            self._fits(frame, len(data))
        except (WireError, zmq.ZMQError) as error:
            if isinstance(room, QueuedPiece):  # it waits in no list any more
                room.error = WireError(str(error))
            raise
        with self.poller.lock:
            if room is NoRoom.ASIDE:
                room = self.inbox.keep(frame.number, data, frame.length)
            if isinstance(room, QueuedPiece):
                room.fill(data, frame.length)
        return True

    @staticmethod
    def _fits(frame: PieceHeader, size: int) -> None:
        if size != frame.length:
            raise WireError(
                f"piece {frame.piece} of message {frame.number} has {size} bytes, its frame says "
                f"{frame.length}"
            )

    def _give(self) -> None:
        """Hand queued pieces to libzmq until it takes no more."""
        if self._hello:
            frame = PieceHeader(pieces.HELLO, self.inbox.view, 0, 0, len(self._hello))
            with suppress(zmq.Again):
                self.socket.send_multipart([frame.pack(), self._hello], NOBLOCK)
                self._hello = b""
        for _ in range(0 if self._hello else TURN):
            with self.poller.lock:
                if not self._queue:
                    return
                entry = heapq.heappop(self._queue)
            _, _, frame, piece = entry
            try:
                head = PieceHeader(*frame[:5], *self.said)
                self.socket.send(head.pack(), NOBLOCK | SNDMORE)
            except zmq.Again:
                with self.poller.lock:
                    heapq.heappush(self._queue, entry)
                return
            self.socket.send(piece.view, NOBLOCK, copy=False)
            piece.there = True

    def close(self, linger: float) -> None:
        """Close the sockets; what was handed over leaves behind, within `linger` seconds."""
        if self.socket.closed:
            return
        self.poller.forget(self)
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(round(1e3 * linger) if self.ready and not self.gone else 0)
