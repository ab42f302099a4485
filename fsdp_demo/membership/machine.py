"""Who is a member and which messages count, on one rank: a state machine without sockets, clock or
threads.

`machine.step(event)` gives the next machine and the actions it asks for (`protocol_events.py`). The
protocol is virtual synchrony: when the members change, all open messages are settled in the same
record. Words, rules and what is proved: docs/membership.md. The names in brackets are those of the
histories that break simpler protocols; the tests have their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from . import protocol_events, settlement
from .protocol_events import Action, Event
from .protocol_types import (
    Ballot,
    HeldMessage,
    Kind,
    Member,
    OpenMessage,
    Piece,
    Record,
    Report,
    needed,
)

Actions = tuple[Action, ...]
State = Literal["running", "frozen", "expelled", "left"]


@dataclass(frozen=True)
class Rank:
    """The membership of one rank. Hashable; `step` changes nothing in it.

    Attributes:
        me, rank, ranks: this island, which of its ranks this is, and how many it has.
        window: most messages that this rank may have launched and not delivered (q). At most 2 q
            are kept (settle-all-open).
        record: of the epoch it is in, without what is needed once.
        state: a frozen rank receives nothing; an expelled one or one that left does nothing.
        lost: peers that it does not hear in its peer group in this view.
        next: the first message that it has not launched. sent: all of its own below it were sent.
            The two differ while it is frozen, and while a planned join is decided.
        landed: all messages below it are delivered here. freed: all below it are stable and freed.
        heard: how far each member has landed in this peer group, as far as this rank knows; in the
            order of `record.members`.
        open: what is kept, by number.
        ballots: votes of this view and of later ones that this rank has not adopted yet
        (vote-with-view).
        planned: the base that this rank has proposed for a newcomer, until the next record is here;
            0 otherwise.
    """

    me: Member
    rank: int
    ranks: int
    window: int
    min_continue: int
    record: Record
    next: int
    sent: int
    landed: int
    freed: int
    heard: tuple[int, ...]
    state: State = "running"
    lost: frozenset[Member] = frozenset()
    open: tuple[OpenMessage, ...] = ()
    ballots: frozenset[Ballot] = frozenset()
    planned: int = 0

    def step(self, event: Event) -> tuple[Rank, Actions]:
        """The state of this rank after an event, and what is to be done, in order.

        Raises:
            ValueError: the driver broke a promise of `protocol_events.py`, or a launch or join is
                not allowed.
        """
        if self.state in ("expelled", "left"):
            return self, ()
        return _STEPS[type(event)](self, event)

    # ---- messages ------------------------------------------------------------------------------

    def _launched(self, event: protocol_events.Launched) -> tuple[Rank, Actions]:
        """Launch message n. It is sent at once, or, while it may not be sent yet (`_must_wait`),
        noted and sent in the next epoch.
        """
        n, kind, rank = event.n, event.kind, self
        freed: Actions = ()
        if not self.begun and n > self.next and not event.question:
            rank, freed = self._begins(n)
        end = rank.landed + rank.window
        if n != rank.next or n >= end:
            raise ValueError(
                f"launched message {n}: the next is {rank.next}, it must be below landed + window "
                f"= {end}: wait for one"
            )
        rank = rank._asked(n) if event.question else rank
        if event.among:
            rank = rank._with(replace(rank._own(n, kind), among=event.among))
        if rank._must_wait(n):
            return replace(rank, next=n + 1)._with(rank._own(n, kind)), freed
        rank, actions = replace(rank, next=n + 1, sent=n + 1)._send_own(n, kind)
        return rank, (*freed, *actions)

    @property
    def begun(self) -> bool:
        """False for a newcomer that has not launched its first message."""
        base = self.record.base[self.record.members.index(self.me)]
        return base == 0 or self.next > base

    def _begins(self, n: int) -> tuple[Rank, Actions]:
        """This rank as a newcomer whose first message is n. The messages from its base to n - 1
        were questions, which it was not asked: what a leaver has sent ahead of them is freed.
        """
        rank = self
        for question in range(self.next, n):
            rank = rank._asked(question)
        gone = tuple(protocol_events.Free(e.n) for e in rank.open if e.n < n)
        later = tuple(e for e in rank.open if e.n >= n)
        return replace(rank, next=n, sent=n, landed=n, freed=n, open=later), gone

    def _asked(self, n: int) -> Rank:
        """Message n is a question, which newcomers are not asked. A newcomer whose base is n takes
        part from n + 1.
        """
        record = self.record.asked(n)
        return replace(self, record=record, heard=tuple(map(max, self.heard, record.base)))

    def _must_wait(self, n: int) -> bool:
        """Whether message n may not be sent yet.

        The donor does not know whether the join that it has proposed stands, until the store
        answers. Nobody can launch more than the window beyond what the donor has sent. So while it
        holds back message base - window, no member launches the base without the record.
        """
        undecided = self.planned > 0 and n + self.window >= self.planned
        return self.state != "running" or undecided

    def _send_own(self, n: int, kind: Kind, repeat: bool = False) -> tuple[Rank, Actions]:
        """Send one's body and shares to all that take part; a repeat sends shares only
        (reduce-again: from the kept vector).
        """
        entry, actions = self._own(n, kind), list[Action]()
        members = entry.among or self.record.contributors(n)
        attempt = self.record.settlement(n).attempt
        others = tuple(m for m in members if m != self.me)
        body = Piece("body", self.me)
        entry = replace(entry, pieces=entry.pieces | {body})
        if not repeat:
            actions.append(self._send(n, kind, body, others))
        if kind == "mixed" and attempt == self.record.view:
            entry = replace(entry, shares=entry.shares | {self.me})
            actions.append(self._send(n, kind, Piece("share", self.me, attempt), others))
        entry, more = self._averaged(entry)
        return self._with(entry)._voted_if_held(n, [*actions, *more])

    def _averaged(self, entry: OpenMessage) -> tuple[OpenMessage, list[Action]]:
        """With all shares of leg 1 there, one's own part of the mean is made and sent (leg 2)."""
        settled = self.record.settlement(entry.n).of(entry.among)
        own = Piece("part", self.me, settled.attempt)
        if (
            entry.kind == "gather"
            or own in entry.pieces
            or not entry.shares.issuperset(settled.owners)
        ):
            return entry, []
        if any(Piece("early", m) not in entry.pieces for m in settled.early):
            return entry, []
        others = tuple(m for m in settled.owners if m != self.me)
        return replace(entry, pieces=entry.pieces | {own}), [
            self._send(entry.n, entry.kind, own, others)
        ]

    def _received(self, event: protocol_events.PieceReceived) -> tuple[Rank, Actions]:
        """Keep a piece that has come. A frozen rank drops it: after its report it completes no
        message of the old view (freeze-first).
        """
        if not self._receives(event.view) or event.sender not in self.record.members:
            return self, ()
        self._knows(event.epoch)
        rank, actions = self._heard_landed(event.sender, event.landed)
        entry = rank._entry(event.n, event.kind)
        if (
            event.n < rank.freed
            or entry.delivered
            or not rank._wanted(event.n, event.kind, event.piece)
        ):
            return rank, actions
        if event.piece.what != "early":  # whose sender does not know yet what the message will be
            entry = replace(entry, kind=event.kind)
        if event.piece.what == "share":
            entry = replace(entry, shares=entry.shares | {event.piece.of})
        else:
            entry = replace(entry, pieces=entry.pieces | {event.piece})
        entry, more = rank._averaged(entry)
        return rank._with(entry)._voted_if_held(event.n, [*actions, *more])

    def _receives(self, view: int) -> bool:
        """Whether this rank takes frames and beats of `view`: it is running, in that view."""
        return self.state == "running" and view == self.record.view

    def _wanted(self, n: int, kind: Kind, piece: Piece) -> bool:
        """Whether a piece belongs to the message as it is settled: shares and parts of another
        attempt never mix (no-mixed-attempts).
        """
        settled = self.record.settlement(n).of(self._entry(n).among)
        # one that leaves may say it before the message is launched here (early-part)
        if piece.what == "early":
            return piece.of in settled.contributors
        if piece.what == "share":
            return piece.of in settled.owners and piece.attempt == settled.attempt
        return piece in needed(kind, settled)

    def _kept(self, entry: OpenMessage) -> OpenMessage:
        """An open message at the start of a view: without pieces that its settlement lacks."""
        pieces = frozenset(p for p in entry.pieces if self._wanted(entry.n, entry.kind, p))
        return replace(entry, pieces=pieces, shares=frozenset())

    # ---- the vote of the island, and what is stable --------------------------------------------

    def _voted_if_held(self, n: int, actions: list[Action]) -> tuple[Rank, Actions]:
        """Cast this rank's ballot for n in this view, once it holds n."""
        vote = self._vote(n)
        if vote.ballot in self.ballots or self._made_of(self._entry(n)) is None:
            return self, tuple(actions)
        rank, more = replace(self, ballots=self.ballots | {vote.ballot})._delivered_if_agreed(n)
        return rank, (*actions, vote, *more)

    def _vote(self, n: int) -> protocol_events.CastVote:
        """The vote of this rank that it holds n in this view."""
        return protocol_events.CastVote(Ballot(n, self.rank, self.record.view), self.record.epoch)

    def _made_of(self, entry: OpenMessage) -> frozenset[Piece] | None:
        """The pieces from which a message is delivered, if this rank has all of them."""
        pieces = needed(entry.kind, self.record.settlement(entry.n).of(entry.among))
        return pieces if entry.pieces >= pieces else None

    def _voted(self, event: protocol_events.Voted) -> tuple[Rank, Actions]:
        """Count another rank's ballot. One of a later view is kept until this rank has adopted that
        view, one of an earlier view is dropped (vote-with-view).
        """
        ballot = event.ballot
        if ballot.view == self.record.view:
            self._knows(event.epoch)
        if not self._counts(ballot) or ballot.n < self.landed or self._entry(ballot.n).delivered:
            return self, ()
        return replace(self, ballots=self.ballots | {ballot})._delivered_if_agreed(ballot.n)

    def _counts(self, ballot: Ballot) -> bool:
        return ballot.view >= self.record.view

    def _agreed(self, n: int) -> bool:
        """Whether all ranks of the island hold n as it is settled in this view. No peer group acts
        for itself (all-groups).
        """
        return all(Ballot(n, r, self.record.view) in self.ballots for r in range(self.ranks))

    def _delivered_if_agreed(self, n: int) -> tuple[Rank, Actions]:
        """Deliver message n, if it is here and all ranks of the island hold it. A frozen rank
        delivers it, too: all ranks held it before they froze, and their reports say so.
        """
        entry = self._entry(n)
        pieces = self._made_of(entry)
        if entry.delivered or pieces is None or not self._agreed(n):
            return self, ()
        rank = replace(self, ballots=frozenset(b for b in self.ballots if b.n != n))._with(
            replace(entry, delivered=True)
        )
        landed = rank.landed
        while rank._entry(landed).delivered:
            landed += 1
        rank = replace(rank, landed=landed)
        settled = rank.record.settlement(n).of(entry.among)
        deliver = protocol_events.Deliver(n, settled.contributors, pieces)
        rank, more = rank._freed_below(rank._stable()) if rank.state == "running" else (rank, ())
        return rank, (deliver, *more)

    def _landed_heard(self, event: protocol_events.LandedHeard) -> tuple[Rank, Actions]:
        if not self._receives(event.view):
            return self, ()
        return self._heard_landed(event.member, event.landed)

    def _heard_landed(self, member: Member, landed: int) -> tuple[Rank, Actions]:
        if member not in self.record.members:
            return self, ()
        heard = tuple(
            max(landed, h) if m == member else h
            for m, h in zip(self.record.members, self.heard, strict=True)
        )
        if heard == self.heard:
            return self, ()
        rank = replace(self, heard=heard)
        return rank._freed_below(rank._stable())

    def _stable(self) -> int:
        """The number below which all members have delivered every message, in this peer group
        (seal-stable, settle-all-open); of a message among some, these."""
        if any(e.among for e in self.open):
            return min([self.landed, *(e.n for e in self.open if self.owed(e))])
        known = zip(self.record.members, self.heard, strict=True)
        return min([self.landed, *(h for m, h in known if m != self.me)])

    def owed(self, entry: OpenMessage) -> bool:
        """Whether another member of an open message has yet to deliver it, as far as known."""
        members = {*(entry.among or self.record.members)} - {self.me} - self.lost
        known = zip(self.record.members, self.heard, strict=True)
        return any(h <= entry.n for m, h in known if m in members)

    def unread(self, below: int) -> bool:
        """Whether a member that is not lost has yet to deliver a message below that number, as far
        as this rank knows.
        """
        return any(
            h < below and m != self.me and m not in self.lost
            for m, h in zip(self.record.members, self.heard, strict=True)
        )

    def _freed_below(self, stable: int) -> tuple[Rank, Actions]:
        if stable <= self.freed:
            return self, ()
        gone = tuple(protocol_events.Free(e.n) for e in self.open if e.n < stable)
        rank = replace(self, freed=stable, open=tuple(e for e in self.open if e.n >= stable))
        return rank, (*gone, protocol_events.SealAllowed(stable))

    # ---- a change of members -------------------------------------------------------------------

    def _peer_lost(self, event: protocol_events.ConnectionLost) -> tuple[Rank, Actions]:
        """Freeze at the loss of a peer. One reason is enough, in one peer group: the peer group is
        the judge of life (store-unasked).
        """
        if (
            event.member not in self.record.members
            or event.member == self.me
            or event.member in self.lost
        ):
            return self, ()
        rank = replace(self, lost=self.lost | {event.member})
        if few := rank._too_few_without(rank.lost):
            return rank, few
        return rank._freeze() if rank.state == "running" else (rank, ())

    def _too_few_without(self, lost: frozenset[Member]) -> Actions:
        """`TooFew` where fewer than `min_continue` members are left without `lost`, which a rank of
        this island has lost. No reports are needed: those that go on hear each other in every peer
        group.
        """
        left = tuple(m for m in self.record.members if m not in lost)
        if len(left) >= self.min_continue:
            return ()
        return (protocol_events.TooFew(left, lost=lost.intersection(self.record.members)),)

    def _frozen_heard(self, event: protocol_events.FrozenHeard) -> tuple[Rank, Actions]:
        """Freeze, since another rank has frozen this view. News of another view are dropped."""
        if not self._receives(event.view):
            return self, ()
        few = self._too_few_without(self.lost | event.lost)
        return (self, few) if few else self._freeze()

    def _freeze(self) -> tuple[Rank, Actions]:
        """Stop receiving, and report which messages this rank holds; once a view (freeze-first)."""
        held = tuple(HeldMessage(e.n, e.kind, e.delivered, e.pieces) for e in self.open)
        heard = frozenset(self.record.members) - self.lost
        base = zip(self.record.members, self.record.base, strict=True)
        report = Report(
            self.record.view,
            self.me,
            self.rank,
            heard,
            self.landed,
            held,
            self.begun,
            tuple((m, b) for m, b in base if b),
        )
        return replace(self, state="frozen"), (
            protocol_events.Freeze(self.record.view),
            protocol_events.PostReport(report),
        )

    def _reports_seen(self, event: protocol_events.ReportsSeen) -> tuple[Rank, Actions]:
        """Propose when all have reported that somebody hears, or after `dead` seconds."""
        reports = settlement.complete(self.record, event.reports, self.ranks)
        if self.state != "frozen" or not (
            event.waited or settlement.expected(self.record, event.reports) <= reports.keys()
        ):
            return self, ()
        record = self._proposal(reports)
        if len(record.members) < self.min_continue:
            return self, (protocol_events.TooFew(record.members, event.waited),)
        return self, (protocol_events.ProposeRecord(record),)

    def _proposal(self, reports: settlement.Reports) -> Record:
        return settlement.propose(self.record, reports)

    def _record_seen(self, event: protocol_events.RecordSeen) -> tuple[Rank, Actions]:
        record = event.record
        if record.epoch <= self.record.epoch:
            return self, ()
        if record.epoch != self.record.epoch + 1:
            raise ValueError(
                f"record {record.epoch} follows {self.record.epoch}: hand records in in order, "
                "without a gap"
            )
        if self.me not in record.members:
            return replace(self, state="expelled", open=(), ballots=frozenset()), (
                protocol_events.Expelled(record),
            )
        if record.view == self.record.view:
            begins = dict(zip(record.members, record.base, strict=True))
            if late := [m for m in begins.keys() - {*self.record.members} if begins[m] < self.sent]:
                raise ValueError(
                    f"record {record.epoch} lets {late} begin with a message below {self.sent}, "
                    "which was sent without them"
                )
            return self._with_record(record)._send_noted()
        if self.state != "frozen":
            raise ValueError(
                f"record {record.epoch} names {self.me}, which has not reported on view "
                f"{self.record.view}"
            )
        return self._adopt(record)

    def _with_record(self, record: Record) -> Rank:
        """This rank with `record` as its newest; how far each member has delivered is kept."""
        known = dict(zip(self.record.members, self.heard, strict=True))
        moved = dict(zip(self.record.members, self.record.base, strict=True))
        record = record.begun_at(moved.get(m, 0) for m in record.members)
        heard = tuple(
            max(known.get(m, base), record.stable)
            for m, base in zip(record.members, record.base, strict=True)
        )
        return replace(
            self,
            record=record.bare(),
            heard=heard,
            lost=self.lost.intersection(record.members),
            planned=0,
        )

    def _send_noted(self) -> tuple[Rank, Actions]:
        """Send what was launched while the store had not answered about a join."""
        if self.state != "running":
            return self, ()
        rank, actions = replace(self, sent=self.next), list[Action]()
        for n in range(self.sent, self.next):
            rank, more = rank._send_own(n, rank._entry(n).kind)
            actions += more
        return rank, tuple(actions)

    def _adopt(self, record: Record) -> tuple[Rank, Actions]:
        """Go on in a new view: forward what others lack (any-holder-forwards, no-mixed-attempts),
        repeat what must be repeated, vote again (vote-with-view).
        """
        rank = replace(self._with_record(record), state="running", lost=frozenset(), sent=self.next)
        rank = replace(rank, ballots=frozenset(b for b in self.ballots if rank._counts(b)))
        rank, freed = rank._freed_below(min(record.stable, rank.landed))
        rank = replace(
            rank, open=tuple(e for e in map(rank._kept, rank.open) if e.pieces or e.n < rank.next)
        )
        actions: list[Action] = [protocol_events.Adopted(record), *freed, *rank._forwards(record)]
        # freed here, but another rank of this island may still wait for the vote
        actions += [rank._vote(n) for n in range(record.stable, self.freed)]
        for entry in rank.open:
            if entry.delivered:
                more: Actions = (rank._vote(entry.n),)
            elif entry.n < rank.next:
                rank, more = rank._send_own(entry.n, entry.kind, repeat=entry.n < self.sent)
            else:
                rank, more = rank._voted_if_held(entry.n, [])
            actions += more
        rank, more = rank._freed_below(rank._stable())
        return rank, (*actions, *more)

    def _forwards(self, record: Record) -> list[Action]:
        kinds = {e.n: e.kind for e in self.open}
        mine = [f for f in record.forwards if (f.peer_group, f.sender) == (self.rank, self.me)]
        return [self._send(f.n, kinds[f.n], f.piece, f.to) for f in mine]

    # ---- planned changes -----------------------------------------------------------------------

    def _join_planned(self, event: protocol_events.JoinPlanned) -> tuple[Rank, Actions]:
        """A join keeps the view. The newcomer takes part from message base = next + window on, the
        first one that no member can have launched. Until the store has answered, the donor sends
        nothing (`_must_wait`), however late that is.

        The donor announces the record in its next message, which all deliver before they launch
        `base`; else there is a change, and all read the record there (largest-set: a newcomer asks
        only when it has reached all members). One joins at a time: who has not begun does not hear
        such an announcement. Then, and while frozen, nothing is proposed; ask again.
        """
        member, record = event.member, self.record
        if any(m.slot == member.slot for m in record.members):
            raise ValueError(
                f"slot {member.slot} is taken by {record.members}: a new life of it joins when the "
                "one before is expelled"
            )
        begins = any(base and base >= self.landed for base in record.base)
        if self.state != "running" or self.planned or begins:
            return self, ()
        base = self.next + self.window
        bases = {**dict(zip(record.members, record.base, strict=True)), member: base}
        members = tuple(sorted(bases))
        planned = record.following(members=members, base=tuple(bases[m] for m in members))
        return replace(self, planned=base), (protocol_events.ProposeRecord(planned),)

    def _leave(self, event: protocol_events.Leave) -> tuple[Rank, Actions]:
        """This island leaves: its peers get `PeerLost` at once, without a timer. What they hold of
        it in every peer group counts, and so does its early part of the coming message
        (early-part).
        """
        return replace(self, state="left", open=(), ballots=frozenset()), (
            protocol_events.Freeze(self.record.view),
        )

    # ---- small things --------------------------------------------------------------------------

    def _entry(self, n: int, kind: Kind = "gather") -> OpenMessage:
        return next((e for e in self.open if e.n == n), None) or OpenMessage(n, kind)

    def _own(self, n: int, kind: Kind) -> OpenMessage:
        """The open message n, with the kind that it was launched with here."""
        return replace(self._entry(n), kind=kind)

    def _with(self, entry: OpenMessage) -> Rank:
        others = [e for e in self.open if e.n != entry.n]
        return replace(self, open=tuple(sorted([*others, entry], key=lambda e: e.n)))

    def _send(self, n: int, kind: Kind, piece: Piece, to: tuple[Member, ...]) -> Action:
        return protocol_events.Send(
            self.record.view, self.record.epoch, n, kind, piece, to, self.landed
        )

    def _knows(self, epoch: int) -> None:
        if epoch > self.record.epoch:
            raise ValueError(
                f"a frame or vote of epoch {epoch} came before its record; known is "
                f"{self.record.epoch}: hand it in first"
            )


