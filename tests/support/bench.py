"""Machines of the membership protocol on a bench: a test says which frame comes where, and when who
freezes, proposes and adopts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_demo.membership import protocol_events
from fsdp_demo.membership.machine import Rank, entered
from fsdp_demo.membership.protocol_types import Kind, Member, Record, Report, first_record

A, B, C, D = (Member(i) for i in range(4))
At = tuple[Member, int]


class Bench:
    """`members` x `peer_groups` ranks. Frames and votes wait until they are let through.

    Attributes:
        did: what each rank asked for, but frames, votes and reports.
        record: the newest one in the store.
    """

    def __init__(
        self, members: str = "ABC", peer_groups: int = 2, window: int = 2, min_continue: int = 1
    ):
        self.members = [Member("ABCDE".index(x)) for x in members]
        self.peer_groups, self.window = peer_groups, window
        self.record = first_record(self.members)
        self.ranks: dict[At, Rank] = {
            (m, r): entered(m, r, peer_groups, self.record, window, min_continue)
            for m in self.members
            for r in range(peer_groups)
        }
        self.frames: list[tuple[At, At, protocol_events.PieceReceived]] = []
        self.votes: list[tuple[At, protocol_events.Voted]] = []
        self.reports: list[Report] = []
        self.did: dict[At, list[Any]] = {at: [] for at in self.ranks}

    def tell(self, at: At, event: protocol_events.Event) -> list[Any]:
        """Feed one event; what the rank asked for."""
        self.ranks[at], actions = self.ranks[at].step(event)
        for action in actions:
            if isinstance(action, protocol_events.Send):
                a = action
                what = (a.n, a.kind, a.piece, a.landed)
                frame = protocol_events.PieceReceived(a.view, a.epoch, at[0], *what)
                self.frames += [(at, (m, at[1]), frame) for m in a.to if (m, at[1]) in self.ranks]
            elif isinstance(action, protocol_events.CastVote):
                vote = protocol_events.Voted(action.ballot, action.epoch)
                others = (r for r in range(self.peer_groups) if r != at[1])
                self.votes += [((at[0], r), vote) for r in others]
            elif isinstance(action, protocol_events.PostReport):
                self.reports.append(action.report)
            else:
                self.did[at].append(action)
        return list(actions)

    def launch(self, n: int, kind: Kind = "gather", who: Any = None) -> None:
        """All ranks of these islands launch message n."""
        for at in list(self.ranks):
            if at[0] in (who or self.members):
                self.tell(at, protocol_events.Launched(n, kind))

    def enter(self, newcomer: Member, record: Record) -> None:
        """An island with one rank comes, and has read this record."""
        self.members.append(newcomer)
        self.ranks[newcomer, 0] = entered(newcomer, 0, 1, record, self.window)
        self.did[newcomer, 0] = []

    def let(self, **of: Any) -> None:
        """Let frames through that are on their way, and those that follow from them: of these
        islands (sender, to), of this peer_group, of message n.
        """
        while found := [f for f in self.frames if fits(f, **of)]:
            self.frames.remove(found[0])
            if found[0][2].view == self.ranks[found[0][1]].record.view:
                self.tell(found[0][1], found[0][2])

    def vote(self, member: Member | None = None, rank: int | None = None) -> None:
        """Let votes through to these ranks."""
        while found := [
            v for v in self.votes if member in (None, v[0][0]) and rank in (None, v[0][1])
        ]:
            self.votes.remove(found[0])
            self.tell(*found[0])

    def beats(self) -> None:
        """All hear how far all others have landed."""
        for (m, peer_group), rank in list(self.ranks.items()):
            view = rank.record.view
            for peer in self.members:
                other = self.ranks[peer, peer_group]
                if peer != m and other.record.view == view:
                    heard = protocol_events.LandedHeard(view, peer, other.landed)
                    self.tell((m, peer_group), heard)

    def freeze(self, *who: Member, lost: tuple[Member, ...] = ()) -> None:
        """All ranks of these islands hear of a change, after they have lost those."""
        for at in [at for at in self.ranks if at[0] in who]:
            for m in lost:
                self.ranks[at] = self.ranks[at] if m == at[0] else replaced_lost(self.ranks[at], m)
            self.tell(at, protocol_events.FrozenHeard(self.ranks[at].record.view))

    def propose(self, at: At, waited: bool = True) -> Record | None:
        """What this rank proposes from all reports that were posted."""
        found = self.tell(at, protocol_events.ReportsSeen(tuple(self.reports), waited))
        return next((a.record for a in found if isinstance(a, protocol_events.ProposeRecord)), None)

    def change(self, *who: Member, adopt: bool = True) -> Record:
        """These freeze and report; their record becomes the newest and, if wanted, they adopt
        it.
        """
        self.freeze(*who)
        record = self.propose((who[0], 0))
        assert record is not None
        self.record = record
        if adopt:
            self.adopt(*who)
        return record

    def adopt(self, *who: Member, rank: int | None = None) -> None:
        """These ranks read the newest record."""
        for at in [at for at in self.ranks if at[0] in who and rank in (None, at[1])]:
            self.tell(at, protocol_events.RecordSeen(self.record))

    def delivered(self, member: Member, n: int = 0) -> list[str | None]:
        """For each rank of the island whose contributions it delivered as n: "ABC"."""
        found = []
        for r in range(self.peer_groups):
            own = [a for a in self.did[member, r] if isinstance(a, protocol_events.Deliver)]
            sets = ["".join("ABCDE"[m.slot] for m in a.contributors) for a in own if a.n == n]
            assert len(sets) <= 1
            found.append(sets[0] if sets else None)
        return found

    def sealed(self, member: Member, rank: int = 0) -> int:
        """Below which message this rank may seal a checkpoint."""
        did = self.did[member, rank]
        return max([a.below for a in did if isinstance(a, protocol_events.SealAllowed)], default=0)


def replaced_lost(rank: Rank, member: Member) -> Rank:
    """The rank has lost a peer, but has not acted on it yet."""
    return replace(rank, lost=rank.lost | {member})


def fits(
    item: Any, sender: Any = None, to: Any = None, peer_group: Any = None, n: Any = None
) -> bool:
    """Whether a frame is among those that are let through."""
    (a, _), (b, r), frame = item
    sender, to = ((w,) if isinstance(w, Member) else w for w in (sender, to))
    ends = (sender is None or a in sender) and (to is None or b in to)
    return ends and peer_group in (None, r) and n in (None, frame.n)
