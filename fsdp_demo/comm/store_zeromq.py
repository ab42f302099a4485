"""The client of the durable store (`launch/durable_store.py`): ISLAND_ENDPOINT=zmq://host:port.

A question is sent, and its answer waited for. Where the connection ends, or nothing comes for a
while, there is another connection, and the question is repeated on it under its number, until the
deadline: so the store may be restarted between the two. The store remembers what it did under that
number, and does it once.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import StoreSilent, WireError, see
from .address import split_endpoint
from .store_wire import LARGEST_MESSAGE, NOBODY, Answer, Kind, Question, Status, read_answer
from .stores import SALT, BoundedStore, Identity, key_bytes, value_bytes

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message

    from .curve import Keys
except ModuleNotFoundError as error:
    if error.name != "zmq":
        raise
    raise ValueError(
        'ISLAND_ENDPOINT=zmq://... needs pyzmq: pip install "pyzmq>=27,<28", or take a store at '
        "host:port"
    ) from error

FIRST = 1.0
"""Seconds without an answer after which the question is repeated; each time they double, to
`RARELY`. A cable may be dead.
"""

RARELY = 10.0
AGAIN = 0.1  # seconds between two tries to connect
AT_ONCE = 1024  # keys in one question
NOBODY_LISTENS = "nobody listens"

ENDED = zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
STRANGERS = 5
"""Connections in a row that end in the handshake, before the first answer, after which the token is
taken to be wrong: a store that ends at that moment does it once."""


@functools.cache
def _keys(token: str) -> Keys:
    return Keys(token, SALT)


class Connection:
    """One connection: it is not made again when it ends.

    Attributes:
        gone: why nothing more comes, "" while it may. stranger: it ended before the other side had
            proved who it is.
    """

    def __init__(self, context: Any, address: str, token: str):
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = -1
        self._socket.maxmsgsize = LARGEST_MESSAGE
        self._socket.ipv6 = "[" in address
        if token:
            _keys(token).connect(self._socket)
        self._monitor = self._socket.get_monitor_socket(ENDED | REFUSED)
        self._poller = zmq.Poller()
        for end in (self._socket, self._monitor):
            self._poller.register(end, zmq.POLLIN)
        self.gone, self.stranger = "", False
        self._socket.connect(address)

    def ask(self, question: bytes) -> None:
        """Send a question."""
        with suppress(zmq.Again):  # waits in the library; a full one is a connection that is gone
            self._socket.send(question, zmq.NOBLOCK)

    def answer(self, number: int, seconds: float) -> Answer | None:
        """The answer to this question, None if none has come within so long or none will; answers
        to others are dropped.

        Raises:
            WireError: what came is no answer.
        """
        end = time.monotonic() + seconds
        while not self.gone and (left := end - time.monotonic()) > 0:
            ready = dict(self._poller.poll(math.ceil(1e3 * left)))
            if self._socket in ready:
                with suppress(zmq.Again):
                    answer = read_answer(self._socket.recv(zmq.NOBLOCK))
                    if answer.number == number:
                        return answer
            elif self._monitor in ready:
                self._watch()
        return None

    def _watch(self) -> None:
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                self.stranger = self.stranger or bool(event & REFUSED)
                closed = event & (REFUSED | zmq.EVENT_DISCONNECTED)
                self.gone = self.gone or ("it closes the connection" if closed else NOBODY_LISTENS)

    def close(self) -> None:
        """Close it; what is under way is lost."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


