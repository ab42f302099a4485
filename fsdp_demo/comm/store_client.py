"""Questions to a store with a deadline: a store that is frozen, or behind a dead cable, must not
stop whoever asks.

`torch.distributed.TCPStore` waits for an answer without a limit when it connects and in `check`,
`add`, `set` and `delete_key`, inside C++, where no signal is served. Here each question runs in a
thread of its own, and the thread that asked waits `deadline` seconds at most.
"""

from __future__ import annotations

import copy
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import StoreSilent, see
from .address import Endpoint, split_endpoint
from .stores import LARGEST, BoundedStore, Identity


class Asker:
    """The methods of a store that the islands use, each with a deadline.

    After a question that torch's store has not answered the connection is given up: later ones fail
    at once. A `BoundedStore` may be asked again.

    Args:
        store: a `torch.distributed.Store` or a `BoundedStore`.
        where: how errors name it.
        deadline: seconds that one question may take.

    Attributes:
        prefix: stands before every key. absent: as of `BoundedStore`.
    """

    def __init__(self, store: Any, where: str, deadline: float):
        self._store = store
        self._where = where
        self.deadline = deadline
        self.prefix = ""
        self.absent = math.inf

    @property
    def store(self) -> Any:
        """The store itself, without prefix and deadlines: for a process group, which has a timeout
        of its own.
        """
        if self._store is None:
            raise StoreSilent(f"the store at {self._where} has not answered before")
        return self._store

    def under(self, prefix: str) -> Asker:
        """The same store with `prefix` and a slash before every key."""
        below = copy.copy(self)
        below.prefix = f"{self.prefix}{prefix}/"
        return below

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return int(self._ask(lambda store: store.add(self.prefix + key, amount)))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask(lambda store: store.check([self.prefix + key for key in keys])))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set the key if it has the expected value (or is not there and "" is expected); its value
        now.
        """
        return self._bounded(
            key, self._ask(lambda store: store.compare_set(self.prefix + key, expected, desired))
        ).decode(errors="replace")

    def get(self, key: str) -> bytes:
        """The value of a key that is there (waits for it otherwise, to the deadline).

        Raises:
            ValueError: it is longer than `LARGEST`: none of the islands has written it.
        """
        return self._bounded(key, self._ask(lambda store: store.get(self.prefix + key)))

    def peek(self, key: str) -> str:
        """The value of a key, "" if it is not there: one question."""
        return self.peek_all([key])[0]

    def peek_all(self, keys: Sequence[str]) -> list[str]:
        """The values of keys, "" for one that is not there: one question of a durable store, which
        writes nothing; one for each key of torch's, which keeps "" for a missing key.
        """
        if not keys or not isinstance(self.store, BoundedStore):
            return [self.compare_set(key, "", "") for key in keys]
        found = self._ask(lambda store: store.find_all([self.prefix + key for key in keys]))
        return [
            self._bounded(key, value).decode(errors="replace")
            for key, value in zip(keys, found, strict=True)
        ]

    def delete(self, key: str) -> None:
        """Delete a key; nothing happens if it is not there."""
        self._ask(lambda store: store.delete_key(self.prefix + key))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask(lambda store: store.set(self.prefix + key, value))

    def identity(self) -> Identity | None:
        """Which store answers; None if it cannot say, as torch's own cannot."""
        store = self.store
        return store.within(self.deadline).identity() if isinstance(store, BoundedStore) else None

    def note(self, key: str, who: str, fields: Mapping[str, type] | None = None) -> Any:
        """The JSON value of a key that is there.

        Args:
            who: whose note it is, for errors.
            fields: keys that the note, an object, must have, with the types of their values.

        Raises:
            ValueError: it is too long, no JSON, or lacks a field; the message names the key and
                `who`.
        """
        data = self.get(key)
        try:
            value = json.loads(data)
            wrong = next(
                (f for f, kind in (fields or {}).items() if type(value[f]) is not kind), None
            )
            reason = None if wrong is None else f"its {wrong!r} is {value[wrong]!r:.40}"
        except (ValueError, RecursionError, KeyError, TypeError, IndexError) as error:
            reason = f"{type(error).__name__}: {str(error)[:80]}"
        if reason is not None:
            raise ValueError(f"{self._wrong(key)} of {who} cannot be read ({reason}): {self._cure}")
        return value

    def _bounded(self, key: str, value: bytes) -> bytes:
        if len(value) > LARGEST:
            raise ValueError(
                f"{self._wrong(key)} has {len(value)} bytes, allowed are {LARGEST}: {self._cure}"
            )
        return bytes(value)

    def _wrong(self, key: str) -> str:
        return f"the note {self.prefix}{key!s} in the store at {self._where}"

    _cure = (
        "somebody else writes into this store, or runs another release; start a store on a port "
        "that only the islands reach"
    )

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        store = self.store
        if isinstance(store, BoundedStore):
            return question(store.within(self.deadline, self.absent))
        try:
            return within(self.deadline, lambda: question(store))
        except Late:
            self._store = None  # the thread still stands in it
            raise StoreSilent(
                f"the store at {self._where} does not answer within {self.deadline:g} s"
            ) from None
        except RuntimeError as error:
            # torch's DistStoreError and DistNetworkError are RuntimeErrors
            raise StoreSilent(
                f"the store at {self._where} does not answer: {first_line(error)}"
            ) from None


