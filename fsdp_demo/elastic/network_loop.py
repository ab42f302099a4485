"""The loop of one member in the network thread: turns, jobs of other threads, and their waits.

It knows no protocol: a turn is the driver's (`driver.py`). The parts of the driver get the loop for
what they share: the membership machine as it is now, the connections, and the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..membership.machine import Rank
from ..peers.poller import Poller
from .failure_detector import BEAT, SOON, FailureDetector

log = logging.getLogger("fsdp_demo")

LAST_WORD = 1.0
"""Seconds that the last message of this rank has to arrive, and its last word to be handed over."""


class NetworkLoop:
    """What runs in the network thread (`peers/poller.py`) as long as a rank is a member.

    Attributes:
        machine: the membership of this rank as it is now; changed in the network thread only.
        detector: the connections to the peers, and who is heard on them.
        labels: how errors and logs name an island, by slot.
    """

    def __init__(
        self,
        poller: Poller,
        machine: Rank,
        detector: FailureDetector,
        labels: Callable[[int], str],
    ):
        self._poller, self.machine, self.detector, self.labels = poller, machine, detector, labels
        self._jobs: deque[Callable[[], None]] = deque()
        self._soon: deque[tuple[float, Callable[[], None]]] = deque()
        self._closed = self._left = False
        self._ended = threading.Event()

    def do(self, job: Callable[[], None]) -> None:
        """Run `job` in the network thread. From any thread."""
        self._jobs.append(job)
        self._poller.tell()

    def later(self, seconds: float, job: Callable[[], None]) -> None:
        """Run `job` some seconds from now. In the network thread."""
        self._soon.append((time.monotonic() + seconds, job))

    def wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Ask the members how far they are, and wait for what follows from it, or until this rank
        has ended; whether it is reached. In another thread.
        """
        self.do(lambda: self.detector.say(["landed?"], self.detector.notes.values()))
        with suppress(RuntimeError):  # the connections were closed
            self._poller.wait_until(lambda: reached() or self._closed or self._left, seconds)
        return reached()

    # ---- in the network thread -----------------------------------------------------------------

    def turn(self) -> None:
        """Take what has come, and look at the clock."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """End the membership of this rank: all that waits for a message is told the reason."""
        raise NotImplementedError

    def expel(self, why: str) -> None:
        """End this island: what it holds is not what the others hold."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while not self._closed:
                if not self._jobs:
                    # what is put off for a moment is looked at often, else heartbeats set the pace
                    soon = self._soon or self.detector.soon
                    self._poller.move(SOON / 2 if soon else BEAT / 2)
                self.turn()
                self._poller.tell()  # other threads that wait look again
            self._hand_over()
        except BaseException as error:
            why, regular = f"the network thread has failed: {error!r:.200}", self._closed
            if not regular:
                log.exception("membership: the thread has failed")
            self.fail(why)
            self._poller.close(0)  # so that the others hear of it at once
            if not regular:  # training may be far from its next message, or stand in another wait
                self.expel(why)
        finally:
            self._ended.set()

    def _do_jobs(self) -> None:
        while self._jobs and not self._closed:
            self._jobs.popleft()()

    def _do_what_was_put_off(self, now: float) -> None:
        while self._soon and self._soon[0][0] <= now:
            self._soon.popleft()[1]()

    def _hand_over(self) -> None:
        """Let what was said last leave: closing the connections drops what waits here."""
        end = time.monotonic() + LAST_WORD
        while any(wire.waiting and not wire.gone for wire in self.detector.wires):
            if (left := end - time.monotonic()) <= 0:
                return
            self._poller.move(left)
