"""Scales of a chart: ticks that people read, in the unit that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .words import size

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
    "share": ((0.01, "standing still (% of the time)"),),
    "loss": ((1, "loss (nats per token)"),),
}
DIVISORS = {120: 60}  # seconds are shown as minutes from two of them on


@dataclass(frozen=True)
class Axis:
    """From values to a place between 0 and 1.

    Attributes:
        low, high: values at the ends. label: with the unit. ticks: (value, text). log: places go
            by ratio.
    """

    low: float
    high: float
    label: str
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
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


def log_axis(what: str, values: Sequence[float]) -> Axis:
    """An axis by ratio for these values above 0; its ticks are the powers of ten around them.

    Example:
        >>> from fsdp_demo.report.axis import log_axis
        >>> made = log_axis("bytes_sent", [20_900, 4_910_000])
        >>> made.label, [text for _, text in made.ticks]
        ('bytes sent by each island, by powers of ten', ['10 kB', '100 kB', '1 MB', '10 MB'])
    """
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    ticks = tuple((10.0**n, size(10.0**n)) for n in range(first, max(last, first + 1) + 1))
    label = f"{UNITS[what][-1][1]}, by powers of ten"
    return Axis(ticks[0][0], ticks[-1][0], label, ticks, log=True)


def _step(rough: float) -> float:
    """The nearest of 1, 2, 5 times a power of ten, by ratio."""
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min((1, 2, 5, 10), key=lambda n: abs(math.log(power * n / rough)))
