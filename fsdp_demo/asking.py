"""Questions to a store with a deadline: a store that is frozen, or behind a dead cable, must not stop whoever asks.

`torch.distributed.TCPStore` waits for an answer without a limit in `check`, `add`, `set` and `delete_key`, inside C++, where no signal is
served. Here each question runs in a thread of its own, and the thread that asked waits `deadline` seconds at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any

from .transport import PeerLost


class StoreSilent(PeerLost):
    """The store did not answer in time, or its connection is gone. What was asked may have happened or not.

    Example:
        >>> from fsdp_demo.asking import StoreSilent
        >>> issubclass(StoreSilent, RuntimeError)
        True
    """


class Asker:
    """The methods of a store that the islands use (`add`, `check`, `compare_set`, `get`, `set`), each with a deadline.

    After a question that was not answered the connection is given up: later ones fail at once.

    Args:
        store: a `torch.distributed.Store` that nobody else uses.
        where: how errors name it.
        deadline: seconds that one question may take.
    """

    def __init__(self, store: Any, where: str, deadline: float):
        self._store, self._where, self.deadline = store, where, deadline

    @property
    def store(self) -> Any:
        """The store itself, without deadlines: for a process group, which has a timeout of its own."""
        return self._store

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return int(self._ask(lambda store: store.add(key, amount)))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask(lambda store: store.check(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set the key if it has the expected value (or is not there and "" is expected); its value now."""
        return bytes(self._ask(lambda store: store.compare_set(key, expected, desired))).decode(errors="replace")

    def get(self, key: str) -> bytes:
        """The value of a key that is there (waits for it otherwise, to the deadline)."""
        return bytes(self._ask(lambda store: store.get(key)))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask(lambda store: store.set(key, value))

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        store = self._store
        if store is None:
            raise StoreSilent(f"the store at {self._where} has not answered before")
        answer: Future[Any] = Future()
        threading.Thread(target=_run, args=(question, store, answer), name="store", daemon=True).start()
        try:
            return answer.result(self.deadline)
        except Late:
            self._store = None  # the thread still stands in it
            raise StoreSilent(f"the store at {self._where} does not answer within {self.deadline:g} s") from None
        except RuntimeError as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
            first = (str(error).splitlines() or [""])[0][:160]
            raise StoreSilent(f"the store at {self._where} does not answer: {first}") from None


def _run(question: Callable[[Any], Any], store: Any, answer: Future[Any]) -> None:
    try:
        answer.set_result(question(store))
    except BaseException as error:  # handed to the thread that waits
        answer.set_exception(error)
