"""Questions to the durable store and its answers, as bytes. One message each; nothing in them is
executed or unpickled.

A question is 52 bytes and its fields, little-endian:

    4s   magic "FDSQ"
    u8   version
    u8   kind
    u16  number of fields
    u64  number of the question
    16s  the client's id
    16s  the store's identity; zeros in HELLO
    u32  whole length

An answer is 20 bytes and its fields:

    4s   magic "FDSA"
    u8   version
    u8   status
    u16  number of fields
    u64  number of the question
    u32  whole length

A field is its length (u32) and its bytes.

A client numbers its questions upwards and has one open at a time. It repeats one under the same
number until it is answered; so the store knows a repeated change, and does not make it twice.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from ..errors import WireError
from .stores import LARGEST

VERSION = 2
LARGEST_MESSAGE = 2 * LARGEST + 4096
"""Bytes of a question or an answer: two values and a key."""

HIGHEST = 2**63 - 1
"""Number that a question may have: the store's file keeps it in a signed integer of 64 bits."""

NOBODY = bytes(16)
"""Identity that a client names which does not know the store yet."""

_QUESTION, _ANSWER, _LENGTH = (
    struct.Struct("<4sBBHQ16s16sI"),
    struct.Struct("<4sBBHQI"),
    struct.Struct("<I"),
)


class Kind(IntEnum):
    """What is asked. Fields: key; key and value; key and amount; key, expected and desired; keys
    of CHECK and FIND.
    """

    HELLO = 0
    GET = 1
    CHECK = 2
    SET = 3
    ADD = 4
    COMPARE_SET = 5
    DELETE = 6
    FIND = 7


FIELDS = {Kind.HELLO: 0, Kind.GET: 1, Kind.SET: 2, Kind.ADD: 2, Kind.COMPARE_SET: 3, Kind.DELETE: 1}
"""How many fields a question has; CHECK and FIND have any number."""


class Status(IntEnum):
    """How a question ended. All but DONE and MISSING have a sentence as their field, and nothing
    was changed.
    """

    DONE = 0
    MISSING = 1  # a key that is not there
    REFUSED = 2  # the question is wrong
    FAILED = 3  # the store cannot keep it, or was made anew since


class Question(NamedTuple):
    """One question."""

    kind: Kind
    store: bytes
    client: bytes
    number: int
    fields: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Its bytes."""
        body = _packed(self.fields)
        size = _QUESTION.size + len(body)
        head = _QUESTION.pack(
            b"FDSQ",
            VERSION,
            self.kind,
            len(self.fields),
            self.number,
            self.client,
            self.store,
            size,
        )
        return head + body


class Answer(NamedTuple):
    """One answer."""

    status: Status
    number: int
    fields: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Its bytes."""
        body = _packed(self.fields)
        return (
            _ANSWER.pack(
                b"FDSA",
                VERSION,
                self.status,
                len(self.fields),
                self.number,
                _ANSWER.size + len(body),
            )
            + body
        )


def read_question(data: bytes) -> Question:
    """The question in `data`.

    Raises:
        WireError: it is none.
    """
    if len(data) < _QUESTION.size:
        raise WireError(f"a question of {len(data)} bytes")
    magic, version, kind, count, number, client, store, size = _QUESTION.unpack_from(data)
    _check(magic == b"FDSQ" and version == VERSION and size == len(data), magic, version)
    if kind not in list(Kind) or FIELDS.get(Kind(kind), count) != count:
        raise WireError(f"a question of kind {kind} with {count} fields")
    if number > HIGHEST:
        raise WireError(f"a question has number {number}, allowed are 0 to {HIGHEST}")
    return Question(Kind(kind), store, client, number, _fields(data, _QUESTION.size, count))


def read_answer(data: bytes) -> Answer:
    """The answer in `data`.

    Raises:
        WireError: it is none.
    """
    if len(data) < _ANSWER.size:
        raise WireError(f"an answer of {len(data)} bytes")
    magic, version, status, count, number, size = _ANSWER.unpack_from(data)
    _check(
        magic == b"FDSA" and version == VERSION and size == len(data) and status in list(Status),
        magic,
        version,
    )
    return Answer(Status(status), number, _fields(data, _ANSWER.size, count))


def _check(fits: bool, magic: bytes, version: int) -> None:
    if not fits:
        raise WireError(
            f"a message of the store starts with {magic!r} version {version}, expected version "
            f"{VERSION}: use one release"
        )


def _packed(fields: tuple[bytes, ...]) -> bytes:
    return b"".join(part for field in fields for part in (_LENGTH.pack(len(field)), field))


def _fields(data: bytes, at: int, count: int) -> tuple[bytes, ...]:
    out = []
    for _ in range(count):
        if at + _LENGTH.size > len(data):
            raise WireError("a message of the store is torn")
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        out.append(data[at : at + size])
        at += size
    if at != len(data):
        raise WireError("a message of the store is torn")
    return tuple(out)
