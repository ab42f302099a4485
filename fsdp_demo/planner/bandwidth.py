"""The rate of a link at which training keeps a given share of its time."""

from __future__ import annotations

from dataclasses import replace

from ..comm.link import Link
from ..config.schema import ExchangeConfig
from .rows import utilisation
from .situation import Situation

LOWEST, HIGHEST = 1e3, 1e15  # bits per second


def words(rate: float) -> str:
    """Gbit/s as a person says them: `48 Mbit/s`."""
    return f"{rate:.3g} Gbit/s" if rate >= 1 else f"{1e3 * rate:.3g} Mbit/s"


def gbit_s(situation: Situation, config: ExchangeConfig | None, target: float) -> float | None:
    """The lowest rate, in Gbit/s, at which the compute utilisation is `target`; to 0.1 %.

    Args:
        config: None is HSDP. The link's rate does not matter, its round trip does.

    Returns:
        None where no rate does: round trips and the work of compression alone take more.
    """
    rtt = situation.link.rtt

    def reached(rate: float | None) -> bool:
        return utilisation(replace(situation, link=Link(rate, rtt)), config) >= target

    if not reached(HIGHEST):
        return None
    low, high = LOWEST, HIGHEST
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high / 1e9
