"""The store as islands and ranks ask it: `get`, `set`, `compare_set`, each with a deadline.

`StoreClient` speaks to the durable store (`store/server.py`) at ISLAND_ENDPOINT, where islands
meet. `WorldStore` asks the store of a torch.distributed world, for what its own ranks tell each
other.
"""

from __future__ import annotations

import copy
import logging
import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any, Self, TypeVar

from ..errors import PeerLost, StoreSilent, see
from ..files import from_json
from ..net.address import join_address, split_endpoint
from .connection import AT_ONCE, LARGEST, LONGEST, Identity, Line, identity_in

log = logging.getLogger("fsdp_demo")

NOTICE = 10.0  # seconds without a store until the log says so, once
LOOK = 0.02  # seconds between two looks for the notes of others

T = TypeVar("T")


class NotAllCame(PeerLost):
    """Some did not come in time."""


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

    def under(self, prefix: str) -> Self:
        """The same store, on the same connection, with `prefix` and a slash before every key."""
        below = copy.copy(self)
        below.prefix = f"{self.prefix}{prefix}/"
        return below

    def within(self, seconds: float) -> Self:
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

    def note(self, key: str, who: str, form: type[T]) -> T:
        """The JSON value of a key that is there.

        Args:
            who: whose note it is, for errors. form: its type, as msgspec knows types.

        Raises:
            ValueError: it is no JSON, or has another form; the message names the key and `who`.
        """
        return self._parsed(key, self.get(key), who, form)

    def _parsed(self, key: str, text: str, who: str, form: type[T]) -> T:
        place = f"in the store at {self.where}, which only the islands should reach,"
        return from_json(text, form, f"the note {self.prefix}{key} of {who} {place}")

    def gather(
        self,
        name: str,
        among: Sequence[int],
        form: type[T],
        seconds: float,
        what: str,
        *,
        cure: str = "",
        kind: str = "island",
        label: Callable[[int, Any], str] = lambda i, note: str(i),
        look: Callable[[dict[int, T], list[int]], list[int]] = lambda notes, missing: missing,
    ) -> dict[int, T]:
        """Wait until all of `among` have left a note under `name/NUMBER`; the notes by number, in
        order.

        Args:
            form: type of a note, as msgspec knows types.
            what: what is waited for, and cure: what to do if it does not come, for the error.
            kind: of what has the numbers. label: its number and, if its note is given, more, for
                errors.
            look: called after each look into the store with the notes so far and the numbers that
                have left none; gives those that are waited for, or raises.

        Raises:
            NotAllCame: some have left none within so many seconds; the message names them.
            ValueError: a note cannot be read (`note`).
        """
        notes, end = dict[int, T](), time.monotonic() + seconds
        while True:
            keys = {i: f"{name}/{i}" for i in among if i not in notes}
            for i, text in zip(keys, self.get_all(list(keys.values())), strict=True):
                if text:
                    notes[i] = self._parsed(keys[i], text, f"{kind} {label(i, None)}", form)
            notes = dict(sorted(notes.items()))
            missing = look(notes, [i for i in among if i not in notes])
            if not missing:
                return notes
            if time.monotonic() > end:
                came = ", ".join(label(i, note) for i, note in notes.items() if i not in missing)
                lacking = ", ".join(label(i, None) for i in missing)
                raise NotAllCame(
                    f"waited {seconds:g} s for {what}: came {came or 'nobody'}; missing "
                    f"{lacking}{cure}"
                )
            time.sleep(LOOK)


class WorldStore(Store):
    """The store of a torch.distributed world, which waits for an answer without a limit, inside
    C++, where no signal is served. So each question runs in a thread of its own. After one that was
    not answered the connection is given up: later ones fail at once.
    """

    def __init__(self, store: Any, where: str, deadline: float):
        super().__init__(where, deadline)
        self._store = store

    def get_all(self, keys: Sequence[str]) -> list[str]:
        def values(store: Any) -> list[str]:
            return [
                _text(store.get(key)) if store.check([key]) else ""
                for key in (self.prefix + key for key in keys)
            ]

        found: list[str] = self._ask(values)
        return found

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(self.prefix + key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        now = self._ask(lambda store: store.compare_set(self.prefix + key, expected, desired))
        return _text(now)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        if self._store is None:
            raise StoreSilent(f"the store at {self.where} has not answered before")
        answer, store = Future[Any](), self._store

        def run() -> None:
            try:
                answer.set_result(question(store))
            except BaseException as error:  # handed to the thread that waits
                answer.set_exception(error)

        # no executor's thread, which would hold an interpreter that wants to end
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
        endpoint: host:port.
        limit: seconds until it must have answered.
        deadline: seconds that one question may take afterwards.
        token: ISLAND_TOKEN.

    Raises:
        StoreSilent: nobody answers there.
        ValueError: whoever answers is no such store, or has another token.
    """
    place, end = split_endpoint(endpoint), time.monotonic() + limit
    absent = f"no store answers at ISLAND_ENDPOINT={endpoint}"
    cure = (
        f"start there `fsdp-demo store --bind {join_address(place.host, place.port)}` and check "
        "that this port is open"
    )
    reason = _why_out_of_reach(place.host, place.port, end, absent, cure)
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
    raise StoreSilent(f"{absent} after {limit:g} s: {cure} ({reason}){see('no-store')}")


def _why_out_of_reach(host: str, port: int, end: float, absent: str, cure: str) -> str:
    """Wait for a listener, warn once (`absent`, `cure`); why there is none, or ""."""
    notice = time.monotonic() + NOTICE
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(min(left, 10.0), 0.05)).close()
            return ""
        except OSError as error:
            if left < 0.3:
                return first_line(error)
            if time.monotonic() >= notice:
                notice = math.inf
                then = f"If none comes, {cure}{see('no-store')}"
                waits = f"this rank waits for it, for {left:.0f} s more. {then}"
                log.warning("%s so far (%s): %s", absent, first_line(error), waits)
        time.sleep(0.2)


class StoreClient(Store):
    """The store at ISLAND_ENDPOINT; connects at the first question."""

    def __init__(self, endpoint: str, token: str = "", deadline: float = 15.0):
        super().__init__(endpoint, deadline)
        self._line = Line(endpoint, token)

    def _ask(self, verb: str, keys: Sequence[str], *values: str) -> list[str]:
        return self._line.ask(verb, list(keys), list(values), self.deadline, self.absent)

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """The values of several keys: by several questions where one answer cannot hold them."""
        wanted, found = [self._key(key) for key in keys], list[str]()
        while len(found) < len(wanted):
            found += self._ask("get", wanted[len(found) : len(found) + AT_ONCE])
        return found

    def set(self, key: str, value: str) -> None:
        self._ask("set", [self._key(key)], self._value(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        values = self._value(key, expected), self._value(key, desired)
        return self._ask("compare_set", [self._key(key)], *values)[0]

    def identity(self) -> Identity:
        """Which store answers, asked anew; StoreSilent if it is another one than before."""
        now = identity_in(self._ask("hello", []))
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


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode(errors="replace")


def first_line(error: BaseException) -> str:
    """The first line of an error's text: torch adds its C++ frames."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
