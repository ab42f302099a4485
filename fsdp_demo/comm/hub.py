"""What moves all connections of a rank: whoever waits drives, and no thread runs while nobody does.

A ZeroMQ socket may be used by one thread at a time. The first that waits becomes the driver: it
waits for all sockets at once and moves what can be moved, also for the others, who wait for its
word; when it has what it wanted, another takes over. So a short message needs no hand-over from
thread to thread, and training has no other thread beside it while no exchange is under way.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq

from . import frames
from .tcp import HANDSHAKE_MS, keep_alive
from .wire import WAITING, Piece, Wire

LINGER = 5.0  # seconds that what was sent has to leave, when connections are closed
SEALED = 64  # bytes by which a piece may grow when it is encrypted


class Hub:
    """All sockets of one rank.

    Args:
        keys: `curve.Keys`, or None.

    Attributes:
        changed: lock of all that waits and is queued; told when something has moved. keys: as
            given. context: of ZeroMQ.
    """

    def __init__(self, keys: Any = None):
        self.changed = threading.Condition()
        self.wires: list[Wire] = []
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
        self._driven = self.closed = False
        self._driver = 0  # the thread that drives
        self._claims = 0  # threads that wait for `alone`

    # ---- connections ---------------------------------------------------------------------------

    def socket(self) -> Any:
        """A new socket with what all of them have in common."""
        made = self.context.socket(zmq.PAIR)
        made.sndhwm = made.rcvhwm = WAITING
        made.maxmsgsize = frames.LARGEST + SEALED
        made.linger = 0
        # never by itself: what was under way is lost with a connection
        made.reconnect_ivl = 2**31 - 1
        keep_alive(made)
        return made

    def add(self, epoch: int, listens: bool) -> Wire:
        """A connection to be."""
        with self.alone():
            wire = Wire(self, epoch)
            if listens:
                wire.socket.handshake_ivl = HANDSHAKE_MS
            if self.keys is not None:
                (self.keys.listen if listens else self.keys.connect)(wire.socket)
            self.wires.append(wire)
            self._owners[wire.socket], self._owners[wire.monitor] = wire.serve, wire.watch
            self._poller.register(wire.monitor, zmq.POLLIN)
            return wire

    def attend(self, socket: Any, serve: Callable[[int], None]) -> None:
        """Let `serve` read from a socket of another kind."""
        with self.alone():
            self._owners[socket] = serve
            self._attended.add(socket)
            self._poller.register(socket, zmq.POLLIN)

    def neglect(self, socket: Any) -> None:
        """Undo `attend`, and close the socket."""
        with self.alone():
            if self._owners.pop(socket, None) is not None:
                self._attended.discard(socket)
                self._poller.unregister(socket)
                socket.close(0)

    def other_socket(self, kind: int) -> Any:
        """A socket for what is not a connection of a peer group."""
        made = self.context.socket(kind)
        made.linger, made.maxmsgsize = 0, frames.LONGEST
        made.handshake_ivl = HANDSHAKE_MS
        return made

    def forget(self, wire: Wire) -> None:
        """Wait for a connection no more."""
        with self.changed:
            self.wires = [w for w in self.wires if w is not wire]
        for end in (wire.socket, wire.monitor):
            if end in self._owners:
                del self._owners[end]
                self._wanted.pop(end, None)
                with suppress(KeyError):
                    self._poller.unregister(end)

    # ---- driving -------------------------------------------------------------------------------

    def wait(self, piece: Piece, seconds: float) -> None:
        """Drive, or let somebody drive, until a piece has been moved.

        Raises:
            RuntimeError: nothing came for so long.
        """
        end = time.monotonic() + seconds
        while not piece.is_completed():
            left = end - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"nothing came for {seconds:g} s")
            # nobody tells when the library lets go
            self.drive(min(left, 0.001) if piece.handed else left, piece.is_completed)

    def drive(self, seconds: float, done: Callable[[], bool]) -> None:
        """One turn, or somebody else's."""
        with self.changed:
            if done():
                return
            if self.closed:
                raise RuntimeError("the connections were closed")
            if self._driven or self._claims:
                self.changed.wait(seconds)
                return
            self._enter()
        try:
            self._turn(seconds)
        finally:
            self._leave()

    def nudge(self, wire: Wire) -> None:
        """Something was posted: move it at once, or tell the driver."""
        with self.changed:
            if self.closed:
                return
            if self._driven or self._claims:
                self._wake()
                return
            self._enter()
        try:
            wire.serve(zmq.POLLOUT)
            if wire.gone:
                wire.settle()
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else drives within: for what touches sockets while another thread may drive, as
        when connections are added or closed.
        """
        if self._driver == threading.get_ident():
            yield
            return
        with self.changed:
            self._claims += 1
            self._wake()
            while self._driven:
                self.changed.wait(1.0)
            self._claims -= 1
            self._enter()
        try:
            yield
        finally:
            self._leave()

    def tell(self) -> None:
        """Let all who wait look again."""
        with self.changed:
            self.changed.notify_all()
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # it is full, or closed: who posts late finds nobody
            self._near.send(b"\0")

    def _woken(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._far.recv(4096)

    def _enter(self) -> None:
        """This thread drives from here on. With `changed` held."""
        self._driven, self._driver = True, threading.get_ident()

    def _leave(self) -> None:
        with self.changed:
            self._driven, self._driver = False, 0
            self.changed.notify_all()

    def _turn(self, seconds: float) -> None:
        with self.changed:
            for wire in self.wires:
                wanted = wire.wants()
                if self._wanted.get(wire.socket, 0) != wanted:
                    self._wanted[wire.socket] = wanted
                    if wanted:
                        self._poller.register(wire.socket, wanted)
                    else:
                        self._poller.unregister(wire.socket)
        for end, events in self._poller.poll(min(math.ceil(1e3 * seconds), 10**9)):
            if end in self._owners:  # not closed meanwhile
                self._owners[end](events)
        for wire in list(self.wires):
            if wire.inbox.rooms and (wire.stuck or wire.gone):
                wire.serve(0)
                if wire.gone:
                    wire.settle()

    def close(self, linger: float = LINGER) -> None:
        """Close all connections; waits end with an error, what was handed over has `linger` seconds
        to leave.
        """
        with self.changed:
            if self.closed:
                return
            self.closed = True
            for wire in self.wires:
                wire.end(RuntimeError("the connections were closed"))
            self._wake()
            while self._driven:
                self.changed.wait(1.0)
            self._enter()
        try:
            for wire in list(self.wires):
                # what waits for a peer that has closed never leaves: it would be waited for in vain
                wire.watch()
                wire.close(linger)
            for other in list(self._attended):
                self.neglect(other)
            self.context.term()
        finally:
            self._near.close()
            self._far.close()
            self._leave()

    def __del__(self) -> None:
        with suppress(Exception):
            if not self.closed:
                self.context.destroy(0)
                self._near.close()
                self._far.close()
