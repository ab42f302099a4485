"""The loop of one member in the network thread: turns, jobs of other threads, and their waits."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..membership.machine import Rank
from ..peers.poller import Poller
from .failure_detector import BEAT, SOON, FailureDetector
from .notes import BeatWanted

log = logging.getLogger("fsdp_demo")

CLOSED = "the connections were closed"
"""The regular end: what this rank has is what all have. After a failure nobody knows that
(seal-stable)."""

LAST_NOTE = 1.0
"""Seconds that the last message of this rank has to arrive, and its last note to be handed over."""

STOPPED = 2.0
"""Seconds between two turns after which the process itself must have been stopped: the others are
not to blame for their silence then.
"""


class NetworkLoop(ABC):
    """What runs in the network thread (`peers/poller.py`) as long as a rank is a member: the base
    class of `Driver`, which says what is done in a turn.

    It is a class of its own because the driver needs its parts (`Traffic`, `JoinServer`,
    `Stopping`), these need the loop, and imports go one way: they import this file, and the driver
    imports theirs.

    Attributes:
        machine: the membership of this rank as it is now; changed in the network thread only.
        detector: the connections to the peers, and who is heard on them.
        labels: how errors and logs name an island, by slot.
        stable: all members have delivered every message below it (seal-stable).
    """

    def __init__(
        self, poller: Poller, machine: Rank, detector: FailureDetector, labels: Callable[[int], str]
    ):
        self._poller, self.machine, self.detector, self.labels = poller, machine, detector, labels
        self._jobs: deque[Callable[[], None]] = deque()
        self._soon: deque[tuple[float, Callable[[], None]]] = deque()
        self._beat_at = self._turned = time.monotonic()
        self.stable = 0
        self._closed, self._left, self._failed = False, False, ""

    def do(self, job: Callable[[], None]) -> None:
        """Run `job` in the network thread. From any thread."""
        self._jobs.append(job)
        self._poller.tell()

    def later(self, seconds: float, job: Callable[[], None]) -> None:
        """Run `job` some seconds from now. In the network thread."""
        self._soon.append((time.monotonic() + seconds, job))

    def wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Ask the peers how far they are, and wait until `reached`, or until this rank has ended;
        returns whether it is reached. From another thread.
        """
        self.do(lambda: self.detector.send(BeatWanted(), self.detector.notes.values()))
        self._wait(lambda: reached() or self._closed or self._left, seconds)
        return reached()

    def wait_stable(self, below: int, seconds: float) -> bool:
        """Wait until all members have delivered the messages below that number."""
        reached = self.wait(lambda: self.stable >= below, seconds)
        return reached or self._left or self._failed == CLOSED

    def _let_land(self) -> None:
        """Wait at most `LAST_NOTE` seconds until the peers have delivered what this rank has. The
        note of the end has a connection of its own: a peer that reads it before this rank's last
        message would settle that message without this rank.
        """
        had = self.machine.landed
        self.wait(lambda: not self.machine.unread(had), LAST_NOTE)

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        with suppress(RuntimeError):  # the connections were closed
            self._poller.wait_until(reached, seconds)

    # ---- in the network thread -----------------------------------------------------------------

    def begin(self) -> None:
        """Let the poller call the driver's turn after each look at the sockets."""
        self._poller.between = self._turn
        self._poller.pause, self._poller.failed = self._pause, self._has_failed

    @abstractmethod
    def turn(self, now: float, stopped: bool) -> None:
        """Take what has come; `stopped`: the process stood still before."""

    @abstractmethod
    def beat(self, now: float) -> None:
        """Say that this rank lives, every `BEAT` seconds."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """End the membership of this rank: all that waits for a message is told the reason."""

    @abstractmethod
    def expel(self, why: str) -> None:
        """End this island: what it holds is not what the others hold."""

    def _pause(self) -> float:
        """Seconds until the next turn: few while something is put off for a moment, else those of
        heartbeats."""
        if self._jobs:
            return 0.0
        return SOON / 2 if self._soon or self.detector.awaits_end else BEAT / 2

    def _turn(self) -> None:
        if self._closed:
            return
        now = time.monotonic()
        stopped, self._turned = now - self._turned > STOPPED, now
        self.turn(now, stopped)
        while self._soon and self._soon[0][0] <= now:
            self._soon.popleft()[1]()
        if now - self._beat_at >= BEAT:
            self._beat_at = now
            self.beat(now)

    def _has_failed(self, error: BaseException) -> None:
        why, regular = f"the network thread has failed: {error!r:.200}", self._closed
        if not regular:
            log.error("membership: the thread has failed", exc_info=error)
        self.fail(why)
        self._poller.close(0)  # so that the others hear of it at once
        if not regular:  # training may be far from its next message, or stand in another wait
            self.expel(why)

    def _do_jobs(self) -> None:
        while self._jobs and not self._closed:
            self._jobs.popleft()()

    def _notes_handed_over(self) -> bool:
        """Whether ZeroMQ has all queued notes. Closing a connection drops the rest."""
        return not any(wire.waiting and not wire.gone for wire in self.detector.wires)
