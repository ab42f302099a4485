"""Values as JSON and back: what comes from elsewhere has the form of its type, or is refused in one
sentence.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def to_json(value: Any) -> str:
    """A value as JSON without blanks; NaN and Inf are written as Python does."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=_plain), separators=(",", ":"))


def from_json(
    data: str | bytes, form: type[T], what: str, error: type[Exception] = ValueError
) -> T:
    """The inverse of `to_json`.

    Args:
        form: a `msgspec.Struct`, or another type that msgspec knows.
        what: a noun for the sentence. error: the class of what is raised.

    Raises:
        error: it is no JSON, or has another form.

    Example:
        >>> from_json("[1, 2]", tuple[int, int], "a pair")
        (1, 2)
    """
    try:
        return msgspec.convert(json.loads(data), form)
    except (ValueError, RecursionError) as why:  # those of msgspec and json are ValueErrors
        raise unreadable(data, what, why, error) from None


def _plain(value: Any) -> Any:
    """What json knows and msgspec does not: a str, int or float of another class, as torch's
    version.
    """
    return json.loads(json.dumps(value))


def unreadable(
    data: object, what: str, why: object, error: type[Exception] = ValueError
) -> Exception:
    """The sentence of `from_json`, for what only its reader can see."""
    return error(f"{what} cannot be read ({why!s:.120}): {data!r:.120}; use one release everywhere")
