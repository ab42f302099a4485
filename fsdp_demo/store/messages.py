"""Questions to the store and its answers, as bytes: one message of msgpack each, whose form and
size are checked before anything is done with it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..errors import WireError

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
"""What the keys of a connection to the store are derived with, beside the token (`curve.Keys`): one
store serves several runs.
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
