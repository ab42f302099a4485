"""What an island says of its attempt in the store while it runs, and what it hears there.

All of it happens in the thread of the attempt (`attempts.Pulse`), never on the path of training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from ..elastic.store_session import record_key
from ..errors import see
from ..store.client import Store
from . import attempts
from .topology import Topology

log = logging.getLogger("fsdp_demo")

ASK = 10.0
"""Seconds between two looks whether the others have begun anew, while some of them are missing."""

SLEPT = 5.0
"""Seconds between two turns of the thread after which this process was stopped for a while."""


OLDER = (
    "the store at %s lacks record %d of this run's members: it was started from an older copy of "
    "its file, and an island that is lost cannot come back. Start it with the newest file, or stop "
    "all islands and start them from their checkpoints under a new ISLAND_RUN%s"
)


class Presence:
    """What one rank says of the attempt, and what it hears. Does nothing for a single replica and
    in a mesh.

    Make it when the islands have met (`Topology.join`); before that it has keys of its own, and the
    others must do the same. Every call returns within 5 seconds (and what it is given); a store
    that does not answer is a warning in the log, once.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._pulse: attempts.Pulse | None = None
        self._look: attempts.Job | None = None
        self._ended, self._warned = False, False
        self._turn = self._asked = time.monotonic()

    def start(self) -> None:
        """Begin to listen. Raises ValueError, PeerLost: this island has not met the others, and
        cannot (`Topology.prefix`).
        """
        if not self._topology.elastic or self._pulse is not None:
            return
        self._pulse = attempts.join(self._topology)

    def fence(
        self,
        missing: Callable[[], bool],
        epoch: Callable[[], int],
        begun_anew: Callable[[str], None],
    ) -> None:
        """From now on ask the store whether islands that could not reach this one have begun
        another attempt, and whether it still has the newest record of the members.

        Asked while some are missing, and after this process was stopped: who is cut off from all
        others hears of it nowhere else. With all islands there nothing is asked, since nobody is
        left who could begin anew.

        Args:
            missing: whether not all islands take part. epoch: of the newest record that this rank
                knows. begun_anew: called in the thread, with what to say.
        """

        def look(at: Store) -> None:
            now, known = time.monotonic(), epoch()
            slept, self._turn = now - self._turn > SLEPT, now
            if self._ended or not (slept or (now - self._asked >= ASK and missing())):
                return
            self._asked = now
            if by := at.get("ended"):
                found = f"island {by} found none of this attempt's islands"
                begun_anew(f"{found}, and has begun another one")
            elif not self._warned and not at.under(keys).get(record_key(known)):
                self._warned = True
                log.warning(OLDER, self._topology.endpoint, known, see("store-made-anew"))

        self.start()
        if self._pulse is not None:
            keys = self._topology.meeting().removeprefix(self._pulse.prefix).lstrip("/")
            self._look = look
            self._pulse.every(look)

    def end(self, reason: Literal["finished", "left"]) -> None:
        """Mark the attempt: "finished", the run has come to its end and cannot be started again
        under its id; "left", this island ends before that, and whoever starts next opens a new
        attempt."""
        island, self._ended = str(self._topology.island), True
        key = "finished" if reason == "finished" else "ended"
        self.start()
        if self._pulse is not None:
            self._pulse.ask(lambda at: at.compare_set(key, "", island), self._pulse.deadline)

    def close(self) -> None:
        """Listen no more. The island goes on living until its process ends."""
        if self._pulse is not None and self._look is not None:
            self._pulse.no_more(self._look)
