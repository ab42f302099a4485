"""Whose contributions the exchanges had that brought this replica where it is: one digest, which
goes into every checkpoint (K9).

Two checkpoints between the same exchanges are of one state only if it is equal. It stays what it is
from one exchange to the next, and changes where other islands take part than before. So it costs a
comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.epochs import Member, extended

BEGUN = "0" * 16
"""Of a run in which all islands have taken part in everything."""


@dataclass
class History:
    """Of one rank.

    Attributes:
        islands: of the run.
        digest: 16 hexadecimal digits; empty where it is not known: the state was converted.
        slots: the islands that take part now. at: the step of the exchange from which on they do.
        early: of them those whose part in the last exchange came ahead of its time: they had left,
            and have not applied it.

    Example:
        >>> one, two = History(3), History(3)
        >>> one.hear(7, (0, 1, 2)); two.hear(7, (0, 2))
        >>> one.digest == BEGUN, two.digest == BEGUN
        (True, False)
    """

    islands: int
    digest: str = BEGUN
    slots: tuple[int, ...] = ()
    at: int = -1
    early: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.slots = self.slots or tuple(range(self.islands))

    def hear(self, step: int, slots: Sequence[int]) -> None:
        """An exchange of `step` is about to be applied; nothing happens when that is said again. No
        slots: they are not known any more.
        """
        if slots and step >= self.at and tuple(slots) != self.slots:
            self.digest = extended(self.digest, step, [Member(s) for s in slots])
            self.slots, self.at = tuple(slots), step

    def note(self) -> dict[str, Any]:
        """As plain values, for `load`."""
        return {
            "digest": self.digest,
            "slots": list(self.slots),
            "at": self.at,
            "early": list(self.early),
        }

    def load(self, note: Mapping[str, Any]) -> None:
        """Go on from what `note` gave, here or on another island; from nothing known where it is
        empty.
        """
        self.digest, self.at = str(note.get("digest", "")), int(note.get("at", -1))
        self.slots = tuple(int(s) for s in note.get("slots", ())) or tuple(range(self.islands))
        self.early = tuple(int(s) for s in note.get("early", ()))
