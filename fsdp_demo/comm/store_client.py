"""The store as islands and ranks ask it: `get`, `set`, `compare_set`, each with a deadline.

`StoreClient` speaks to the durable store (`launch/store.py`) at ISLAND_ENDPOINT, where islands
meet. `WorldStore` asks the store of a torch.distributed world, for what its own ranks tell each
other.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import secrets
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import StoreSilent, WireError, see
from .address import join_address, split_endpoint
from .curve import Keys
from .store_wire import (
    AT_ONCE,
    LARGEST,
    LARGEST_MESSAGE,
    LONGEST,
    SALT,
    Answer,
    Question,
    pack,
    read_answer,
)

FIRST = 1.0
"""Seconds without an answer after which the question is repeated; each time they double, to
`RARELY`. A cable may be dead.
"""

RARELY = 10.0
AGAIN = 0.1  # seconds between two tries to connect
NOBODY_LISTENS = "nobody listens"

ENDED = zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
STRANGERS = 5
"""Connections in a row that end in the handshake, before the first answer, after which it is asked
who listens there: a store that ends at that moment does it once."""

Kind = TypeVar("Kind", bound="Store")


class Identity(NamedTuple):
    """Which store this is.

    Attributes:
        name: made at random with the store's file: a store that was lost and started empty has
            another one.
        generation: how often the file was opened, from 1.
    """

    name: str
    generation: int


class Store(ABC):
    """A store whose every question ends within `deadline` seconds, from any thread. Keys and values
    are text; a key that is not there has the value "".

    All methods raise StoreSilent where no answer comes, and ValueError where the store refuses the
    question: a key or value that is too long, or no room.

    Args:
        where: the endpoint, for errors.
        deadline: seconds that one question may take.

    Attributes:
        prefix: stands before every key.
        absent: seconds after which a question is given up while nobody listens there, if that is
            sooner than `deadline`: who can do without the answer need not wait for a store that is
            being started again.
    """

    def __init__(self, where: str, deadline: float):
        self.where, self.deadline, self.absent, self.prefix = where, deadline, math.inf, ""

    def under(self: Kind, prefix: str) -> Kind:
        """The same store, on the same connection, with `prefix` and a slash before every key."""
        below = copy.copy(self)
        below.prefix = f"{self.prefix}{prefix}/"
        return below

    def within(self: Kind, seconds: float) -> Kind:
        """The same store, on the same connection, with another deadline."""
        other = copy.copy(self)
        other.deadline = seconds
        return other

    def get(self, key: str) -> str:
        """The value of a key, "" if it is not there."""
        return self.get_all([key])[0]

    @abstractmethod
    def get_all(self, keys: Sequence[str]) -> list[str]:
        """The values of keys, "" for one that is not there."""

    @abstractmethod
    def set(self, key: str, value: str) -> None:
        """Set a key; "" takes it away. Each such key has one writer: a repeated question may set it
        again.
        """

    @abstractmethod
    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set a key if it has the expected value ("": it is not there); its value now.

        Success is that the value now is `desired`. So where it matters who has set it, `desired`
        holds something of its writer that nobody else writes.
        """

    def identity(self) -> Identity | None:
        """Which store answers; None if it cannot say."""
        return None

    def note(self, key: str, who: str, fields: Mapping[str, type] | None = None) -> Any:
        """The JSON value of a key that is there.

        Args:
            who: whose note it is, for errors.
            fields: keys that the note, an object, must have, with the types of their values.

        Raises:
            ValueError: it is no JSON, or lacks a field; the message names the key and `who`.
        """
        try:
            value = json.loads(self.get(key))
            wrong = next(
                (f for f, kind in (fields or {}).items() if type(value[f]) is not kind), None
            )
            reason = None if wrong is None else f"its {wrong!r} is {value[wrong]!r:.40}"
        except (ValueError, RecursionError, KeyError, TypeError, IndexError) as error:
            reason = f"{type(error).__name__}: {str(error)[:80]}"
        if reason is not None:
            raise ValueError(
                f"the note {self.prefix}{key} in the store at {self.where} of {who} cannot be read "
                f"({reason}): somebody else writes into this store, or runs another release; start "
                "a store on a port that only the islands reach"
            )
        return value


