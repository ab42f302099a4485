"""Backup islands (arXiv 2102.06280): an island that is late for an exchange passes, so that the
others need not wait for it.

A pass is a contribution like any other, so nothing changes in the membership protocol: each member
still sends one message under each number. It holds zeros and has no weight (`header.PASSED`). The
exchange thread sends it, while training goes on; when training comes to that exchange it sends
nothing, and what it has trained goes with the next one.

All ranks of an island pass, or none. The first peer group's rank decides (`LateRounds`), under the
lock that its training thread takes when it comes to the exchange (`Gate`). It tells the other
ranks, whose training asks it, too, before it sends anything. `tests/membership/test_late_rounds.py`
visits every order of these events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..membership.protocol_types import Member
from .network_loop import NetworkLoop
from .notes import Passes, Waits


class Gate:
    """Whether this rank's island contributes to the exchange that comes next, or passes. The
    attributes are read under no lock.

    Args:
        most: exchanges in a row that an island may pass.

    Attributes:
        step: of the exchange that may be passed; -1 while none may.
        passed: the step of the exchange that was passed and that training has not come to; -1 where
            there is none.
    """

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self.step = self.passed = self._told = self._last = -1
        self._in_a_row = 0
        self._send: Callable[[], None] = lambda: None

    def open(self, step: int, send: Callable[[], None]) -> None:
        """Let the exchange of `step`, the next one, be passed: `send` sends the pass, at most once.
        In the thread that trains.
        """
        with self._lock:
            self.step = self._last = step
            self._send, told = send, self._told == step
        if told:  # the first rank is ahead of this one
            self.take(step)

    def decide(self, step: int) -> bool:
        """Pass the exchange of `step`, if training has not come to it, and not too many in a row
        were passed. On the first rank, in the network thread.
        """
        with self._lock:
            if self.step != step or self._in_a_row >= self._most:
                return False
            self._in_a_row += 1
            self._take()
        return True

    def take(self, step: int) -> None:
        """Pass the exchange of `step`, as the first rank has decided. Called again it does nothing.
        In any thread.
        """
        with self._lock:
            if self.step == step:
                self._take()
            elif step > self._last:  # this rank has not applied what comes before
                self._told = step

    def _take(self) -> None:
        self.step, self.passed = -1, self.step
        self._send()

    def close(self) -> int:
        """Training has come to the exchange, or ends: no pass from now on. The step of an exchange
        that was passed before; -1 where there is none. On the first rank.
        """
        with self._lock:
            if self.step >= 0:  # this island contributes
                self._in_a_row = 0
            self.step = -1
            return self.passed

    def reset(self) -> None:
        """Forget what comes next: training goes on elsewhere, or has applied what was passed."""
        with self._lock:
            self.step = self.passed = -1


class LateRounds:
    """Finds, on the first rank of an island, that the others wait for it. In the network thread.

    Args:
        backup: most islands that an exchange goes on without. gate: of this rank.
    """

    def __init__(self, loop: NetworkLoop, backup: int, gate: Gate):
        self._loop, self._backup, self._gate = loop, backup, gate
        self._waits: dict[Member, Waits] = {}
        self._seen = -1

    def launched(self, n: int, step: int) -> None:
        """Tell the others that this island contributes to an exchange."""
        if self._loop.machine.rank == 0:
            detector = self._loop.detector
            detector.send(Waits(n, step), detector.notes.values())

    def hear(self, note: Waits, member: Member) -> None:
        """Note that a peer contributes."""
        self._waits[member] = note

    def hear_sibling(self, note: Passes) -> None:
        """Pass, since the first rank of this island has decided so."""
        self._gate.take(note.step)

    def look(self, busy: bool) -> None:
        """Pass, if enough islands have come to the next message, and had at the last beat, so that
        islands which are equally fast do not pass each other. busy: this island is needed as it is.
        """
        rank = self._loop.machine
        if busy or rank.rank or rank.state != "running" or not rank.begun:
            return
        n, others = rank.next, set(rank.record.contributors(rank.next)) - {rank.me}
        steps = [w.step for m, w in self._waits.items() if m in others and w.n == n]
        if len(steps) < max(1 + len(others) - self._backup, 1) or len(set(steps)) > 1:
            return
        if self._seen != n:
            self._seen = n
        elif self._gate.decide(steps[0]):
            detector = self._loop.detector
            detector.send(Passes(steps[0]), detector.siblings.values())
