"""What was measured of a link, as numbers for others: the short measurement of `quick.py`, and
`doctor.json`, the file that `fsdp-demo doctor --json` writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comm.link import Link
from ..files import read_json

FORMAT = 1
"""Of `doctor.json`."""


@dataclass(frozen=True)
class LinkReading:
    """What was measured of the slowest link of a peer group; equal on all islands.

    Attributes:
        bits_per_second: that one island sends to all others together, while it receives as much.
        rtt: seconds of a round trip.
    """

    bits_per_second: float
    rtt: float

    @property
    def link(self) -> Link:
        """The same as a `Link`."""
        return Link(self.bits_per_second, self.rtt)


@dataclass(frozen=True)
class Reading:
    """What `doctor.json` says to who plans a run.

    Attributes:
        link: slowest direction, with as many connections as the exchange uses, and longest round
            trip.
        step_seconds: of the slowest island, where all were measured; else None.
    """

    link: Link
    step_seconds: float | None = None


def load(path: str | Path) -> Reading:
    """Read what `fsdp-demo doctor --json` wrote.

    Raises:
        ValueError: no such file, no json, another format, or no link was measured.
    """
    try:
        found: Any = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as what `fsdp-demo doctor --json` writes: {error}"
        ) from None
    form = found.get("format") if isinstance(found, dict) else None
    if form != FORMAT:
        raise ValueError(
            f"{path} has format {form!r}, this release reads {FORMAT}: let this release's "
            "`fsdp-demo doctor --json` write it"
        )
    link = found.get("link")
    numbers = [link.get(name) for name in ("bits_per_second", "rtt")] if link else []
    if len(numbers) != 2 or not all(_number(value) for value in numbers):
        raise ValueError(
            f"{path} holds no measured link: cure what its findings name, and run `fsdp-demo "
            "doctor` again"
        )
    steps = [island.get("step_seconds") for island in found.get("islands", [])]
    whole = bool(steps) and all(_number(value) for value in steps)
    return Reading(Link(float(numbers[0]), float(numbers[1])), max(steps) if whole else None)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
