"""Questions to the store and its answers, as bytes, and the connection of one client on which they
travel.

A message is one of msgpack, whose form and size are checked before anything is done with it. The
connection repeats a question until its answer is there, and recognises who else may listen at that
address.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import zmq
from msgspec import Meta, Struct
from zmq.utils.monitor import recv_monitor_message

from ..errors import StoreSilent, WireError, see
from ..net.address import Keys, join_address, split_endpoint

LARGEST = 1 << 20
"""Bytes of a value: notes and lists of steps have a few hundred, and records of a change of members
up to this where many islands of many ranks have all pieces to forward
(`membership/protocol_types.py`)."""

LONGEST = 512
"""Bytes of a key."""

LARGEST_MESSAGE = 2 * LARGEST + 4096
"""Bytes of a question or an answer: two values and a key."""

AT_ONCE = 1024
"""Keys in one question."""

SALT = "the store"
"""What the keys of a connection to the store are derived with, beside the token
(`net.address.Keys`): one store serves several runs.
"""

Form = TypeVar("Form")
Id = Annotated[bytes, Meta(max_length=16)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Key = Annotated[str, Meta(min_length=1, max_length=LONGEST)]
Value = Annotated[str, Meta(max_length=LARGEST)]


class Question(Struct, frozen=True, array_like=True, tag="FDSQ3"):
    """One question.

    Attributes:
        verb: "hello" (which store is this?); "get" of any number of keys; "set" of one key to one
            value; "compare_set" of one key from an expected to a desired value.
        number: of the question. A client counts upwards, has one question open at a time, and
            repeats it under its number until it is answered.
        client: made at random by the client. store: the store's name as the client knows it; empty
            in "hello".
    """

    verb: Literal["hello", "get", "set", "compare_set"]
    number: Number
    client: Id
    store: Id = b""
    keys: Annotated[list[Key], Meta(max_length=AT_ONCE)] = []
    values: Annotated[list[Value], Meta(max_length=2)] = []


class Answer(Struct, frozen=True, array_like=True, tag="FDSA3"):
    """One answer.

    Attributes:
        status: "done"; "refused": the question is wrong; "failed": the store cannot keep the
            change, or was made anew since. `text` says why, and nothing was changed.
        number: of the question. values: of the keys of a "get", as many as fit, one at least; the
            value of the key after a "compare_set"; name (hexadecimal) and generation of the store.
    """

    status: Literal["done", "refused", "failed"]
    number: Number
    values: list[str] = []
    text: str = ""


NUMBERS = {"hello": (0, 0), "set": (1, 1), "compare_set": (1, 2)}
"""How many keys and values a question has; "get" has any number of keys."""


def pack(message: Question | Answer) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def read_question(data: bytes) -> Question:
    """The question in `data`. Raises WireError: it is none."""
    question = _read(data, Question)
    found = len(question.keys), len(question.values)
    if found != NUMBERS.get(question.verb, (found[0], 0)):
        raise WireError(f"a question {question.verb!r} with {found[0]} keys and {found[1]} values")
    return question


def read_answer(data: bytes) -> Answer:
    """The answer in `data`. Raises WireError: it is none."""
    return _read(data, Answer)


def _read(data: Any, form: type[Form]) -> Form:
    try:
        return msgspec.msgpack.decode(data, type=form)
    except (ValueError, RecursionError) as error:  # those of msgspec are ValueErrors
        raise WireError(
            f"a message of the store cannot be read ({error!s:.120}): use one release"
        ) from None


# ---- the connection of a client ------------------------------------------------------------------

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


class Identity(NamedTuple):
    """Which store this is.

    Attributes:
        name: made at random with the store's file: a store that was lost and started empty has
            another one.
        generation: how often the file was opened, from 1.
    """

    name: str
    generation: int


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
        to others are dropped. Raises WireError: what came is no answer.
        """
        end = time.monotonic() + seconds
        while not self.gone and (left := end - time.monotonic()) > 0:
            ready = dict(self._poller.poll(math.ceil(1e3 * left)))
            if self._socket in ready:
                with suppress(zmq.Again):
                    answer = read_answer(self._socket.recv(zmq.NOBLOCK))
                    if answer.number in (number, 0):  # 0: it could not read the question
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


