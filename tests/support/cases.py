"""Cases that share a set of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def named(case: str) -> Iterator[None]:
    """An error in here says which of the cases it is about."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise AssertionError(f"case {case!r}: {type(error).__name__}: {error}") from error
