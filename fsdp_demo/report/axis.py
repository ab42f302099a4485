"""Scales of a chart: ticks that people read, in the unit that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

UNITS: dict[str, tuple[tuple[float, str], ...]] = {
    "tokens": ((1e9, "tokens (G)"), (1e6, "tokens (M)"), (1e3, "tokens (k)"), (1, "tokens")),
    "seconds": ((3600, "hours"), (120, "minutes"), (1, "seconds")),
    "bytes_sent": (
        (1e12, "TB sent by each island"),
        (1e9, "GB sent by each island"),
        (1e6, "MB sent by each island"),
        (1e3, "kB sent by each island"),
        (1, "bytes sent by each island"),
    ),
    "share": ((0.01, "% of the time"),),
    "loss": ((1, "loss (nats per token)"),),
}
DIVISORS = {120: 60}  # seconds are shown as minutes from two of them on


@dataclass(frozen=True)
class Axis:
    """From values to a place between 0 and 1.

    Attributes:
        low, high: values at the ends. label: with the unit. ticks: (value, text).
    """

    low: float
    high: float
    label: str
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)


def axis(what: str, values: Sequence[float], zero: bool = True, count: int = 5) -> Axis:
    """An axis for these values.

    Args:
        what: a key of UNITS. zero: begin at 0. count: ticks, about.

    Example:
        >>> from fsdp_demo.report.axis import axis
        >>> made = axis("seconds", [0, 1500])
        >>> made.label, [text for _, text in made.ticks]
        ('minutes', ['0', '5', '10', '15', '20', '25'])
    """
    top = max(values, default=0.0)
    bottom = 0.0 if zero else min(values, default=0.0)
    if top <= bottom:
        top = bottom + (abs(bottom) or 1.0)
    units = UNITS[what]
    least, label = next(((f, text) for f, text in units if top >= f), units[-1])
    factor = DIVISORS.get(int(least), least)
    step = _step((top - bottom) / factor / count)
    if not zero:
        room = 0.03 * (top - bottom)
        bottom, top = bottom - room, top + room
    first = math.ceil(bottom / factor / step - 1e-9)
    last = math.floor(top / factor / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = tuple((i * step * factor, f"{i * step:.{digits}f}") for i in range(first, last + 1))
    return Axis(bottom, top, label, ticks)


def _step(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= rough * (1 - 1e-9))
