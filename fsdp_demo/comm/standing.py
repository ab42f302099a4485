"""Says for which islands this rank waits, and tells one that has stood for too long to end.

A peer that beats and does not come to the next message evaluates, saves, compiles, or hangs: beats
come from a thread of their own. Nobody is lost by that at first. In the end it is the one that
stands that goes, never one that waits for it, whichever has the lower slot. It knows by itself
whether it stands: a peer that has moved meanwhile stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ..errors import see
from .epochs import Member, Record
from .membership import Rank
from .signs import Signs

log = logging.getLogger("fsdp_demo")

PATIENCE = 30.0
"""Seconds after which a wait is told first, if it is not usual; then after twice as many."""


class StandingWatch:
    """Looks at what this rank hears of its peers.

    Args:
        signs: what it hears. label: how errors and logs name an island, by slot.
    """

    def __init__(self, signs: Signs, label: Callable[[int], str]):
        self._signs, self._label = signs, label
        self._waits, self._next = -1, PATIENCE

    def look(self, rank: Rank, now: float) -> None:
        """With every beat, while no island is lost."""
        n, seconds, behind = self._signs.behind(now)
        behind = [m for m in behind if m in rank.record.contributors(n)]  # the others are not asked
        if n != self._waits:
            usual = max(self._signs.rounds, default=0.0)
            self._waits, self._next = n, max(PATIENCE, 2 * usual)
        for member in behind:
            if seconds > self._signs.patience_with(member):
                self._signs.say(["stands", n, seconds], [self._signs.notes[member]])
        if not behind or seconds < self._next:
            return
        self._next *= 2
        if rank.rank == 0:
            limit = min(map(self._signs.patience_with, behind))
            log.warning(
                "waiting for %s for %.0f s: it is alive, but has not come to the next exchange "
                "(message %d). It may take %.0f s (ISLAND_STALL, else ISLAND_TIMEOUT), then it "
                "ends, and the others go on" + see("island-stands"),
                ", ".join(self._label(m.slot) for m in behind),
                seconds,
                n,
                limit,
            )

    def told(self, rank: Rank, n: int, seconds: float, by: Member) -> Record | None:
        """A peer has waited so long for this rank's message n. The members that go on without this
        island; None where it does not stand.
        """
        if rank.state != "running" or rank.next > n:
            return None
        log.error(
            "%s has waited %.0f s for message %d of this island, which stands: it evaluates, saves "
            "or hangs alone for longer than ISLAND_STALL, else ISLAND_TIMEOUT%s",
            self._label(by.slot),
            seconds,
            n,
            see("island-stands"),
        )
        record = rank.record
        return replace(record, members=tuple(m for m in record.members if m != rank.me))
