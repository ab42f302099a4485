"""TCP relays between the islands of `chaos.py`, in the parent's process: what passes can be held,
ended or damaged. No root.

Every island has a loopback address of its own, so an address says whose it is. Who wants to connect
to another island asks here for a port (`chaos_island.py` does so in place of each connection of a
line) and connects to that.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
FIRST = 10  # island i has the address 127.0.0.(10 + i)
LARGE = 256  # bytes of a read in which there is more than beats and frames

Way = tuple[int, int]
"""From one island to another."""


def address(slot: int) -> str:
    """The loopback address of an island.

    >>> address(2), slot_of("127.0.0.12")
    ('127.0.0.12', 2)
    """
    return f"127.0.0.{FIRST + slot}"


def slot_of(host: str) -> int:
    """The inverse of `address`; -1 for any other."""
    head, _, last = host.rpartition(".")
    return int(last) - FIRST if head == "127.0.0" and last.isdigit() and int(last) >= FIRST else -1


@dataclass
class Connection:
    """One relayed connection; `ways` by the side that it comes from."""

    near: socket.socket
    far: socket.socket
    ways: tuple[Way, Way]
    threads: list[threading.Thread] = field(default_factory=list)

    def end(self, reset: bool) -> None:
        for side in (self.near, self.far):
            if reset:
                with contextlib.suppress(OSError):
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            _shut(side)


class Links:
    """All relays.

    Attributes:
        port: of the door where islands ask for a relay.
        flipped: how many bits were flipped, by way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: defaultdict[Way, threading.Event] = defaultdict(_set_event)
        self._holds: defaultdict[Way, int] = defaultdict(int)
        self._flips: defaultdict[Way, int] = defaultdict(int)
        self.flipped: defaultdict[Way, int] = defaultdict(int)
        self._connections: list[Connection] = []
        self._listeners: dict[socket.socket, int] = {}  # -> who dials there
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()

    # ---- faults --------------------------------------------------------------------------------

    def hold(self, way: Way) -> None:
        """Nothing passes this way any more, and nothing is closed: a dead cable."""
        with self._lock:
            self._holds[way] += 1
            self._open[way].clear()

    def let_go(self, way: Way) -> None:
        """One hold less. After the last one it passes again, and what was held comes first."""
        with self._lock:
            self._holds[way] = max(self._holds[way] - 1, 0)
            if not self._holds[way]:
                self._open[way].set()

    def end(self, pair: Way, reset: bool = True) -> None:
        """End all connections between two islands; new ones may come."""
        with self._lock:
            gone = [c for c in self._connections if pair in c.ways]
            self._connections = [c for c in self._connections if pair not in c.ways]
            for connection in gone:
                connection.end(reset)
            for way in (pair, pair[::-1]):
                self._holds[way] = 0
                self._open[way].set()

    def flip(self, way: Way) -> None:
        """Flip one bit in the middle of the next large read of this way."""
        with self._lock:
            self._flips[way] += 1

    # ---- relays --------------------------------------------------------------------------------

    def forget(self, slot: int) -> None:
        """The process that dialled from this island is gone: nobody else connects to its relays."""
        with self._lock:
            for listener in [s for s, dialler in self._listeners.items() if dialler == slot]:
                del self._listeners[listener]
                _shut(listener)

    def close(self) -> None:
        """End all."""
        _shut(self._door)
        with self._lock:
            for listener in self._listeners:
                _shut(listener)
            for connection in self._connections:
                connection.end(True)
            for event in self._open.values():
                event.set()

    def _answer(self) -> None:
        """Give each that asks a relay of its own."""
        with contextlib.suppress(OSError):
            while True:
                asker, _ = self._door.accept()
                with asker, contextlib.suppress(OSError, ValueError, KeyError):
                    asker.settimeout(5.0)
                    wish = json.loads(asker.makefile("rb").readline())
                    way = int(wish["from"]), slot_of(wish["host"])
                    listener = socket.create_server(("127.0.0.1", 0))
                    with self._lock:
                        self._listeners[listener] = way[0]
                    target = wish["host"], int(wish["port"])
                    threading.Thread(
                        target=self._accept, args=(listener, target, way), daemon=True
                    ).start()
                    asker.sendall(f"{listener.getsockname()[1]}\n".encode())

    def _accept(self, listener: socket.socket, target: tuple[str, int], way: Way) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(target, timeout=10.0)
                except OSError:
                    _shut(near)
                    continue
                far.settimeout(None)
                for side in (near, far):
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = Connection(near, far, (way, way[::-1]))
                with self._lock:
                    self._connections.append(connection)
                for source, sink, there in ((near, far, way), (far, near, way[::-1])):
                    threading.Thread(
                        target=self._pass, args=(connection, source, sink, there), daemon=True
                    ).start()

    def _pass(
        self, connection: Connection, source: socket.socket, sink: socket.socket, way: Way
    ) -> None:
        with self._lock:
            may = self._open[way]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                may.wait()
                if len(data) >= LARGE and self._flips[way]:
                    data = self._damaged(data, way)
                sink.sendall(data)
            may.wait()  # the end is not seen either behind a dead cable
        connection.end(False)
        with self._lock, contextlib.suppress(ValueError):
            self._connections.remove(connection)

    def _damaged(self, data: bytes, way: Way) -> bytes:
        with self._lock:
            if not self._flips[way]:
                return data
            self._flips[way] -= 1
            self.flipped[way] += 1
        changed = bytearray(data)
        changed[len(data) * 2 // 3] ^= 1 << 3
        return bytes(changed)


class Delay:
    """A relay in front of a far store: what comes to it goes on `seconds` later, each way.

    Attributes:
        port: where it listens, at 127.0.0.1.
    """

    def __init__(self, target: tuple[str, int], seconds: float) -> None:
        self._target, self._seconds = target, seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        _shut(self._listener)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target, timeout=10.0)
                except OSError:
                    _shut(near)
                    continue
                far.settimeout(None)
                for side in (near, far):
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for source, sink in ((near, far), (far, near)):
                    due = queue.SimpleQueue[tuple[float, bytes]]()
                    for job, end in ((self._take, source), (self._give, sink)):
                        threading.Thread(target=job, args=(end, due), daemon=True).start()

    def _take(self, source: socket.socket, due: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            due.put((time.monotonic() + self._seconds, data))

    def _give(self, sink: socket.socket, due: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                when, data = due.get()
                time.sleep(max(when - time.monotonic(), 0.0))
                if not data:
                    break
                sink.sendall(data)
        _shut(sink)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
