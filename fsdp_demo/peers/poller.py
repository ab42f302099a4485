"""All connections of a rank, and the one thread that moves them: the network thread.

A ZeroMQ socket may be used by one thread at a time. From the first connection on that is this
thread. It waits for all sockets at once and moves what can be moved. Others post pieces and wait
for them, and hand over what touches sockets otherwise (`Poller.run`). Once a rank is a member, the
same thread runs the membership (`elastic/driver.py`).
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import zmq

from ..net.tcp import HANDSHAKE_MS, keep_alive
from . import pieces
from .connection import POLLOUT, WAITING, PeerConnection, QueuedPiece

LINGER = 5.0  # seconds that what was sent has to leave, when connections are closed
SEALED = 64  # bytes by which a piece may grow when it is encrypted
IDLE = 0.5  # seconds between two looks of the network thread where nothing wakes it
CLOSED = "the connections were closed"

T = TypeVar("T")


class Poller:
    """All sockets of one rank.

    Args:
        keys: `curve.Keys`, or None.

    Attributes:
        lock: of all that waits and is queued. changed: the condition on this lock, told when
            something has moved. keys: as given. context: of ZeroMQ. thread: the network thread.
            between: called in it after each look at the sockets. pause: asked there for the seconds
            until the next look where nothing wakes it. failed: called there with the error that has
            ended it.
    """

    def __init__(self, keys: Any = None):
        self.lock = threading.RLock()  # entered a hundred times in a step: a condition takes longer
        self.changed = threading.Condition(self.lock)
        self.wires: list[PeerConnection] = []
        self.keys = keys
        self.context: Any = zmq.Context(io_threads=min(4, os.cpu_count() or 1))
        # it takes three for a connection, and allows 1,023 if nobody says more
        self.context.max_sockets = self.context.get(zmq.SOCKET_LIMIT)
        self._poller, self._wanted = zmq.Poller(), dict[Any, int]()
        self._owners: dict[Any, Callable[[int], None]] = {}
        self._attended: set[Any] = set()
        self._near, self._far = socket.socketpair()
        for end in (self._near, self._far):
            end.setblocking(False)
        self._poller.register(self._far.fileno(), zmq.POLLIN)
        self._owners[self._far.fileno()] = self._woken
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.closed, self._linger = False, 0.0
        self.between: Callable[[], None] = lambda: None
        self.pause: Callable[[], float] = lambda: IDLE
        self.failed: Callable[[BaseException], None] = _raised
        self.thread = threading.Thread(target=self._run, name="network", daemon=True)
        self.thread.start()

    # ---- connections ---------------------------------------------------------------------------

    def socket(self) -> Any:
        """A new socket with what all of them have in common."""
        made = self.context.socket(zmq.PAIR)
        made.sndhwm = made.rcvhwm = WAITING
        made.maxmsgsize = pieces.LARGEST + SEALED
        made.linger = 0
        # never by itself: what was under way is lost with a connection
        made.reconnect_ivl = 2**31 - 1
        keep_alive(made)
        return made

    def add(self, listens: bool) -> PeerConnection:
        """Add a connection that is to be made. In the network thread."""
        wire = PeerConnection(self)
        if listens:
            wire.socket.handshake_ivl = HANDSHAKE_MS
        if self.keys is not None:
            (self.keys.listen if listens else self.keys.connect)(wire.socket)
        self.wires.append(wire)
        self._owners[wire.socket], self._owners[wire.monitor] = wire.serve, wire.watch
        self._poller.register(wire.monitor, zmq.POLLIN)
        return wire

    def attend(self, socket: Any, serve: Callable[[int], None]) -> None:
        """Let `serve` read from a socket of another kind. In the network thread."""
        self._owners[socket] = serve
        self._attended.add(socket)
        self._poller.register(socket, zmq.POLLIN)

    def neglect(self, socket: Any) -> None:
        """Undo `attend`, and close the socket. In the network thread."""
        if self._owners.pop(socket, None) is not None:
            self._attended.discard(socket)
            self._poller.unregister(socket)
            socket.close(0)

    def other_socket(self, kind: int) -> Any:
        """A socket for what is not a connection of a peer group."""
        made = self.context.socket(kind)
        made.linger, made.maxmsgsize = 0, pieces.LONGEST
        made.handshake_ivl = HANDSHAKE_MS
        return made

    def forget(self, wire: PeerConnection) -> None:
        """Take a connection out: nothing is read from it any more."""
        with self.lock:
            self.wires = [w for w in self.wires if w is not wire]
        for end in (wire.socket, wire.monitor):
            if end in self._owners:
                del self._owners[end]
                self._wanted.pop(end, None)
                with suppress(KeyError):
                    self._poller.unregister(end)

    # ---- what other threads do -----------------------------------------------------------------

    def run(self, job: Callable[[], T]) -> T:
        """Run a job that touches sockets in the network thread; returns or raises what it does.
        Raises RuntimeError: the connections were closed.
        """
        if threading.current_thread() is self.thread:
            return job()
        return self.post(job).result()

    def dial_again(self, wires: Iterable[PeerConnection]) -> None:
        """Connect once more where that has failed, if it is time."""

        def job() -> None:
            for wire in wires:
                if not wire.met and not wire.gone:
                    wire.dial_again()

        self.run(job)

    def post(self, job: Callable[[], T]) -> Future[T]:
        """`run` a job without waiting for it."""
        future: Future[T] = Future()
        with self.lock:
            if self.closed:
                raise RuntimeError(CLOSED)
            self._jobs.append((job, future))
        self._wake()
        return future

    def wait(self, piece: QueuedPiece, seconds: float) -> None:
        """Wait until a piece has been moved. Raises RuntimeError: nothing came for so long."""
        end = time.monotonic() + seconds
        while not piece.is_completed():
            left = end - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"nothing came for {seconds:g} s")
            self.wait_until(piece.is_completed, left)

    def wait_until(self, reached: Callable[[], bool], seconds: float) -> None:
        """Wait for what the network thread brings about, at most so long. Raises RuntimeError: the
        connections were closed before.
        """
        end = time.monotonic() + seconds
        with self.lock:
            while not reached() and (left := end - time.monotonic()) > 0:
                if self.closed:
                    raise RuntimeError(CLOSED)
                self.changed.wait(left)

    def post_recv(self, wire: PeerConnection, piece: QueuedPiece, number: int) -> None:
        """Wait on a connection for the next piece of a message."""
        with self.lock:
            wire.post_recv(piece, number)
            idle = not (wire.gone or wire.stuck)
        if not idle:
            self.nudge(wire)

    def nudge(self, wire: PeerConnection) -> None:
        """Send what was posted on a connection, at once."""
        if threading.current_thread() is not self.thread:
            self._wake()
            return
        wire.serve(POLLOUT)
        if wire.gone:
            wire.settle()

    def tell(self) -> None:
        """Wake the network thread and all that wait, so that each looks at its condition again."""
        with self.lock:
            self.changed.notify_all()
            self._wake()

    def _wake(self) -> None:
        if threading.current_thread() is self.thread:
            return  # it looks before it waits again
        with suppress(OSError):  # it is full, or closed: who posts late finds nobody
            self._near.send(b"\0")

    def close(self, linger: float = LINGER) -> None:
        """Close all connections; waits end with an error, `linger` seconds for what is queued."""
        with self.lock:
            if self.closed:
                return
            self.closed, self._linger = True, linger
            for wire in self.wires:
                wire.end(RuntimeError(CLOSED))
            self.changed.notify_all()
            self._wake()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    # ---- the network thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.closed:
                self._turn(self.pause())
                self.between()
                with self.lock:
                    self.changed.notify_all()
        except BaseException as error:
            self.failed(error)
        finally:
            self._shut()

    def _turn(self, seconds: float) -> None:
        with self.lock:
            for wire in self.wires:
                self._want(wire)
        for end, events in self._poller.poll(min(math.ceil(1e3 * seconds), 10**9)):
            if end in self._owners:  # not closed meanwhile
                self._owners[end](events)
        for wire in list(self.wires):
            if wire.inbox.rooms and (wire.stuck or wire.gone):
                wire.serve(0)
                if wire.gone:
                    wire.settle()
        while self._jobs:
            self._do(*self._jobs.popleft())

    def _want(self, wire: PeerConnection) -> None:
        wanted = wire.wants()
        if self._wanted.get(wire.socket, 0) == wanted:
            return
        self._wanted[wire.socket] = wanted
        if wanted:
            self._poller.register(wire.socket, wanted)
        else:
            self._poller.unregister(wire.socket)

    def _woken(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._far.recv(4096)

    @staticmethod
    def _do(job: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    def _shut(self) -> None:
        """Close what there is, and let nobody wait any more."""
        with self.lock:
            self.closed = True
            for _, future in self._jobs:
                future.set_exception(RuntimeError(CLOSED))
            self.changed.notify_all()
        for wire in list(self.wires):
            # what waits for a peer that has closed never leaves: it would be waited for in vain
            wire.watch()
            wire.close(self._linger)
        for other in list(self._attended):
            self.neglect(other)
        self.context.term()
        self._near.close()
        self._far.close()


def _raised(error: BaseException) -> None:
    raise error
