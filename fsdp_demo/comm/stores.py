"""What a store other than torch's own must do: the methods of `torch.distributed.Store` that the
islands use, each with an end.
"""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ..errors import StoreSilent

LARGEST = 1 << 20
"""Bytes of a value that is believed: notes and lists of steps of a few hundred bytes each, and
records of a change of members, which have up to this where many islands of many ranks have all
pieces to forward (`record_json.py`)."""

LONGEST = 512
"""Bytes of a key."""

SCHEME = "zmq://"
"""How the endpoint of a durable store begins."""

FILE = "fsdp_demo_store.sqlite"
"""The file of a durable store where none is named: in the folder where it is started, so that it is
found again there.
"""

SALT = "the store"
"""What the keys of a connection to the store are derived with, beside the token (`curve.Keys`): one
store serves several runs.
"""

LOOK = 0.02  # seconds between two looks for a key that is not there yet

Kind = TypeVar("Kind", bound="BoundedStore")


class Identity(NamedTuple):
    """Which store this is.

    Attributes:
        name: made at random with the store's file: a store that was lost and started empty has
            another one.
        generation: how often the file was opened, from 1; 0 where the store does not count it.
    """

    name: str
    generation: int


class BoundedStore(ABC):
    """A store whose every question ends within `deadline` seconds, from any thread.

    All methods raise StoreSilent where no answer comes, and ValueError where the store refuses the
    question: a key or value that is too long, no room, no number to add to. What is done here is
    kept before the answer.

    Args:
        where: the endpoint, for errors.
        deadline: seconds that one question may take.

    Attributes:
        absent: seconds after which a question is given up while nobody listens there, if that is
            sooner than `deadline`: who can do without the answer need not wait for a store that is
            being started again.
    """

    def __init__(self, where: str, deadline: float):
        self.where, self.deadline, self.absent = where, deadline, math.inf

    def within(self: Kind, seconds: float, absent: float = math.inf) -> Kind:
        """The same store, on the same connection, with other deadlines."""
        other = copy.copy(self)
        other.deadline, other.absent = seconds, absent
        return other

    def get(self, key: str) -> bytes:
        """The value of a key. Waits for a key that is not there, to the deadline."""
        end = time.monotonic() + self.deadline
        while (
            value := self.within(max(end - time.monotonic(), 0.0), self.absent).find(key)
        ) is None:
            if time.monotonic() + LOOK > end:
                raise StoreSilent(
                    f"the store at {self.where} has got no {key!r} within {self.deadline:g} s"
                )
            time.sleep(LOOK)
        return value

    @abstractmethod
    def find(self, key: str) -> bytes | None:
        """The value of a key, None if it is not there."""

    def find_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, b"" for one that is not there. `deadline` is of each question that
        this takes.
        """
        return [self.find(key) or b"" for key in keys]

    @abstractmethod
    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 where there is none; its new value."""

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the key if it has the expected value, or is not there and "" is expected; its value
        now.

        As torch's store does, it returns `expected` for a key that is not there where something
        else than "" is expected.
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""

    @abstractmethod
    def identity(self) -> Identity:
        """Which store answers."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


def key_bytes(key: str) -> bytes:
    """A key as it is sent.

    Raises:
        ValueError: it is empty or too long.
    """
    data = key.encode()
    if not 0 < len(data) <= LONGEST:
        raise ValueError(
            f"the key {key!r:.60} has {len(data)} bytes, allowed are 1 to {LONGEST}: take a "
            "shorter ISLAND_RUN"
        )
    return data


def value_bytes(key: str, value: str | bytes) -> bytes:
    """A value as it is sent.

    Raises:
        ValueError: it is too long.
    """
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > LARGEST:
        raise ValueError(f"the value of {key!r} has {len(data)} bytes, allowed are {LARGEST}")
    return data
