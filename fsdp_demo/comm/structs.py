"""Values as JSON and back: what comes from elsewhere has the form of its type, or is refused in one
sentence.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """A value as JSON without blanks; sets are sorted."""
    return msgspec.json.encode(value, order="deterministic")


def from_json(
    data: str | bytes, form: type[T], what: str, error: type[Exception] = ValueError
) -> T:
    """The inverse of `to_json`.

    Args:
        form: a `msgspec.Struct`, or another type that msgspec knows.
        what: a noun for the sentence. error: the class of what is raised.

    Raises:
        error: it has another form.

    Example:
        >>> from_json("[1, 2]", tuple[int, int], "a pair")
        (1, 2)
    """
    try:
        return msgspec.json.decode(data, type=form)
    except (ValueError, RecursionError) as why:  # those of msgspec are ValueErrors
        raise unreadable(data, what, why, error) from None


def unreadable(
    data: object, what: str, why: object, error: type[Exception] = ValueError
) -> Exception:
    """The sentence of `from_json`, for what only its reader can see."""
    return error(f"{what} cannot be read ({why!s:.120}): {data!r:.120}; use one release everywhere")
