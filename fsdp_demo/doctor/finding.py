"""One thing that is wrong, and its cure."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = "docs/doctor.md"


@dataclass(frozen=True)
class Finding:
    """What a rule names.

    Attributes:
        name: also the anchor of its section in `PAGE`. says: what was found, with its numbers.
        cure: what to do. stops: whether a run cannot start or go on with it.
    """

    name: str
    says: str
    cure: str
    stops: bool = False

    @property
    def see(self) -> str:
        """Where the docs say more."""
        return f"{PAGE}#{self.name}"

    def note(self) -> dict[str, object]:
        """As JSON."""
        return {
            "name": self.name,
            "says": self.says,
            "cure": self.cure,
            "stops": self.stops,
            "see": self.see,
        }
