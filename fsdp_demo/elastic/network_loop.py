"""The loop of one member in the network thread: turns, jobs of other threads, and their waits; and
how islands that are all told to end stop together.

What is done in a turn is the driver's (`driver.py`). The parts of the driver get the loop for what
they share: the membership machine as it is now, the connections, and the thread.

An island that is told alone leaves the others, which train on (`message_io.EarlyPieces`). Islands
of which all are told *stop together*, between the same messages. Each of their ranks says which is
the first message that it never sends. A message that some member never sends is *abandoned*: nobody
gets its answer, and an island that has sent it saves it as unsent.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..errors import PeerLost
from ..membership.machine import Rank
from ..membership.protocol_types import Member
from ..peers.poller import Poller
from .failure_detector import BEAT, SOON, FailureDetector
from .message_state import RoundMessage
from .notes import BeatWanted, Stops

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

ABANDONED = "all islands are told to end, and not all send this message: it is saved as unsent"
"""The error of a message whose answer does not come."""


class NetworkLoop:
    """What runs in the network thread (`peers/poller.py`) as long as a rank is a member.

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
        """Ask the members how far they are, and wait for what follows from it, or until this rank
        has ended; whether it is reached. In another thread.
        """
        self.do(lambda: self.detector.say(BeatWanted(), self.detector.notes.values()))
        self._wait(lambda: reached() or self._closed or self._left, seconds)
        return reached()

    def wait_stable(self, below: int, seconds: float) -> bool:
        """Wait until all members have delivered the messages below that number."""
        reached = self.wait(lambda: self.stable >= below, seconds)
        return reached or self._left or self._failed == CLOSED

    def _let_land(self) -> None:
        """Wait a moment until the others have what was delivered here. The note of the end takes a
        connection of its own: those that hear it before a message settle without this rank, which
        has it.
        """
        had = self.machine.landed
        self.wait(lambda: not self.machine.unread(had), LAST_NOTE)

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        with suppress(RuntimeError):  # the connections were closed
            self._poller.wait_until(reached, seconds)

    # ---- in the network thread -----------------------------------------------------------------

    def begin(self) -> None:
        """From now on each look at the sockets is followed by a turn."""
        self._poller.between = self._turn
        self._poller.pause, self._poller.failed = self._pause, self._has_failed

    def turn(self, now: float, stopped: bool) -> None:
        """Take what has come; `stopped`: the process stood still before."""
        raise NotImplementedError

    def beat(self, now: float) -> None:
        """Say that this rank lives, every `BEAT` seconds."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """End the membership of this rank: all that waits for a message is told the reason."""
        raise NotImplementedError

    def expel(self, why: str) -> None:
        """End this island: what it holds is not what the others hold."""
        raise NotImplementedError

    def _pause(self) -> float:
        """Seconds until the next turn: few while something is put off for a moment, else those of
        heartbeats."""
        if self._jobs:
            return 0.0
        return SOON / 2 if self._soon or self.detector.soon else BEAT / 2

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
        """Whether ZeroMQ has all queued notes. Closing a connection drops those that are still
        queued here.
        """
        return not any(wire.waiting and not wire.gone for wire in self.detector.wires)


class Stopping:
    """What one rank and its peers say about their end. Runs in the network thread, but for
    `stop_with_all`; the attributes are read from any thread.

    Attributes:
        wish: asked whether this rank was told to end.
        together: all members are told to end. gave_up: a message of this rank is abandoned.
        last: the newest message of this rank.
    """

    def __init__(self, loop: NetworkLoop):
        self._loop = loop
        self.wish: Callable[[], bool] = lambda: False
        self.together = self.gave_up = False
        self.last: RoundMessage | None = None
        self._told: set[Member] = set()
        self._ends: dict[Member, int] = {}
        self._applied_at: dict[Member, int] = {}
        self._said: Stops | None = None

    def stop_with_all(self, applied_at: int, seconds: float) -> int | None:
        """The wait of a rank that launches nothing more (`PeerGroup.stop_with_all`), in the thread
        that exchanges.
        """
        self._loop.do(lambda: self.end(applied_at))
        if not self._loop.wait(self._settled, seconds):
            return None
        return max(self._applied_at.values(), default=-1)

    def look(self, again: bool = False) -> None:
        """Tell the others that this rank was told to end, and where it ends: once for each change,
        or `again`.
        """
        rank, detector = self._loop.machine, self._loop.detector
        if self.wish():
            self._told.add(rank.me)
        if rank.me not in self._told or rank.state in ("left", "expelled"):
            return
        self.together |= self._told >= set(rank.record.members) - rank.lost
        end, applied_at = (at.get(rank.me, -1) for at in (self._ends, self._applied_at))
        note = Stops(end, self.together, applied_at)
        if note != self._said or again:
            self._said = note
            detector.say(note, [*detector.notes.values(), *detector.siblings.values()])

    def hear(self, note: Stops, member: Member | None) -> None:
        """Take the note of a peer that is told to end; of another rank of this island where
        `member` is None. A peer that says that all are told to end has heard so from each.
        """
        me = self._loop.machine.me
        if member is None:
            self._told.add(me)
        else:
            self._told.add(member)
            self.together |= note.together and me in self._told
            if note.end >= 0:
                self._ends.setdefault(member, note.end)
            if note.applied_at >= 0:
                self._applied_at[member] = note.applied_at

    def end(self, applied_at: int = -1) -> None:
        """Note that this rank sends no further message, since all islands are told to end: another
        rank of this island may have heard so first. `applied_at` is -1 within a step.
        """
        rank = self._loop.machine
        self._told.add(rank.me)
        self.together = True
        self._ends.setdefault(rank.me, rank.next)
        if applied_at >= 0:
            self._applied_at[rank.me] = applied_at
        self.look()

    def give_up_last(self) -> None:
        """Wait no longer for the last message, where it is abandoned and not delivered."""
        message = self.last
        if message is not None and not self.gave_up and self.abandoned(message.n):
            if any(e.n == message.n and not e.delivered for e in self._loop.machine.open):
                self.give_up(message)

    def give_up(self, message: RoundMessage) -> None:
        """Wait no longer for the answer to a message that is abandoned."""
        self.gave_up = True
        self.end()
        message.tasks.put(PeerLost(ABANDONED))

    def abandoned(self, n: int) -> bool:
        """Whether some member never sends message n, or this rank has said so."""
        return self.together and any(n >= end for end in self._ended())

    def departed(self, member: Member) -> bool:
        """Whether a peer may go without a change of members: it sends nothing more, and this rank
        has what all have sent.
        """
        has_all = self._loop.machine.landed >= self._below
        return self.together and member in self._ends and has_all

    def _settled(self) -> bool:
        """Whether all members have said where they end, and have what all have sent."""
        rank = self._loop.machine
        known = set(rank.record.members) - rank.lost <= self._applied_at.keys()
        return known and rank.landed >= self._below and not rank.unread(self._below)

    @property
    def _below(self) -> int:
        return min(self._ended(), default=-1)

    def _ended(self) -> list[int]:
        """The first message that each ending member will not send; of a newcomer that has not begun
        its base at least, as it is asked for none before.
        """
        record = self._loop.machine.record
        base = dict(zip(record.members, record.base, strict=True))
        return [max(end, base.get(m, 0)) for m, end in self._ends.items()]
