"""A slow link, as text and as numbers: `100Mbit,40ms`.

A rehearsal hands this text to every rank in `ISLAND_LINK`; the peer group paces itself by it. The
rate is that of ONE island's connection, in each direction, shared by the ranks of that island; the
delay is a round trip.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "ISLAND_LINK"

TCP_SHARE = 1448 / 1514
"""Payload bytes of a full Ethernet frame: what a paced link carries of its nominal rate."""

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_BITS = {f"{p}{unit}": factor for unit in ("bit", "bps") for p, factor in _PREFIXES.items()}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*", re.IGNORECASE)


def _split(text: str) -> tuple[float, str] | None:
    """`"20mbit/s"` -> `(20.0, "mbit/s")`; None if it is no finite number, a unit aside."""
    found = _NUMBER_UNIT.fullmatch(text)
    if found is None or not math.isfinite(float(found[1])):
        return None
    return float(found[1]), found[2]


def parse_rate(text: str) -> float:
    """Bits per second from text such as `100Mbit`, `1Gbit`, `20mbit/s`, `5Mbps`. Decimal prefixes,
    case does not matter.

    Raises:
        ValueError: not a positive number with one of these units. Bytes (`MB/s`) are refused: `Mb`
            and `MB` are too easily taken for each other.

    >>> parse_rate("100Mbit")
    100000000.0
    """
    parts = _split(text)
    unit = parts[1].lower().removesuffix("/s") if parts else ""
    bytes_meant = unit.endswith("bps") and parts is not None and "B" in parts[1]
    if parts is None or parts[0] <= 0 or unit not in _BITS or bytes_meant:
        allowed = (
            "a number above 0 with kbit, Mbit or Gbit, for example 100Mbit (bits, not bytes: 10 "
            "MB/s is 80Mbit)"
        )
        raise ValueError(f"link rate {text!r}: expected {allowed}")
    return parts[0] * _BITS[unit]


def parse_rtt(text: str) -> float:
    """Seconds of one round trip from text such as `40ms`, `0.04s`, `500us` or `0`.

    Raises:
        ValueError: no number, no unit (except for 0), or negative.

    >>> parse_rtt("40ms")
    0.04
    """
    parts = _split(text)
    if parts is not None and parts[0] == 0 and parts[1] == "":
        return 0.0
    if parts is None or parts[1].lower() not in _SECONDS:
        raise ValueError(
            f"link round trip {text!r}: expected a number with us, ms or s, for example 40ms"
        )
    # Division keeps round decimals exact: 40 / 1000 is 0.04, 40 * 1e-3 need not be for every
    # number.
    return parts[0] / round(1 / _SECONDS[parts[1].lower()])


@dataclass(frozen=True)
class Link:
    """One island's connection to the others.

    Attributes:
        bits_per_second: rate of each direction, shared by the ranks of the island; None is "not
            limited".
        rtt: round trip in seconds; 0 adds nothing.

    >>> Link.parse("100Mbit,40ms")
    Link(bits_per_second=100000000.0, rtt=0.04)
    >>> str(Link(1e9, 0.0))
    '1Gbit,0ms'
    """

    bits_per_second: float | None = None
    rtt: float = 0.0

    def __post_init__(self) -> None:
        rate = self.bits_per_second
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ValueError(
                f"Link.bits_per_second = {rate}: must be above 0 and finite, or None for no limit"
            )
        if not (math.isfinite(self.rtt) and self.rtt >= 0):
            raise ValueError(f"Link.rtt = {self.rtt}: must be 0 or more seconds, and finite")

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read `RATE`, `RTT`, or `RATE,RTT` (in this order; `none` in place of a rate is "not
        limited").

        Raises:
            ValueError: names the part that could not be read and what is allowed.

        >>> Link.parse("none,40ms")
        Link(bits_per_second=None, rtt=0.04)
        """
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > 2 or not all(parts):
            raise ValueError(
                f"link {text!r}: expected RATE,RTT such as 100Mbit,40ms, or only one of the two"
            )
        number = _split(parts[0])
        if len(parts) == 1 and number is not None and number[1].lower() in _SECONDS:
            return cls(None, parse_rtt(parts[0]))
        rate = None if parts[0].lower() == "none" else parse_rate(parts[0])
        return cls(rate, parse_rtt(parts[1]) if len(parts) == 2 else 0.0)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Link | None:
        """The link that `ISLAND_LINK` describes, or None where the variable is unset or empty
        (nothing to pace).

        Raises:
            ValueError: the variable holds something else than a link; the text names the variable.

        >>> Link.from_env({}) is None
        True
        """
        text = (os.environ if env is None else env).get(VARIABLE, "").strip()
        if not text:
            return None
        try:
            return cls.parse(text)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None

    def __bool__(self) -> bool:
        """False for a link that slows nothing.

        >>> bool(Link()), bool(Link(None, 0.04))
        (False, True)
        """
        return self.bits_per_second is not None or self.rtt > 0

    def __str__(self) -> str:
        """Text that `parse` reads back to an equal link."""
        rate, rtt = "none", f"{self.rtt * 1e3:g}ms"
        if parse_rtt(rtt) != self.rtt:
            rtt = f"{self.rtt!r}s"
        if (bits := self.bits_per_second) is not None:
            units = (unit for unit in ("Gbit", "Mbit", "kbit") if bits >= _BITS[unit.lower()])
            unit = next(units, "bit")
            rate = f"{bits / _BITS[unit.lower()]:g}{unit}"
            if parse_rate(rate) != bits:
                rate = f"{bits!r}bit"
        return f"{rate},{rtt}"