# where a store has answered this process before: a connection is dear to torch's store
_reached: set[str] = set()


def connect(
    endpoint: str, limit: float, deadline: float, patience: float, secret: str = ""
) -> Asker:
    """A connection of its own to the store at `endpoint`.

    Args:
        endpoint: host:port (torch's store) or zmq://host:port (`store_zeromq.py`).
        limit: seconds until it must stand.
        deadline: seconds that one question may take afterwards.
        patience: seconds that torch's store itself waits for a key, when a process group asks it.
        secret: ISLAND_TOKEN, for zmq.

    Raises:
        StoreSilent: nobody answers there.
        ValueError: whoever answers is no such store, or does not know the secret; or a library is
            missing.
    """
    place, end = split_endpoint(endpoint), time.monotonic() + limit
    probe, reason = _reach(place.host, place.port, end) if endpoint not in _reached else (None, "")
    if not reason:
        try:
            left = max(end - time.monotonic(), 0.1)
            store = (
                _durable(endpoint, secret, left) if place.scheme else _torchs(place, patience, left)
            )
            _reached.add(endpoint)
            return Asker(store, endpoint, deadline)
        except Late:
            reason = (
                "the port is open, but nothing answers: the store hangs, or another program "
                "listens there"
            )
        except RuntimeError as error:
            reason = first_line(error)
        finally:
            if probe is not None:
                # not before: the store asks the name server about a connection that is gone
                probe.close()
    start = f"start there `fsdp-demo store --bind {endpoint}`"
    where = f"no store answers at ISLAND_ENDPOINT={endpoint} after {limit:g} s"
    raise StoreSilent(
        f"{where}: {start} and check that this port is open ({reason}){see('no-store')}"
    )


def _durable(endpoint: str, secret: str, seconds: float) -> BoundedStore:
    """The durable store, which has answered."""
    from .store_zeromq import ZeroMQStore

    store = ZeroMQStore(endpoint, secret)
    try:
        store.within(seconds).identity()
    except BaseException:
        store.close()
        raise
    return store


def _torchs(place: Endpoint, patience: float, seconds: float) -> Any:
    options: dict[str, Any] = {
        "is_master": False,
        "wait_for_workers": False,
        "timeout": timedelta(seconds=patience),
    }
    try:
        return within(seconds, lambda: dist.TCPStore(place.host, place.port, None, **options))
    except ValueError as error:
        raise RuntimeError(first_line(error)) from None


def _reach(host: str, port: int, end: float) -> tuple[socket.socket | None, str]:
    """Wait until somebody listens: a connection, or why nobody does. By a socket of our own: torch
    prints forty lines of frames for a try that fails."""
    while True:
        left = end - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(min(left, 10.0), 0.05)), ""
        except OSError as error:
            if left < 0.3:
                return None, first_line(error)
        time.sleep(0.2)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call()` returns or raises, from a thread of its own that is left behind after
    `seconds`.

    Raises:
        concurrent.futures.TimeoutError: it has not returned by then.
    """
    answer: Future[Any] = Future()
    threading.Thread(target=_run, args=(call, answer), name="store", daemon=True).start()
    return answer.result(seconds)


def _run(call: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # handed to the thread that waits
        answer.set_exception(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text: torch adds its C++ frames."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
