"""The store: the meeting point of the islands, in a process of its own (`fsdp-demo store`).

It holds a few keys (who came, addresses, the run specification) and no data of the training. It
keeps them in a file: every change is on the disk before its answer, so that a store which is killed
and started again on its file knows all that it said. Values, keys and their number are bounded.
With ISLAND_TOKEN only who knows it gets in, and all bytes are encrypted (CURVE). One thread takes
what questions have come, makes their changes with one commit (`records.py`), and answers them.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ..errors import WireError
from ..net.address import Keys, join_address, route_to, split_address
from ..net.tcp import HANDSHAKE_MS, keep_alive
from .connection import LARGEST_MESSAGE, SALT, Answer, Question, pack, read_question
from .records import KEYS, MEMORY, ROOM, Records

FILE = "fsdp_demo_store.sqlite"
"""The file of a store where none is named: in the folder where it is started, so that it is found
again there.
"""

BYTES = 512 << 20
"""Bytes that the process of a store may take beyond what it has at its start."""

TOGETHER = 256  # questions that share one commit at most
# questions of one connection that wait in the library at most; a client has one open at a time
WAITING = 2
LOOK = 0.2  # seconds between two looks whether to end


class StoreServer:
    """A store that is served while `serve_while` runs.

    Args:
        bind: `ADDR:PORT`; ADDR is an address or name of this machine (`0.0.0.0` or `[::]`: all),
            PORT 0 picks a free one. "zmq://" may stand before it. Or a socket that listens.
        file: where it keeps its keys; ":memory:" for nowhere.
        token: ISLAND_TOKEN; "" lets everybody in.
        keys, room: how many keys, and how many bytes the file may have.

    Attributes:
        host, port: what it listens on; the port is the real one where 0 was asked for.
        endpoint: the text for ISLAND_ENDPOINT; for a wildcard address, this machine's address on
            its default route.
        warnings: sentences that a user must see. file: the whole path of the file.

    Raises:
        ValueError: the address, the file or the token cannot be used.
    """

    def __init__(
        self,
        bind: str | socket.socket,
        file: str | Path = FILE,
        token: str = "",
        keys: int = KEYS,
        room: int = ROOM,
    ):
        lock = Keys(token, SALT) if token else None
        listener = bind if isinstance(bind, socket.socket) else listen(bind)
        try:
            self._records = Records(file, keys, room)
        except ValueError:
            listener.close()
            raise
        self.file = MEMORY if str(file) == MEMORY else str(Path(file).absolute())
        self.host, self.port = listener.getsockname()[:2]
        address = ipaddress.ip_address(self.host.partition("%")[0])
        reached = _default_route(listener.family) if address.is_unspecified else str(address)
        self.endpoint = join_address(reached, self.port)
        self.warnings = _open_to(address, token)
        if self.file == MEMORY:
            self.warnings.append(
                "--file :memory: keeps nothing: when this process ends, the islands cannot go on "
                "from what they have agreed"
            )
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._accept(listener, lock)

    def _accept(self, listener: socket.socket, lock: Keys | None) -> None:
        made = self._socket
        made.linger = 0
        made.maxmsgsize, made.rcvhwm, made.sndhwm = LARGEST_MESSAGE, WAITING, WAITING
        made.handshake_ivl = HANDSHAKE_MS
        keep_alive(made)
        if lock is not None:
            lock.listen(made)
        made.use_fd = listener.detach()
        made.bind("tcp://127.0.0.1:*")  # not looked at: it listens already

    # ---- serving -------------------------------------------------------------------------------

    def serve_while(self, wanted: Callable[[], bool]) -> None:
        """Serve in this thread, then close."""
        try:
            while wanted():
                if self._socket.poll(round(1e3 * LOOK)):
                    self._turn()
        finally:
            self._socket.close(0)
            self._context.term()
            self._records.close()

    def _turn(self) -> None:
        """Answer what has come."""
        taken: list[tuple[bytes, Question]] = []
        try:
            while len(taken) < TOGETHER:
                who, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    if len(parts) != 1:
                        raise WireError(f"a question in {len(parts)} parts")
                    taken.append((who, read_question(parts[0])))
                except WireError as error:
                    # a client of another release sees by it that this is a store
                    refused = pack(Answer("refused", 0, text=str(error)))
                    self._socket.send_multipart([who, refused], zmq.NOBLOCK)
        except zmq.Again:
            pass
        answers = self._records.answer([question for _, question in taken])
        for (who, _), answer in zip(taken, answers, strict=True):
            if answer is not None:
                # dropped where the client is gone
                self._socket.send_multipart([who, pack(answer)], zmq.NOBLOCK)


def _open_to(address: ipaddress.IPv4Address | ipaddress.IPv6Address, token: str) -> list[str]:
    """A warning where the whole internet may reach a store without a token."""
    if token or not (address.is_unspecified or address.is_global):
        return []
    what = "every address of this machine" if address.is_unspecified else "a PUBLIC address"
    return [
        f"{address} is {what}, and without ISLAND_TOKEN whoever reaches it can read, change and "
        "end the run: set ISLAND_TOKEN here and on all islands (openssl rand -hex 32), or bind to "
        "a private address"
    ]


def listen(bind: str) -> socket.socket:
    """A socket that listens at `ADDR:PORT`, which `StoreServer` explains. Raises ValueError: the
    name is unknown, or nobody can listen there.
    """
    name, port = split_address(bind.removeprefix("zmq://"))
    try:
        family, *_, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(
            f"--bind {bind}: the name {name!r} has no address ({error.strerror or error})"
        ) from None
    try:
        made = socket.create_server(
            address, family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise ValueError(
            f"--bind {bind}: cannot listen there: {error.strerror}{_cure(error.errno)}"
        ) from None
    made.setblocking(False)
    return made


def bound_memory(more: int = BYTES) -> int | None:
    """Let this process, which should do nothing but serve, take `more` bytes of memory than it has
    now (Linux); the limit, if there is one.

    A store that somebody fills ends then, and training goes on without it; otherwise the machine's
    memory would end, and with it all else.
    """
    if not sys.platform.startswith("linux"):
        return None
    import resource

    try:
        (now,) = re.findall(r"^VmData:\s*(\d+)", Path("/proc/self/status").read_text(), re.M)
        limit = 1024 * int(now) + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (OSError, ValueError):
        # a container without /proc, or with a lower limit of its own
        return None
    return limit


def _cure(number: int | None) -> str:
    """What to do where an address cannot be listened on."""
    if number == errno.EADDRINUSE:
        return (
            ". Another store may still run there (ss -ltnp shows who); stop it or take another port"
        )
    if number == errno.EADDRNOTAVAIL:
        return ". This machine has no such address (ip -brief address lists those it has)"
    if number == errno.EACCES:
        return ". Ports under 1024 need root; take a higher one"
    return ""


def _default_route(family: socket.AddressFamily) -> str:
    """This machine's address on its default route, or its name where there is no route."""
    # addresses reserved for documentation
    elsewhere = "[2001:db8::1]:9" if family == socket.AF_INET6 else "192.0.2.1:9"
    try:
        return route_to(elsewhere)
    except OSError:
        return socket.gethostname()
