"""The durable store: a meeting point that keeps its keys in a file, by ZeroMQ (`fsdp-demo store
--bind zmq://ADDR:PORT`).

What torch's store lacks: every change is on the disk before its answer, so that a store which is
killed and started again on its file knows all that it said; values, keys and their number are
bounded; with ISLAND_TOKEN only who knows it gets in, and all bytes are encrypted (CURVE). One
thread takes what questions have come, makes their changes with one commit (`records.py`), and
answers them.
"""

from __future__ import annotations

import ipaddress
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..comm.address import split_address
from ..comm.curve import Keys
from ..comm.store_wire import LARGEST_MESSAGE, Answer, Question, Status, read_question
from ..comm.stores import FILE, SALT, SCHEME
from ..comm.tcp import HANDSHAKE_MS, keep_alive
from ..errors import WireError
from .records import KEYS, MEMORY, ROOM, Records
from .store import cure, reached_at, resolved

TOGETHER = 256  # questions that share one commit at most
# questions of one connection that wait in the library at most; a client has one open at a time
WAITING = 2
LOOK = 0.2  # seconds between two looks whether to end


class DurableStore:
    """A store that is served while `serve_until` or `serve_while` runs.

    Args:
        bind: `zmq://ADDR:PORT`, as for `store.serve`.
        file: where it keeps its keys; ":memory:" for nowhere.
        token: ISLAND_TOKEN; "" lets everybody in.
        keys, room: how many keys, and how many bytes the file may have.

    Attributes:
        host, port, endpoint, warnings: as of `store.Served`. file: the whole path of the file.

    Raises:
        ValueError: the address, the file or the token cannot be used, or pyzmq is missing.
    """

    def __init__(
        self,
        bind: str,
        file: str | Path = FILE,
        token: str = "",
        keys: int = KEYS,
        room: int = ROOM,
    ):
        name, port = split_address(bind.removeprefix(SCHEME))
        _, (host, *_) = resolved(bind, name, port)
        try:
            import zmq
        except ModuleNotFoundError:
            raise ValueError(
                f'--bind {bind} needs pyzmq: pip install "pyzmq>=27,<28", or take --bind '
                f"{name}:{port}"
            ) from None
        self._zmq, self._ended = zmq, False
        lock = Keys(token, SALT) if token else None
        self._records = Records(file, keys, room)
        self._context: Any = zmq.Context()
        self._socket = self._listen(bind, host, port, lock)
        self.file = MEMORY if str(file) == MEMORY else str(Path(file).absolute())
        address = ipaddress.ip_address(host.partition("%")[0])
        self.host = host
        self.port = int(self._socket.last_endpoint.decode().rstrip("\0").rpartition(":")[2])
        self.endpoint = SCHEME + reached_at(address, self.port)
        self.warnings = (*_open_to(address, token), *_short_lived(file))

    def _listen(self, bind: str, host: str, port: int, lock: Keys | None) -> Any:
        made = self._context.socket(self._zmq.ROUTER)
        made.linger, made.ipv6, made.backlog = 0, ":" in host, 4096
        made.maxmsgsize, made.rcvhwm, made.sndhwm = LARGEST_MESSAGE, WAITING, WAITING
        made.handshake_ivl = HANDSHAKE_MS
        keep_alive(made)
        if lock is not None:
            lock.listen(made)
        try:
            made.bind(
                f"tcp://[{host}]:{port or '*'}" if ":" in host else f"tcp://{host}:{port or '*'}"
            )
        except self._zmq.ZMQError as error:
            made.close()
            self._context.term()
            self._records.close()
            raise ValueError(
                f"--bind {bind}: cannot listen there: {error.strerror}{cure(error.errno)}"
            ) from None
        return made

    # ---- serving -------------------------------------------------------------------------------

    def serve_until(self, signals: set[signal.Signals]) -> None:
        """Serve until one of these signals comes, which must be blocked."""
        self.serve_while(lambda: not signals & signal.sigpending())

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
                who, *parts = self._socket.recv_multipart(self._zmq.NOBLOCK)
                try:
                    if len(parts) != 1:
                        raise WireError(f"a question in {len(parts)} parts")
                    taken.append((who, read_question(parts[0])))
                except WireError as error:
                    self._socket.send_multipart([who, _unread(error)], self._zmq.NOBLOCK)
        except self._zmq.Again:
            pass
        for (who, _), answer in zip(
            taken, self._records.answer([question for _, question in taken]), strict=True
        ):
            if answer is not None:
                # dropped where the client is gone
                self._socket.send_multipart([who, answer.pack()], self._zmq.NOBLOCK)


class InThread:
    """A store that a thread of this process serves, until `end`: for tests, and whoever is the only
    process.
    """

    def __init__(self, store: DurableStore):
        self.endpoint, self._end = store.endpoint, threading.Event()
        self._thread = threading.Thread(
            target=store.serve_while,
            args=(lambda: not self._end.is_set(),),
            name="store",
            daemon=True,
        )
        self._thread.start()

    def end(self) -> None:
        """Stop serving."""
        self._end.set()
        self._thread.join()


def _unread(error: WireError) -> bytes:
    """An answer to what is no question. A client of another release sees by it that this is one."""
    return Answer(Status.REFUSED, 0, (str(error).encode(),)).pack()


def _open_to(address: ipaddress.IPv4Address | ipaddress.IPv6Address, token: str) -> tuple[str, ...]:
    if token or not (address.is_unspecified or address.is_global):
        return ()
    what = "every address of this machine" if address.is_unspecified else "a PUBLIC address"
    cure = (
        "set ISLAND_TOKEN here and on all islands (openssl rand -hex 32), or bind to a private "
        "address"
    )
    return (
        f"{address} is {what}, and without ISLAND_TOKEN whoever reaches it can read, change and "
        f"end the run: {cure}",
    )


def _short_lived(file: str | Path) -> tuple[str, ...]:
    if str(file) != MEMORY:
        return ()
    return (
        "--file :memory: keeps nothing: when this process ends, the islands cannot go on from what "
        "they have agreed",
    )
