"""Says when the ranks of one island have not sent equally many messages.

A message is delivered when all ranks of the island hold theirs (docs/membership.md, K3). One that a
rank sends and another does not would be waited for in silence, since the other islands are well.
"""

from __future__ import annotations

import logging

from .membership import Rank

log = logging.getLogger("fsdp_demo")

PATIENCE = 60.0
"""Seconds after which it is said. A rank may compile or save meanwhile: training goes on."""


class SiblingWatch:
    """Looks at the messages that this rank holds and others of its island do not."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._said = -1

    def look(self, rank: Rank, now: float) -> None:
        """With every beat; a message is told once."""
        alone = rank.held_alone
        self._since = {n: self._since.get(n, now) for n in alone}
        for n, others in alone.items():
            if now - self._since[n] > PATIENCE and n > self._said:
                self._said = n
                log.warning(
                    "message %d has been complete on rank %d of this island for %.0f s, and is not "
                    "on rank %s: its part comes late, or it has taken another path through the "
                    "script and sends fewer messages",
                    n,
                    rank.rank,
                    now - self._since[n],
                    ", ".join(map(str, others)),
                )
