"""What an island says of itself in the store while it runs, and what it hears of the others: that
it lives, and after which step it stops.

All of it happens in the thread of the attempt (`attempts.Pulse`), never on the path of training.
Keys, below those of the meeting:

    stop/<island>    the step after which that island stops
    stops            how often one was told, so that looking is one small question
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from ..errors import see
from . import attempts
from .change import record_key
from .store_client import Asker
from .topology import Topology

log = logging.getLogger("fsdp_demo")

ASK = 10.0
"""Seconds between two looks whether the others have begun anew, while some of them are missing."""

SLEPT = 5.0
"""Seconds between two turns of the thread after which this process was stopped for a while."""


class Presence:
    """One rank's word to the other islands, and theirs to it. Does nothing for a single replica and
    in a mesh.

    Make it when the islands have met (`Topology.join`); before that it has keys of its own, and the
    others must do the same. Every call returns within 5 seconds (and what it is given); a store
    that does not answer is a warning in the log, once.

    Attributes:
        stopping: other islands that were heard to stop -> the step after which they do. Looked up
            once a second.
        on_stop: called once, in the thread, when another island is first heard to stop.

    Example:
        >>> from fsdp_demo import Topology
        >>> from fsdp_demo.comm.presence import Presence
        >>> presence = Presence(Topology.from_env({"ISLAND_COUNT": "1"}))
        >>> presence.start(); presence.tell_stop(7); presence.wait_for_stops(1.0)
        True
    """

    def __init__(self, topology: Topology, on_stop: Callable[[], None] | None = None):
        self._topology, self.on_stop = topology, on_stop
        self.stopping: dict[int, int] = {}
        self._pulse: attempts.Pulse | None = None
        self._keys, self._seen, self._ended, self._warned = "", 0, False, False
        self._turn = self._asked = time.monotonic()

    def start(self) -> None:
        """Begin to listen.

        Raises:
            ValueError, PeerLost: this island has not met the others, and cannot
                (`Topology.prefix`).
        """
        if self._topology.kind != "islands" or self._pulse is not None:
            return
        self._pulse = attempts.join(self._topology)
        self._keys = self._topology.meeting().removeprefix(self._pulse.prefix).lstrip("/")
        # else the peer group says it, and nothing is asked of the store
        if not self._topology.elastic:
            self._pulse.every(self._look)

    def fence(
        self,
        missing: Callable[[], bool],
        epoch: Callable[[], int],
        begun_anew: Callable[[str], None],
    ) -> None:
        """Where islands come and go: look whether islands that could not reach this one have ended
        the attempt, and so begin another; and whether the store still knows who the members are.

        Asked while some are missing, and after this process was stopped: who is cut off from all
        others hears of it nowhere else. With all islands there nothing is asked, since nobody is
        left who could begin anew.

        Args:
            missing: whether not all islands take part. epoch: of the newest record that this rank
                knows. begun_anew: called in the thread, with what to say.
        """

        def look(at: Asker) -> None:
            now, known = time.monotonic(), epoch()
            slept, self._turn = now - self._turn > SLEPT, now
            if self._ended or not (slept or (now - self._asked >= ASK and missing())):
                return
            self._asked = now
            if by := at.peek("ended"):
                begun_anew(
                    f"island {by} found none of this attempt's islands, and has begun another one"
                )
            elif not self._warned and not at.under(self._keys).peek(record_key(known)):
                self._warned = True
                log.warning(
                    "the store at %s lacks record %d of this run's members: it was started from an "
                    "older copy of its file, and an island that is lost cannot come back. Start it "
                    "with the newest file, or stop all islands and start them from their "
                    "checkpoints under a new ISLAND_RUN%s",
                    self._topology.endpoint,
                    known,
                    see("store-made-anew"),
                )

        self.start()
        if self._pulse is not None:
            self._pulse.every(look)

    def tell_stop(self, step: int) -> None:
        """Tell the others that this island stops after `step`. Not for a signal handler: it waits
        for the store.
        """
        island = self._topology.island

        def tell(at: Asker) -> None:
            here = at.under(self._keys)
            here.set(f"stop/{island}", str(step))
            here.add("stops", 1)

        self._ask(tell)

    def wait_for_stops(self, seconds: float) -> bool:
        """Wait until all other islands have told when they stop; False if they have not within so
        long, or the store does not answer.
        """
        others, end = self._topology.islands - 1, time.monotonic() + seconds
        while self._pulse is not None and len(self.stopping) < others:
            left = end - time.monotonic()
            if left <= 0 or not self._ask(self._look, left):
                return False
            time.sleep(min(0.1, max(end - time.monotonic(), 0.0)))
        return True

    def end(self, reason: Literal["finished", "left"]) -> None:
        """Mark the attempt: "finished", the run has come to its end and cannot be started again
        under its id; "left", this island ends before that, and whoever starts next opens a new
        attempt."""
        island, self._ended = self._topology.island, True
        self._ask(
            lambda at: at.compare_set(
                "finished" if reason == "finished" else "ended", "", str(island)
            )
        )

    def close(self) -> None:
        """Listen no more. The island goes on living until its process ends."""
        if self._pulse is not None:
            self._pulse.no_more(self._look)

    def _ask(self, job: Callable[[Asker], object], seconds: float = float("inf")) -> bool:
        self.start()
        return self._pulse is None or self._pulse.ask(job, min(seconds, self._pulse.deadline))

    def _look(self, at: Asker) -> None:
        here = at.under(self._keys)
        told = here.add("stops", 0)
        if told == self._seen:
            return
        first = not self.stopping
        for island in range(self._topology.islands):
            if (
                island != self._topology.island
                and island not in self.stopping
                and (text := here.peek(f"stop/{island}"))
            ):
                self.stopping[island] = int(text)
        self._seen = told
        if first and self.stopping and self.on_stop is not None:
            self.on_stop()