class Client:
    """One client: a thread asks at a time. A forked process becomes a client of its own at its
    first question.

    Attributes:
        known: which store it talks to, after the first answer.
    """

    def __init__(self, endpoint: str, token: str):
        where = split_endpoint(endpoint)
        if token:
            _keys(token)  # refused here, before there is a socket to close
        self._where, self._token = endpoint, token
        self._address = (
            f"tcp://[{where.host}]:{where.port}"
            if ":" in where.host
            else f"tcp://{where.host}:{where.port}"
        )
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._id = secrets.token_bytes(16)
        self._number = 0
        self._context: Any = zmq.Context()
        self._connection: Connection | None = None
        self.known: Identity | None = None
        self._strangers = 0

    def ask(
        self, kind: Kind, fields: tuple[bytes, ...], seconds: float, absent: float = math.inf
    ) -> Answer:
        """The answer to a question. It is given up after `seconds`, or after `absent` while nobody
        listens there.

        Raises:
            StoreSilent: none came, or the store cannot keep the change or is another one than
                before.
            ValueError: the store refuses the question, or whoever answers is none.
        """
        if os.getpid() != self._pid:
            self._begin()
        end = time.monotonic() + seconds
        if not self._lock.acquire(timeout=max(seconds, 0.0)):
            raise StoreSilent(
                f"the store at {self._where} does not answer within {seconds:g} s: another thread "
                "waits for it"
            )
        try:
            if self.known is None:
                name, generation = self._question(Kind.HELLO, (), end, seconds, absent).fields
                self.known = Identity(name.hex(), int(generation))
            return self._question(kind, fields, end, seconds, absent)
        except WireError as error:
            self._drop()
            raise ValueError(
                f"whoever answers at {self._where} is no store of this release: {error}"
            ) from None
        except ValueError:
            raise  # it was answered
        except BaseException:
            self._drop()  # an answer that still comes is nobody's
            raise
        finally:
            self._lock.release()

    def _question(
        self, kind: Kind, fields: tuple[bytes, ...], end: float, seconds: float, absent: float
    ) -> Answer:
        self._number += 1
        store = NOBODY if self.known is None else bytes.fromhex(self.known.name)
        answer = self._answer(
            Question(kind, store, self._id, self._number, fields).pack(), end, seconds, absent
        )
        if answer.status is Status.REFUSED:
            raise ValueError(f"the store at {self._where} refuses: {_text(answer)}")
        if answer.status is Status.FAILED:
            raise StoreSilent(f"the store at {self._where} cannot go on: {_text(answer)}")
        return answer

    def _answer(self, question: bytes, end: float, seconds: float, absent: float) -> Answer:
        """Ask until there is an answer."""
        give_up = time.monotonic() + absent
        patience = FIRST
        why = "" if self.known else " (it hangs, or another program listens there)"
        while (left := end - time.monotonic()) > 0:
            if self._connection is None:
                self._connection = Connection(self._context, self._address, self._token)
            self._connection.ask(question)
            answer = self._connection.answer(self._number, min(left, patience))
            if answer is not None:
                self._strangers = 0
                return answer
            ended, self._connection = self._connection, None
            ended.close()
            why = f" ({ended.gone})" if ended.gone else why
            self._recognise(ended)
            if ended.gone == NOBODY_LISTENS and time.monotonic() > give_up:
                raise StoreSilent(
                    f"the store at {self._where} is not there ({NOBODY_LISTENS}, for {absent:g} s)"
                )
            if ended.gone:
                time.sleep(max(min(AGAIN, end - time.monotonic()), 0.0))
            else:
                patience = min(2 * patience, RARELY)
        raise StoreSilent(f"the store at {self._where} does not answer within {seconds:g} s{why}")

    def _recognise(self, connection: Connection) -> None:
        """Give up where the tokens cannot be the same."""
        self._strangers = self._strangers + 1 if connection.stranger else 0
        if self._strangers < STRANGERS or self.known is not None:
            return
        self._strangers = 0
        if self._speaks():
            here = f"ISLAND_TOKEN {'is' if self._token else 'is not'} set here"
            raise ValueError(
                f"whoever listens at ISLAND_ENDPOINT={self._where} refuses this connection: "
                f"{here}, and must be the same at the store and "
                f"on all islands; or another program listens there{see('token')}"
            )

    def _speaks(self) -> bool:
        """Whether somebody greets there: a store does at once; a tunnel without a store behind it
        only closes.
        """
        host, _, port = self._address.removeprefix("tcp://").rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as probe:
                return bool(probe.recv(1))
        except OSError:
            return False

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Close the connection; what waits in another thread ends with its deadline."""
        if os.getpid() == self._pid and not self._context.closed:
            with self._lock:
                self._drop()
                self._context.destroy(0)  # term() would wait for a socket that is left over

    def __del__(self) -> None:
        try:  # not `suppress`, which may be gone when the interpreter ends
            if os.getpid() == self._pid and not self._context.closed:
                # garbage together with this: the context does not know its socket any more, and
                # would wait for it for ever
                self._drop()
                self._context.destroy(0)
        except Exception:
            pass


class ZeroMQStore(BoundedStore):
    """The store at `zmq://host:port`; connects at the first question."""

    def __init__(self, endpoint: str, token: str = "", deadline: float = 15.0):
        super().__init__(endpoint, deadline)
        self._client = Client(endpoint, token)

    def _ask(self, kind: Kind, *fields: bytes) -> Answer:
        return self._client.ask(kind, fields, self.deadline, self.absent)

    def find(self, key: str) -> bytes | None:
        """See `BoundedStore`."""
        answer = self._ask(Kind.GET, key_bytes(key))
        return None if answer.status is Status.MISSING else answer.fields[0]

    def find_all(self, keys: Sequence[str]) -> list[bytes]:
        """See `BoundedStore`: one question, and more where the values do not fit in one answer."""
        wanted, found = [key_bytes(key) for key in keys], list[bytes]()
        while len(found) < len(wanted):
            found += self._ask(Kind.FIND, *wanted[len(found) : len(found) + AT_ONCE]).fields
        return found

    def check(self, keys: list[str]) -> bool:
        """See `BoundedStore`."""
        return self._ask(Kind.CHECK, *map(key_bytes, keys)).fields[0] == b"1"

    def set(self, key: str, value: str | bytes) -> None:
        """See `BoundedStore`."""
        self._ask(Kind.SET, key_bytes(key), value_bytes(key, value))

    def add(self, key: str, amount: int) -> int:
        """See `BoundedStore`."""
        return int(self._ask(Kind.ADD, key_bytes(key), b"%d" % amount).fields[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See `BoundedStore`."""
        return self._ask(
            Kind.COMPARE_SET, key_bytes(key), value_bytes(key, expected), value_bytes(key, desired)
        ).fields[0]

    def delete_key(self, key: str) -> bool:
        """See `BoundedStore`."""
        return self._ask(Kind.DELETE, key_bytes(key)).fields[0] == b"1"

    def identity(self) -> Identity:
        """Which store answers, asked anew; StoreSilent if it is another one than before."""
        name, generation = self._ask(Kind.HELLO).fields
        now = Identity(name.hex(), int(generation))
        if self._client.known is not None and now.name != self._client.known.name:
            raise StoreSilent(
                f"the store at {self.where} was made anew since, without what it held "
                f"before{see('store-made-anew')}"
            )
        return now

    def close(self) -> None:
        """See `BoundedStore`."""
        self._client.close()


def _text(answer: Answer) -> str:
    return answer.fields[0].decode(errors="replace") if answer.fields else "it does not say why"