_STEPS: dict[type, Callable[[Rank, Any], tuple[Rank, Actions]]] = {
    protocol_events.Launched: Rank._launched,
    protocol_events.PieceReceived: Rank._received,
    protocol_events.LandedHeard: Rank._landed_heard,
    protocol_events.Voted: Rank._voted,
    protocol_events.ConnectionLost: Rank._peer_lost,
    protocol_events.FrozenHeard: Rank._frozen_heard,
    protocol_events.ReportsSeen: Rank._reports_seen,
    protocol_events.RecordSeen: Rank._record_seen,
    protocol_events.JoinPlanned: Rank._join_planned,
    protocol_events.Leave: Rank._leave,
}


def entered(
    me: Member, rank: int, ranks: int, record: Record, window: int = 1, min_continue: int = 1
) -> Rank:
    """The machine of a rank that takes part from the record's base of its island on: at the start
    of a run, or as a newcomer that has loaded a checkpoint and applied all messages below its
    base.

    Raises:
        ValueError: the island is not a member, or a number is out of range.
    """
    if me not in record.members:
        raise ValueError(f"{me} is not in record {record.epoch}: its members are {record.members}")
    if not 0 <= rank < ranks or window < 1 or min_continue < 1:
        raise ValueError(
            f"rank {rank} of {ranks}, window {window}, min_continue {min_continue}: rank below "
            "ranks, the others from 1 on"
        )
    base = record.base[record.members.index(me)]
    heard = tuple(
        max(base, b) if m == me else b for m, b in zip(record.members, record.base, strict=True)
    )
    record = record.bare()
    return Rank(me, rank, ranks, window, min_continue, record, base, base, base, base, heard)