class WorldStore(Store):
    """The store of a torch.distributed world, which waits for an answer without a limit, inside
    C++, where no signal is served. So each question runs in a thread of its own. After one that was
    not answered the connection is given up: later ones fail at once.
    """

    def __init__(self, store: Any, where: str, deadline: float):
        super().__init__(where, deadline)
        self._store = store

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """See `Store`."""

        def values(store: Any) -> list[str]:
            return [
                _text(store.get(key)) if store.check([key]) else ""
                for key in (self.prefix + key for key in keys)
            ]

        found: list[str] = self._ask(values)
        return found

    def set(self, key: str, value: str) -> None:
        """See `Store`."""
        self._ask(lambda store: store.set(self.prefix + key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """See `Store`."""
        return _text(
            self._ask(lambda store: store.compare_set(self.prefix + key, expected, desired))
        )

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        if self._store is None:
            raise StoreSilent(f"the store at {self.where} has not answered before")
        answer, store = Future[Any](), self._store

        def run() -> None:
            try:
                answer.set_result(question(store))
            except BaseException as error:  # handed to the thread that waits
                answer.set_exception(error)

        threading.Thread(target=run, name="store", daemon=True).start()
        try:
            return answer.result(self.deadline)
        except Late:
            self._store = None  # the thread still stands in it
            raise StoreSilent(
                f"the store at {self.where} does not answer within {self.deadline:g} s"
            ) from None
        except RuntimeError as error:
            # torch's DistStoreError and DistNetworkError are RuntimeErrors
            raise StoreSilent(
                f"the store at {self.where} does not answer: {first_line(error)}"
            ) from None


def connect(endpoint: str, limit: float, deadline: float, token: str = "") -> StoreClient:
    """A connection of its own to the store at `endpoint`, which has answered.

    Args:
        endpoint: host:port or zmq://host:port.
        limit: seconds until it must have answered.
        deadline: seconds that one question may take afterwards.
        token: ISLAND_TOKEN.

    Raises:
        StoreSilent: nobody answers there.
        ValueError: whoever answers is no such store, or has another token.
    """
    place, end = split_endpoint(endpoint), time.monotonic() + limit
    reason = _why_out_of_reach(place.host, place.port, end)
    if not reason:
        store = StoreClient(endpoint, token, deadline)
        try:
            store.within(max(end - time.monotonic(), 0.1)).identity()
            return store
        except StoreSilent:
            store.close()
            reason = (
                "the port is open, but nothing answers: the store hangs, or another program "
                "listens there"
            )
        except BaseException:
            store.close()
            raise
    raise StoreSilent(
        f"no store answers at ISLAND_ENDPOINT={endpoint} after {limit:g} s: start there `fsdp-demo "
        f"store --bind {join_address(place.host, place.port)}` and check that this port is open "
        f"({reason}){see('no-store')}"
    )


def _why_out_of_reach(host: str, port: int, end: float) -> str:
    """Wait until somebody listens there; why nobody does, "" if somebody does. ZeroMQ says nothing
    of names that are not known.
    """
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(min(left, 10.0), 0.05)).close()
            return ""
        except OSError as error:
            if left < 0.3:
                return first_line(error)
        time.sleep(0.2)


@functools.cache
def _keys(token: str) -> Keys:
    return Keys(token, SALT)


class _Connection:
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


class _Line:
    """All connections of one client, one at a time; a thread asks at a time. Where the connection
    ends, or nothing comes for a while, there is another one, and the question is repeated on it
    under its number, until the deadline: so the store may be restarted between the two. A forked
    process becomes a client of its own at its first question.

    Attributes:
        known: which store it talks to, after the first answer.
    """

    def __init__(self, endpoint: str, token: str):
        place = split_endpoint(endpoint)
        if token:
            _keys(token)  # refused here, before there is a socket to close
        self._where, self._token, self._place = endpoint, token, place
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._id = secrets.token_bytes(16)
        self._number = 0
        self._context: Any = zmq.Context()
        self._connection: _Connection | None = None
        self.known: Identity | None = None
        self._strangers = 0

    def ask(
        self, verb: str, keys: list[str], values: list[str], seconds: float, absent: float
    ) -> list[str]:
        """The values of the answer. The question is given up after `seconds`, or after `absent`
        while nobody listens there.

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
                self.known = _identity(self._question("hello", [], [], end, seconds, absent))
            return self._question(verb, keys, values, end, seconds, absent)
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
        self,
        verb: Any,
        keys: list[str],
        values: list[str],
        end: float,
        seconds: float,
        absent: float,
    ) -> list[str]:
        self._number += 1
        store = b"" if self.known is None else bytes.fromhex(self.known.name)
        question = Question(verb, self._number, self._id, store, keys, values)
        answer = self._answer(pack(question), end, seconds, absent)
        if answer.status == "refused":
            raise ValueError(f"the store at {self._where} refuses: {answer.text}")
        if answer.status == "failed":
            raise StoreSilent(f"the store at {self._where} cannot go on: {answer.text}")
        return answer.values

    def _answer(self, question: bytes, end: float, seconds: float, absent: float) -> Answer:
        """Ask until there is an answer."""
        give_up = time.monotonic() + absent
        patience = FIRST
        why = "" if self.known else " (it hangs, or another program listens there)"
        address = f"tcp://{join_address(self._place.host, self._place.port)}"
        while (left := end - time.monotonic()) > 0:
            if self._connection is None:
                self._connection = _Connection(self._context, address, self._token)
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

    def _recognise(self, connection: _Connection) -> None:
        """Give up where somebody else listens there, or the tokens cannot be the same."""
        self._strangers = self._strangers + 1 if connection.stranger else 0
        if self.known is not None or connection.gone == NOBODY_LISTENS:
            return
        if _is_torchs(self._place.host, self._place.port):
            bind = join_address(self._place.host, self._place.port)
            raise ValueError(
                f"a store of torch.distributed answers at ISLAND_ENDPOINT={self._where}, where "
                f"islands cannot meet: start there `fsdp-demo store --bind {bind}`{see('no-store')}"
            )
        if self._strangers < STRANGERS:
            return
        self._strangers = 0
        if _greets(self._place.host, self._place.port):
            here = f"ISLAND_TOKEN {'is' if self._token else 'is not'} set here"
            raise ValueError(
                f"whoever listens at ISLAND_ENDPOINT={self._where} refuses this connection: "
                f"{here}, and must be the same at the store and "
                f"on all islands; or another program listens there{see('token')}"
            )

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


class StoreClient(Store):
    """The store at ISLAND_ENDPOINT; connects at the first question."""

    def __init__(self, endpoint: str, token: str = "", deadline: float = 15.0):
        super().__init__(endpoint, deadline)
        self._line = _Line(endpoint, token)

    def _ask(self, verb: str, keys: Sequence[str], *values: str) -> list[str]:
        return self._line.ask(verb, list(keys), list(values), self.deadline, self.absent)

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """See `Store`: one question, and more where the values do not fit in one answer."""
        wanted, found = [self._key(key) for key in keys], list[str]()
        while len(found) < len(wanted):
            found += self._ask("get", wanted[len(found) : len(found) + AT_ONCE])
        return found

    def set(self, key: str, value: str) -> None:
        """See `Store`."""
        self._ask("set", [self._key(key)], self._value(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """See `Store`."""
        values = self._value(key, expected), self._value(key, desired)
        return self._ask("compare_set", [self._key(key)], *values)[0]

    def identity(self) -> Identity:
        """Which store answers, asked anew; StoreSilent if it is another one than before."""
        now = _identity(self._ask("hello", []))
        if self._line.known is not None and now.name != self._line.known.name:
            raise StoreSilent(
                f"the store at {self.where} was made anew since, without what it held "
                f"before{see('store-made-anew')}"
            )
        return now

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def _key(self, key: str) -> str:
        whole = self.prefix + key
        if not 0 < len(whole.encode()) <= LONGEST:
            raise ValueError(
                f"the key {whole!r:.60} has {len(whole.encode())} bytes, allowed are 1 to "
                f"{LONGEST}: take a shorter ISLAND_RUN"
            )
        return whole

    def _value(self, key: str, value: str) -> str:
        if (size := len(value.encode())) > LARGEST:
            raise ValueError(
                f"the value of {self.prefix}{key} has {size} bytes, allowed are {LARGEST}"
            )
        return value


def _identity(values: list[str]) -> Identity:
    if len(values) != 2 or not values[1].isdigit():
        raise WireError(f"it gives its name as {values!r:.60}")
    return Identity(values[0], int(values[1]))


def _greets(host: str, port: int) -> bool:
    """Whether somebody greets there: a store does at once; a tunnel without a store behind it only
    closes.
    """
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0) as probe:
        return bool(probe.recv(1))
    return False


def _is_torchs(host: str, port: int) -> bool:
    """Whether a `torch.distributed.TCPStore` listens there: it gives back the number of a ping."""
    validate, ping, nonce = 0, 13, b"\x4e\x6f\x6e\x63"
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0) as probe:
        probe.sendall(struct.pack("<BIB", validate, 0x3C85F7CE, ping) + nonce)
        return probe.recv(4) == nonce
    return False


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode(errors="replace")


def first_line(error: BaseException) -> str:
    """The first line of an error's text: torch adds its C++ frames."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
