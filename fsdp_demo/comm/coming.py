"""A question of the others that falls into the first messages of a newcomer: it takes part without
asking it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import WireError
from .joining import LONGEST


@dataclass(frozen=True)
class Coming:
    """A message that the others launch, as the donor describes it (`held.Message.described`).

    Attributes:
        n, kind, step, flags: of its header. body: bytes of it. longest: bytes at most, where bodies
            differ. spans: length and code of each vector that is reduced.
    """

    n: int
    kind: int
    step: int
    flags: int
    body: int
    longest: int | None
    spans: Sequence[tuple[int, str]]

    @classmethod
    def read(cls, found: Mapping[str, Any], most: int) -> Coming:
        """From JSON. Raises WireError for another form, and for vectors of more than `most` bytes:
        no room is made for them.
        """
        try:
            numbers = [int(found[name]) for name in ("n", "kind", "step", "flags", "body")]
            longest, spans = found["longest"], [(int(n), str(code)) for n, code in found["spans"]]
            n, kind, step, flags, body = numbers
            made = cls(n, kind, step, flags, body, None if longest is None else int(longest), spans)
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(
                f"a message that comes is of another form ({error!r:.80}): use one release "
                "everywhere"
            ) from None
        if (
            not 0 <= made.body <= LONGEST
            or min((n for n, _ in spans), default=0) < 0
            or 4 * sum(n for n, _ in spans) > most
        ):
            raise WireError(
                f"a message comes with {made.body} bytes and vectors of {spans} values: allowed "
                f"are {most} bytes"
            )
        return made