class Line:
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
        self._connection: Connection | None = None
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
        limits = time.monotonic() + seconds, seconds, absent
        if not self._lock.acquire(timeout=max(seconds, 0.0)):
            raise StoreSilent(
                f"the store at {self._where} does not answer within {seconds:g} s: another thread "
                "waits for it"
            )
        try:
            if self.known is None:
                self.known = identity_in(self._question("hello", [], [], *limits))
            return self._question(verb, keys, values, *limits)
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

    def _question(self, verb: Any, keys: list[str], values: list[str], *limits: float) -> list[str]:
        self._number += 1
        store = b"" if self.known is None else bytes.fromhex(self.known.name)
        question = Question(verb, self._number, self._id, store, keys, values)
        answer = self._answer(pack(question), *limits)
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
        while (left := end - time.monotonic()) > 0:
            if self._connection is None:
                address = join_address(self._place.host, self._place.port)
                self._connection = Connection(self._context, f"tcp://{address}", self._token)
            self._connection.ask(question)
            answer = self._connection.answer(self._number, min(left, patience))
            if answer is not None:
                self._strangers = 0
                return answer
            ended, self._connection = self._connection, None
            ended.close()
            why = f" ({ended.gone})" if ended.gone else why
            self._recognise(ended, min(end - time.monotonic(), 1.0))
            if ended.gone == NOBODY_LISTENS and time.monotonic() > give_up:
                raise StoreSilent(
                    f"the store at {self._where} is not there ({NOBODY_LISTENS}, for {absent:g} s)"
                )
            if ended.gone:
                time.sleep(max(min(AGAIN, end - time.monotonic()), 0.0))
            else:
                patience = min(2 * patience, RARELY)
        raise StoreSilent(f"the store at {self._where} does not answer within {seconds:g} s{why}")

    def _recognise(self, connection: Connection, seconds: float) -> None:
        """Give up on another listener, one asked for too long, or tokens that cannot agree."""
        self._strangers = self._strangers + 1 if connection.stranger else 0
        if self.known is not None or connection.gone == NOBODY_LISTENS or seconds <= 0:
            return
        if _is_torchs(self._place.host, self._place.port, seconds):
            bind = join_address(self._place.host, self._place.port)
            raise ValueError(
                f"a store of torch.distributed answers at ISLAND_ENDPOINT={self._where}, where "
                f"islands cannot meet: start there `fsdp-demo store --bind {bind}`{see('no-store')}"
            )
        if self._strangers < STRANGERS:
            return
        self._strangers = 0
        if _greets(self._place.host, self._place.port, seconds):
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


def identity_in(values: list[str]) -> Identity:
    """What the answer to "hello" says. Raises WireError: it says something else."""
    if len(values) != 2 or not values[1].isdigit():
        raise WireError(f"it gives its name as {values!r:.60}")
    return Identity(values[0], int(values[1]))


def _greets(host: str, port: int, seconds: float) -> bool:
    """Whether somebody greets there, as a store does; a tunnel without a store only closes."""
    with suppress(OSError), socket.create_connection((host, port), timeout=seconds) as probe:
        return bool(probe.recv(1))
    return False


def _is_torchs(host: str, port: int, seconds: float) -> bool:
    """Whether a `torch.distributed.TCPStore` listens there: it gives back the number of a ping."""
    validate, ping, nonce = 0, 13, b"\x4e\x6f\x6e\x63"
    with suppress(OSError), socket.create_connection((host, port), timeout=seconds) as probe:
        probe.sendall(struct.pack("<BIB", validate, 0x3C85F7CE, ping) + nonce)
        return probe.recv(4) == nonce
    return False
