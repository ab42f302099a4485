"""How often the ranks of one island ask each other whether they stop.

Such a vote takes 0.3 ms, and every rank waits in it. So it is held at every exchange, and otherwise
every n steps. All ranks must count the same n: it follows from what the vote itself has brought
them, the seconds per step of the slowest rank. It comes to about one vote a second.
"""

from __future__ import annotations

import math
import time

EVERY = 1.0
"""Seconds between two votes, about. 0: every step votes."""

MOST = 100
"""Steps between two votes, at most: steps may become much slower from one to the next."""


class VotePace:
    """Counts the steps of one rank between the votes of its island. No communication.

    Every rank of the island makes one at the same step and calls `due` at the end of each step.
    After a vote each calls `agreed` with the largest `seconds` of all. Nothing here depends on the
    number of the step, so a run that resumes elsewhere counts from its first step.

    Attributes:
        steps: between two votes, as agreed.

    Example:
        >>> pace = VotePace()
        >>> pace.due(), pace.steps  # the first step votes
        (True, 1)
        >>> pace.agreed(0.25); pace.agreed(0.25); pace.steps  # it doubles at most
        4
    """

    def __init__(self) -> None:
        self._since, self._taken = math.nan, 0
        self.steps = 1

    def due(self, now: bool = False) -> bool:
        """Count a step; whether the island votes at its end. now: it does in any case, on all
        ranks.
        """
        self._taken += 1
        return now or self._taken >= self.steps

    def seconds(self) -> float:
        """Seconds per step since the last vote, on this rank; inf where there was none yet."""
        passed = (time.monotonic() - self._since) / max(self._taken, 1)
        return math.inf if math.isnan(passed) else passed

    def agreed(self, slowest: float) -> None:
        """The vote is over: `slowest` is the largest `seconds` of all ranks."""
        wanted = int(min(EVERY / max(slowest, 1e-9), MOST))
        self.steps = max(1, min(wanted, 2 * self.steps))
        self._since, self._taken = time.monotonic(), 0
