"""What ranks that are told to end tell each other: when all islands are, they stop between the same
messages, and none of them sends anything ahead of its time.

An island that is told alone leaves the others, who train on (`leaving.py`). Islands of which all
are told *stop together*. Each of their ranks says which is the first message that it never sends. A
message that some member never sends is *abandoned*: nobody gets its answer, and who has sent it
saves it as unsent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..membership.machine import Rank
from ..membership.protocol_types import Member, Piece
from .failure_detector import SOON, FailureDetector
from .message_io import SHORT, Traffic
from .message_state import EarlyMessage


class Stopping:
    """Of one rank. All of it runs in the network thread, but for what is read.

    Args:
        signs: the connections. rank: the membership machine as it is now. changed: told when
            something has moved.

    Attributes:
        wish: whether this rank was told to end.
        together: all members are told to end.
    """

    def __init__(
        self, signs: FailureDetector, rank: Callable[[], Rank], changed: threading.Condition
    ):
        self._failure_detector, self._rank, self._changed = signs, rank, changed
        self.wish: Callable[[], bool] = lambda: False
        self.together = False
        self._told: set[Member] = set()
        self._ends: dict[Member, int] = {}
        self._applied_at: dict[Member, int] = {}
        self._said: list[Any] = []

    def look(self, again: bool = False) -> None:
        """Tell the others, where it is new, or once more."""
        rank = self._rank()
        if self.wish():
            self._told.add(rank.me)
        if rank.me not in self._told or rank.state in ("left", "expelled"):
            return
        self.together |= self._told >= set(rank.record.members) - rank.lost
        word = [
            "stops",
            self._ends.get(rank.me, -1),
            self.together,
            self._applied_at.get(rank.me, -1),
        ]
        if word != self._said or again:
            self._said = word
            self._failure_detector.say(
                word,
                [*self._failure_detector.notes.values(), *self._failure_detector.siblings.values()],
            )
            self._tell()

    def hear(self, word: list[Any], member: Member | None) -> None:
        """A peer is told to end; or, where `member` is None, another rank of this island. Who says
        that all are has heard so of each."""
        ends, together, applied_at = int(word[1]), bool(word[2]), int(word[3])
        if member is None:
            self._told.add(self._rank().me)
        else:
            self._told.add(member)
            self.together |= together and self._rank().me in self._told
            if ends >= 0:
                self._ends.setdefault(member, ends)
            if applied_at >= 0:
                self._applied_at[member] = applied_at
        self._tell()

    def end(self, applied_at: int = -1) -> None:
        """This rank sends no message more, since all islands are told to end. Another rank of this
        island may have heard that before this one has.

        Args:
            applied_at: see `Driver.stop_with_all`; -1 while the rank stands within a step.
        """
        rank = self._rank()
        self._told.add(rank.me)
        self.together = True
        self._ends.setdefault(rank.me, rank.next)
        if applied_at >= 0:
            self._applied_at[rank.me] = applied_at
        self.look()

    def abandoned(self, n: int) -> bool:
        """Whether some member never sends message n, or this rank has said so."""
        return self.together and any(n >= end for end in self._ended())

    def departed(self, member: Member) -> bool:
        """Whether a peer may go without a change of members: it sends nothing more, and this rank
        has what all have sent.
        """
        return self.together and member in self._ends and self._rank().landed >= self._below

    def settled(self) -> bool:
        """Whether all members have said where they end, and have what all have sent."""
        rank = self._rank()
        known = set(rank.record.members) - rank.lost <= self._applied_at.keys()
        return known and rank.landed >= self._below and not rank.unread(self._below)

    @property
    def applied_at(self) -> int:
        """The largest `applied_at` of all members, -1 if none has said one."""
        return max(self._applied_at.values(), default=-1)

    @property
    def _below(self) -> int:
        return min(self._ended(), default=-1)

    def _ended(self) -> list[int]:
        """The first message that each of those who end will not send. Who has joined and not begun
        is asked for none before its base.
        """
        record = self._rank().record
        base = dict(zip(record.members, record.base, strict=True))
        return [max(end, base.get(m, 0)) for m, end in self._ends.items()]

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


# What an island that leaves sends ahead of its time (early-part), on one rank: the offer, and who
# keeps it.


class EarlyPieces:
    """Both sides. All of it runs in the network thread, but for `wait`.

    Args:
        rank: the membership machine as it is now. later: does a job some seconds from now. changed:
            told when something has moved.
        over: whether nobody answers any more.
    """

    def __init__(
        self,
        traffic: Traffic,
        signs: FailureDetector,
        rank: Callable[[], Rank],
        later: Callable[[float, Callable[[], None]], None],
        changed: threading.Condition,
        over: Callable[[], bool],
    ):
        self._traffic = traffic
        self._failure_detector = signs
        self._rank = rank
        self._later = later
        self._changed = changed
        self._over = over
        self._going: EarlyMessage | None = None
        self._offered, self._kept_by, self._nobody = set[Member](), set[Member](), False

    def begin(self, early: EarlyMessage) -> None:
        """This island leaves, and offers this."""
        self._going = early
        self.offer()

    def offer(self) -> None:
        """Again in each view: what was under way in the one before has not come. A long one goes to
        one other island only, which forwards it in the change."""
        early, rank = self._going, self._rank()
        if early is None or rank.state != "running":
            return
        to = [m for m in rank.record.contributors(early.n) if m != rank.me]
        assert early.data is not None
        to = to if early.data.size <= SHORT else to[:1]
        with self._changed:
            self._offered, self._nobody = set(to), not to
            self._changed.notify_all()
        self._failure_detector.say(
            ["early", early.n, early.kind],
            [self._failure_detector.notes[m] for m in to if m in self._failure_detector.notes],
        )
        for m in to:
            self._traffic.send_early(early, Piece("early", rank.me), m)

    def wait(self, seconds: float) -> bool:
        """Whether others have it within so many seconds. In the thread that trains."""
        end = time.monotonic() + seconds
        with self._changed:
            while (
                not (self._is_kept() or self._nobody or self._over())
                and (left := end - time.monotonic()) > 0
            ):
                self._changed.wait(min(left, 0.5))
            return self._is_kept()

    def _is_kept(self) -> bool:
        return bool(self._offered) and self._offered <= self._kept_by

    def hear(self, word: list[Any], member: Member) -> None:
        """A peer offers one. Raises ValueError for what cannot be."""
        n, kind, rank = int(word[1]), word[2], self._rank()
        if rank.state == "frozen":  # the sender may have adopted the next view already
            self._later(SOON, lambda: self.hear(word, member))
            return
        if kind not in ("gather", "mixed") or n > rank.landed + 2 * rank.window:
            raise ValueError(f"message {n} of kind {kind!r:.20}")
        self._traffic.expect_early(member, n, kind, Piece("early", member))

    def hear_kept(self, n: int, member: Member) -> None:
        """A peer keeps this island's."""
        with self._changed:
            if self._going is not None and n == self._going.n:
                self._kept_by.add(member)
            self._changed.notify_all()
