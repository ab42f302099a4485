"""Whether exchanges take as long as was planned."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ..comm.link import Link
from ..exchange.exchange import Exchange
from ..exchange.pending import ExchangeRecord
from ..planner import Situation
from ..planner.rows import plan_row
from .situation import chosen, coarse

log = logging.getLogger("fsdp_demo")

LATE, ROUNDS = 2.0, 5
"""An exchange is late if it takes so many times what was planned; so many of them in a row are
said.
"""


class LinkHealth:
    """Says when exchanges take longer than was planned, with the settings that would fit.

    Called at the end of every step; no communication. It never changes the method.
    """

    def __init__(self, exchange: Exchange, situation: Situation):
        self._exchange, self._situation = exchange, situation
        self._seen: ExchangeRecord | None = None  # the newest that was looked at
        self._late, self._said = list[float](), False
        link = situation.link
        self._bits = 8 * plan_row(situation, exchange.config).bytes_per_exchange
        self.planned = self._bits / (link.bits_per_second or math.inf) + 2 * link.rtt

    def __call__(self) -> None:
        for record in self._exchange.ended_since(self._seen):
            self._seen = record
            if record.began is None or record.ended is None:
                continue
            took = record.ended - record.began
            self._late = [*self._late, took] if took > LATE * self.planned + 0.05 else []
            if len(self._late) == ROUNDS and not self._said and self._exchange.topology.rank == 0:
                self._said = True
                log.warning("auto: %s", self.advice(self._late))

    def advice(self, late: Sequence[float]) -> str:
        """What to say of exchanges that took so many seconds."""
        s, took = self._situation, statistics.median(late)
        text = (
            f"the last {len(late)} exchanges took {took:.3g} s, where {self.planned:.2g} s "
            f"were planned for {s.link}: the link has become slower, or an island comes late"
        )
        # what the rate must be if the round trip is as it was
        rate = self._bits / (took - 2 * s.link.rtt)
        there = replace(s, link=Link(coarse(rate), s.link.rtt))
        now = plan_row(there, self._exchange.config)
        text += f". On {there.link} the method keeps {now.compute_utilisation:.1%} of the time"
        try:
            fits = chosen(there, self._exchange.host)
        except ValueError:
            return text
        if fits.row.compute_utilisation <= now.compute_utilisation:
            return f"{text} for compute, and no other setting keeps more"
        return (
            f"{text} for compute; {fits.row.name} ({fits.row.settings}) would keep "
            f"{fits.row.compute_utilisation:.1%}. The method stays as it is; to change it, resume "
            "with that one by name and a fresh exchange"
        )
