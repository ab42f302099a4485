"""Files that a reader sees whole or not at all, and JSON of unknown origin, which is read within
bounds: a file that somebody has made up ends in one sentence, not in a traceback or in minutes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

LARGEST = 128 << 20
"""Bytes of a JSON text: those of a rank of a model with 100,000 parameters have a fifth of that."""

DEEPEST = 100
"""Levels of lists and objects in each other."""


def in_one_piece(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, sync it and give it its name: a reader sees the old file
    or the whole new one. What has the temporary file's name is removed first: a link there would
    let `write` into a file elsewhere.
    """
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    write(part)
    handle = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(part, path)


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON, or one with more than `LARGEST` bytes or `DEEPEST` levels.

    >>> parse_json('{"step": 3}')
    {'step': 3}
    """
    if len(text) > LARGEST:
        raise ValueError(f"JSON of {len(text):,} bytes, allowed are {LARGEST:,}")
    try:
        value = json.loads(text)
        if not is_deep(value):
            return value
    except RecursionError:
        pass
    raise ValueError(f"JSON of more than {DEEPEST} levels of lists and objects in each other")


def read_json(path: Path) -> Any:
    """The value of a JSON file, which is not read where it is larger than `LARGEST`. Raises
    OSError: it cannot be read. ValueError: it is no plain file; see `parse_json`.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # a fifo would be waited for
        raise ValueError("a fifo, a device or a folder, not a file")
    if found.st_size > LARGEST:
        raise ValueError(f"JSON of {found.st_size:,} bytes, allowed are {LARGEST:,}")
    return parse_json(path.read_text(encoding="utf-8"))


def is_deep(value: Any) -> bool:
    """Whether lists and objects lie in each other in more than `DEEPEST` levels."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for node in level
            if isinstance(node, (dict, list))
            for inner in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


# Values as JSON and back: what comes from elsewhere has the form of its type, or is refused in
# one sentence.

T = TypeVar("T")


def to_json(value: Any) -> str:
    """A value as JSON without blanks; NaN and Inf are written as Python does."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=_plain), separators=(",", ":"))


def from_json(
    data: str | bytes, form: type[T], what: str, error: type[Exception] = ValueError
) -> T:
    """The value of a JSON text, checked against a type; the inverse of `to_json`.

    Args:
        form: a `msgspec.Struct`, or another type that msgspec knows.
        what: a noun for the sentence. error: the class of what is raised.

    Raises:
        error: it is no JSON, or has another form.

    >>> from_json("[1, 2]", tuple[int, int], "a pair")
    (1, 2)
    """
    try:
        return msgspec.convert(json.loads(data), form)
    except (ValueError, RecursionError) as why:  # those of msgspec and json are ValueErrors
        raise unreadable(data, what, why, error) from None


def _plain(value: Any) -> Any:
    """A value that json can write and msgspec cannot: a str, int or float of a subclass, as
    `torch.__version__`.
    """
    return json.loads(json.dumps(value))


def unreadable(
    data: object, what: str, why: object, error: type[Exception] = ValueError
) -> Exception:
    """The sentence of `from_json`, for what only its reader can see."""
    return error(f"{what} cannot be read ({why!s:.120}): {data!r:.120}; use one release everywhere")
