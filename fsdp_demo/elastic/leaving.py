"""Ends of a rank among its peers: islands that are all told to end stop together, and one that
leaves sends its part of the coming message ahead of its time.

An island that is told alone leaves the others, which train on. Islands of which all are told *stop
together*, between the same messages. Each of their ranks says which is the first message that it
never sends. A message that some member never sends is *abandoned*: nobody gets its answer, and an
island that has sent it saves it as unsent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import PeerLost
from ..membership.protocol_types import Member, Piece
from .failure_detector import SOON
from .message_io import SHORT, Traffic
from .message_state import EarlyMessage, RoundMessage
from .network_loop import NetworkLoop

ABANDONED = "all islands are told to end, and not all send this message: it is saved as unsent"
"""The error of a message whose answer does not come."""


class Stopping:
    """What one rank and its peers say about their end. Runs in the network thread, but for
    `stop_with_all`; the attributes are read from any thread.

    Attributes:
        wish: asked whether this rank was told to end.
        together: all members are told to end. gave_up: a message of this rank is abandoned.
    """

    def __init__(self, loop: NetworkLoop):
        self._loop = loop
        self.wish: Callable[[], bool] = lambda: False
        self.together = self.gave_up = False
        self._told: set[Member] = set()
        self._ends: dict[Member, int] = {}
        self._applied_at: dict[Member, int] = {}
        self._said: list[Any] = []

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
        word = [
            "stops",
            self._ends.get(rank.me, -1),
            self.together,
            self._applied_at.get(rank.me, -1),
        ]
        if word != self._said or again:
            self._said = word
            detector.say(word, [*detector.notes.values(), *detector.siblings.values()])

    def hear(self, word: list[Any], member: Member | None) -> None:
        """The word of a peer that is told to end; of another rank of this island where `member` is
        None. A peer that says that all are told to end has heard so from each.
        """
        me = self._loop.machine.me
        ends, together, applied_at = int(word[1]), bool(word[2]), int(word[3])
        if member is None:
            self._told.add(me)
        else:
            self._told.add(member)
            self.together |= together and me in self._told
            if ends >= 0:
                self._ends.setdefault(member, ends)
            if applied_at >= 0:
                self._applied_at[member] = applied_at

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


class EarlyPieces:
    """The contribution to the coming message that an island sends before it leaves (early-part):
    its offer, and the answers of the peers that keep it. Runs in the network thread, but for
    `send`.
    """

    def __init__(self, loop: NetworkLoop, traffic: Traffic):
        self._loop, self._traffic = loop, traffic
        self._going: EarlyMessage | None = None
        self._offered, self._kept_by, self._nobody = set[Member](), set[Member](), False

    def send(self, early: EarlyMessage, seconds: float) -> bool:
        """Offer an early message, and wait; whether the peers keep it within so many seconds. In
        the thread that exchanges.
        """
        self._loop.do(lambda: self.begin(early))
        self._loop.wait(lambda: self._is_kept() or self._nobody, seconds)
        return self._is_kept()

    def begin(self, early: EarlyMessage) -> None:
        """Offer an early message from now on."""
        self._going = early
        self.offer()

    def offer(self) -> None:
        """Send the early message in this view, since nothing of the view before arrives any more. A
        long one goes to one island only, which forwards it in the change of members.
        """
        early, rank, notes = self._going, self._loop.machine, self._loop.detector.notes
        if early is None or rank.state != "running":
            return
        to = [m for m in rank.record.contributors(early.n) if m != rank.me]
        assert early.data is not None
        to = to if early.data.size <= SHORT else to[:1]
        self._offered, self._nobody = set(to), not to
        word = ["early", early.n, early.kind]
        self._loop.detector.say(word, [notes[m] for m in to if m in notes])
        for m in to:
            self._traffic.send_early(early, Piece("early", rank.me), m)

    def _is_kept(self) -> bool:
        return bool(self._offered) and self._offered <= self._kept_by

    def hear(self, word: list[Any], member: Member) -> None:
        """Make room for what a peer offers. Raises ValueError for an offer that cannot be."""
        n, kind, rank = int(word[1]), word[2], self._loop.machine
        if rank.state == "frozen":  # the sender may have adopted the next view already
            self._loop.later(SOON, lambda: self.hear(word, member))
            return
        if kind not in ("gather", "mixed") or n > rank.landed + 2 * rank.window:
            raise ValueError(f"message {n} of kind {kind!r:.20}")
        self._traffic.expect_early(member, n, kind, Piece("early", member))

    def hear_kept(self, n: int, member: Member) -> None:
        """Note that a peer keeps this island's early message."""
        if self._going is not None and n == self._going.n:
            self._kept_by.add(member)
