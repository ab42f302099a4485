"""Backup islands (arXiv 2102.06280): an island that is late for an exchange passes, so that the
others need not wait for it.

A pass is a contribution of zeros without weight (`header.PASSED`), so nothing changes in the
membership protocol: each member still sends one message under each number. The exchange thread
sends it while training goes on. When training comes to that exchange it sends nothing, and what it
has trained goes with the next one.

All ranks of an island pass, or none. Its first rank decides, under a lock that its training takes
when it comes to the exchange. It tells the other ranks, whose training asks it, too, before it
sends anything. `tests/membership/test_late_rounds.py` visits every order of these events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..membership.protocol_types import Member
from .network_loop import NetworkLoop
from .notes import Passes, Waits


class LateRounds:
    """The exchanges that this island may pass, on one rank.

    Args:
        backup: most islands that an exchange goes on without. most: exchanges in a row that one
            island may pass.

    Attributes:
        loop: of this rank, once it is a member.
        step: of the exchange that may be passed now; -1: none may.
        passed: the step of an exchange that was passed, until training comes to it; -1: none was.
    """

    loop: NetworkLoop

    def __init__(self, backup: int, most: int):
        self._backup, self._most, self._in_a_row = backup, most, 0
        self._lock, self._send = threading.Lock(), lambda: None
        self.step = self.passed = self._told = self._last = self._seen = -1
        self._waits: dict[Member, Waits] = {}

    # ---- in the thread that trains -------------------------------------------------------------

    def open(self, step: int, send: Callable[[], None]) -> None:
        """From now on the exchange of `step`, the next one, may be passed; `send` does it, once."""
        with self._lock:
            self.step, self._last, self._send = step, step, send
        if self._told == step:  # the first rank is ahead of this one
            self.take(step)

    def close(self) -> int:
        """On the first rank: training has come to the exchange, or ends. `passed`, from now on."""
        with self._lock:
            if self.step >= 0:  # this island contributes
                self._in_a_row = 0
            self.step = -1
            return self.passed

    # ---- in the network thread -----------------------------------------------------------------

    def launched(self, n: int, step: int) -> None:
        """Tell the others that this island contributes message n to the exchange of `step`."""
        if self.loop.machine.rank == 0:
            self.loop.detector.send(Waits(n, step), self.loop.detector.notes.values())

    def hear(self, note: Waits, member: Member) -> None:
        """Note that a peer contributes."""
        self._waits[member] = note

    def look(self, busy: bool) -> None:
        """On the first rank: pass, if enough islands have come to the next message, and had at the
        last beat, so that islands as fast as each other do not pass. busy: this one is needed.
        """
        rank, n = self.loop.machine, self.loop.machine.next
        if busy or rank.rank or rank.state != "running" or not rank.begun:
            return
        others = set(rank.record.contributors(n)) - {rank.me}
        steps = [w.step for m, w in self._waits.items() if m in others and w.n == n]
        if len(steps) < max(1 + len(others) - self._backup, 1) or len(set(steps)) > 1:
            return
        if self._seen == n and self.decide(steps[0]):
            self.loop.detector.send(Passes(steps[0]), self.loop.detector.siblings.values())
        self._seen = n

    def decide(self, step: int) -> bool:
        """On the first rank: pass, unless training has come, or too many were passed in a row."""
        with self._lock:
            if self.step != step or self._in_a_row >= self._most:
                return False
            self._in_a_row += 1
            self._pass()
        return True

    def take(self, step: int) -> None:
        """Pass, as the first rank has decided; from any thread, and more than once."""
        with self._lock:
            if self.step == step:
                self._pass()
            elif step > self._last:  # this rank has not applied what comes before
                self._told = step

    def _pass(self) -> None:
        self.step, self.passed = -1, self.step
        self._send()
