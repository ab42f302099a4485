"""Whether islands reach each other, by plain TCP connections: every island listens on a port of its
own at the address that it names, and each connects to all others.

Every wait has a deadline. What comes from a stranger is at most a line, and is not answered.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress

from ...net.address import join_address, split_address
from .measured import OK, OTHER, REFUSED, TIMEOUT, UNREACHABLE, Reach

PATIENCE = 3.0
"""Seconds without a byte after which a connection counts as dead. TCP sends a lost packet again
after 0.2 to 1 s, and a lost SYN after 1 s."""

BYTES = 1 << 15
"""Of the text that must pass: 22 packets of the usual size."""

PACKETS = (4096, 2048, 1500, 1492, 1460, 1420, 1400, 1340, 1280, 1100, 900, 576)
"""Sizes that are tried where that does not pass. On the way are PPPoE 1492, WireGuard 1420, other
tunnels 1400 and less, IPv6's smallest 1280, IPv4's 576."""

LINE = 1024  # bytes of a greeting at most
FAMILY_HEADERS = {socket.AF_INET: 40, socket.AF_INET6: 60}  # of IP and TCP, without options


class Listener:
    """Ports of this island at several addresses, served by threads until `close`.

    Args:
        secret: what a connecting island must send first (it stands in the store). island: this one.
        addresses: the first is what the island names; others are tried where that is not reached.
        patience: seconds without a byte after which a connection counts as dead.

    Attributes:
        ports: host:port of each address, "" where this machine cannot listen there.
    """

    def __init__(self, secret: str, island: int, addresses: Sequence[str], patience: float):
        self._secret, self._island, self._patience = secret, island, patience
        self._sockets: list[socket.socket] = []
        self.ports: list[str] = []
        for address in addresses:
            try:
                found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
                made = socket.create_server(found[4][:2], family=found[0], backlog=64)
            except OSError:
                self.ports.append("")
                continue
            self._sockets.append(made)
            self.ports.append(join_address(str(found[4][0]), made.getsockname()[1]))
            threading.Thread(target=self._accept, args=(made,), daemon=True).start()

    def close(self) -> None:
        """Accept no further connections."""
        for made in self._sockets:
            with suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
            made.close()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                made, _ = listening.accept()
                threading.Thread(target=self._serve, args=(made,), daemon=True).start()

    def _serve(self, made: socket.socket) -> None:
        with made, suppress(OSError, ValueError, KeyError, TypeError):
            made.settimeout(2 * self._patience)
            if json.loads(_line(made))["secret"] != self._secret:
                return
            made.sendall(json.dumps({"island": self._island}).encode() + b"\n")
            if not _take(made, BYTES):
                return
            made.sendall(b"k")
            if made.recv(1) != b"g":
                return
            made.sendall(bytes(BYTES))
            made.recv(1)  # until the other side has it, and closes


def reach(
    secret: str, me: int, other: int, places: Sequence[str], patience: float = PATIENCE
) -> Reach:
    """Connect to another island and send text both ways.

    Args:
        secret: as its listener has it. places: host:port of what it names, then of its other
            addresses; "" where it cannot listen.
    """
    named = places[0] if places else ""
    address = split_address(named)[0] if named else ""
    state, forth, back = _try(secret, other, named, patience)
    if state != OK:
        for place in places[1:]:
            if place and _try(secret, other, place, patience)[0] == OK:
                return Reach(me, other, state, address, split_address(place)[0])
        return Reach(me, other, state, address)
    packet = None if forth and back else largest(secret, other, named, patience)
    return Reach(me, other, state, address, "", forth, back, packet)


def largest(secret: str, other: int, place: str, patience: float) -> int:
    """Bytes of the largest of `PACKETS` with which text passes both ways; 0: none."""

    def passes(packet: int) -> bool:
        return _try(secret, other, place, patience, packet) == (OK, True, True)

    return next(iter(PACKETS[bisect_left(PACKETS, True, key=passes) :]), 0)


def _try(
    secret: str, other: int, place: str, patience: float, packet: int = 0
) -> tuple[str, bool | None, bool | None]:
    """The outcome of one connection, and whether text passed to the other side and from it."""
    if not place:
        return UNREACHABLE, None, None
    try:
        made = _connected(place, patience, packet)
    except OSError as error:
        return _why(error), None, None
    with made:
        try:
            made.sendall(json.dumps({"secret": secret, "island": other}).encode() + b"\n")
            if json.loads(_line(made)).get("island") != other:
                return OTHER, None, None
        except OSError as error:
            return _why(error), None, None
        except (ValueError, AttributeError):
            return OTHER, None, None
        forth = back = False
        with suppress(OSError):
            made.sendall(bytes(BYTES))
            forth = made.recv(1) == b"k"
        if not forth:
            return OK, False, None  # the other side sends only after it has all
        with suppress(OSError):
            made.sendall(b"g")
            back = _take(made, BYTES)
        return OK, True, back


def _connected(place: str, patience: float, packet: int) -> socket.socket:
    host, port = split_address(place)
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if packet:
            size = packet - FAMILY_HEADERS.get(family, 40)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size)
        made.settimeout(patience)
        made.connect(target)
        return made
    except OSError:
        made.close()
        raise


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return TIMEOUT
    return REFUSED if isinstance(error, ConnectionError) else UNREACHABLE


def _take(made: socket.socket, size: int) -> bool:
    """Read so many bytes; False where the other side closes before."""
    while size > 0:
        data = made.recv(min(size, 1 << 16))
        if not data:
            return False
        size -= len(data)
    return True


def _line(made: socket.socket) -> bytes:
    """A line, byte by byte; ValueError where it is long."""
    out, end = b"", time.monotonic() + 10
    while not out.endswith(b"\n"):
        byte = made.recv(1)
        if not byte or len(out) >= LINE or time.monotonic() > end:
            raise ValueError("no line")
        out += byte
    return out
