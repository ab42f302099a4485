"""How islands that are all told to end stop together.

An island that is told alone leaves the others, which train on (`message_io.EarlyPieces`). Islands
of which all are told *stop together*, between the same messages. Each of their ranks says which is
the first message that it never sends. A message that some member never sends is *abandoned*: nobody
gets its answer, and an island that has sent it saves it as unsent.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import PeerLost
from ..membership.protocol_types import Member
from .message_state import RoundMessage
from .network_loop import NetworkLoop
from .notes import ToldToEnd

ABANDONED = "all islands are told to end, and not all send this message: it is saved as unsent"
"""The error of a message whose answer does not come."""


class Stopping:
    """Which peers are told to end, and after which message each of them sends no more. Runs in the
    network thread, but for `stop_with_all`; the attributes are read from any thread.

    Args:
        told_to_end: asked whether this rank was told to end.

    Attributes:
        together: all members are told to end. gave_up: a message of this rank is abandoned.
        last: the newest message of this rank.
    """

    def __init__(self, loop: NetworkLoop, told_to_end: Callable[[], bool]):
        self._loop, self._told_to_end = loop, told_to_end
        self.together = self.gave_up = False
        self.last: RoundMessage | None = None
        self._told: set[Member] = set()
        self._ends: dict[Member, int] = {}
        self._applied_at: dict[Member, int] = {}
        self._said: ToldToEnd | None = None

    def stop_with_all(self, applied_at: int, seconds: float, in_pairs: bool = False) -> int | None:
        """`PeerGroup.stop_with_all`, in the thread that exchanges: nothing more is launched."""
        self._loop.do(lambda: self.end(applied_at))
        over = (lambda: self._level(applied_at)) if in_pairs else self._settled
        if not self._loop.wait(over, seconds):
            return None
        most = max(self._applied_at.values(), default=-1)
        if in_pairs and most > applied_at:
            self._loop.do(self._ends.clear)  # the others say theirs again with each beat
        return most

    def _level(self, applied_at: int) -> bool:
        """Whether all stand behind one exchange, or one is further. Where messages are of pairs
        nobody knows which come to nothing: so whoever is behind trains on to the furthest.
        """
        rank, applied = self._loop.machine, self._applied_at
        here = {m for m, at in applied.items() if at == applied_at and m in self._ends}
        all_here = here >= {*rank.record.members} and not any(map(rank.owed, rank.open))
        return all_here or max(applied.values()) > applied_at

    def launches(self, message: RoundMessage) -> None:
        """Note the newest message of this rank."""
        self.last = message

    def announce(self, again: bool = False) -> None:
        """Tell peers and siblings that this rank was told to end, and the first message that it
        never sends: once for each change, or `again`.
        """
        rank, detector = self._loop.machine, self._loop.detector
        if self._told_to_end():
            self._told.add(rank.me)
        if rank.me not in self._told or rank.state in ("left", "expelled"):
            return
        self.together |= self._told >= set(rank.record.members) - rank.lost
        if self.last is not None and self.last.among:  # of a pair: this rank comes so far
            self._applied_at[rank.me] = self.last.header.step + 1
        end, applied_at = (at.get(rank.me, -1) for at in (self._ends, self._applied_at))
        note = ToldToEnd(end, self.together, applied_at)
        if note != self._said or again:
            self._said = note
            detector.send(note, [*detector.notes.values(), *detector.siblings.values()])

    def take(self, note: ToldToEnd, member: Member | None) -> None:
        """Keep what a peer, or another rank of this island (`member` is None), says of its end. A
        peer that says that all are told to end has heard so from each.
        """
        me = self._loop.machine.me
        if member is None:
            self._told.add(me)
        else:
            self._told.add(member)
            self.together |= note.together and me in self._told
            if note.end >= 0:
                self._ends[member] = note.end
            else:
                self._ends.pop(member, None)
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
        self.announce()

    def give_up_last(self) -> None:
        """Wait no longer for the last message, where it is abandoned and not delivered."""
        message = self.last
        if message is not None and not self.gave_up and self.abandoned(message.n, message.among):
            if any(e.n == message.n and not e.delivered for e in self._loop.machine.open):
                self.give_up(message)

    def give_up(self, message: RoundMessage) -> None:
        """Wait no longer for the answer to a message that is abandoned."""
        self.gave_up = True
        self.end()
        message.tasks.put(PeerLost(ABANDONED))

    def abandoned(self, n: int, among: tuple[Member, ...] = ()) -> bool:
        """Whether some member never sends message n, or this rank has said so; never of a pair."""
        return self.together and not among and any(n >= end for end in self._ended())

    def departed(self, member: Member) -> bool:
        """Whether a peer may go without a change of members: it sends nothing more, and this rank
        has what all have sent.
        """
        has_all = self._loop.machine.landed >= self._below
        return self.together and member in self._ends and has_all

    def _settled(self) -> bool:
        """Whether all members have said where they end, and have delivered what comes before."""
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
