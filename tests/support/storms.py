"""Random lives of a run under the membership protocol: islands crash, are suspected, leave, join,
while messages of all kinds go on.

Links, votes and beats are queues, and so are questions to the store and its answers: each may come
any number of steps late. Which step comes next is drawn from a
seeded generator. At the end all faults stop, and everything that can happen does: then the members
must have delivered all messages and stand still in one epoch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from fsdp_demo.membership import protocol_events
from fsdp_demo.membership.machine import Rank, entered
from fsdp_demo.membership.protocol_types import (
    Kind,
    Member,
    Piece,
    Record,
    Report,
    extended,
    first_record,
    needed,
)

from .invariants import Outcome, Violation

At = tuple[Member, int]
KINDS: tuple[Kind, ...] = ("gather", "mixed")
FAULTS = ("crash", "suspect", "suspect", "leave", "join", "join")
"""One of these is drawn."""

QUESTIONS = 0.4
"""Share of the messages in which a newcomer is not asked."""


class Storm:
    """One life. `slots` islands at most, `first` of them at the start, `peer_groups` ranks each;
    `messages` are launched by who is there.

    Attributes:
        events: how often each kind of fault happened.
        pace: how often the next step is one of the store: with the least only where nothing else
            can happen.
    """

    def __init__(
        self,
        seed: int,
        slots: int = 5,
        first: int = 4,
        peer_groups: int = 2,
        messages: int = 12,
        faults: int = 4,
        window: int = 2,
        among: tuple[str, ...] = FAULTS,
    ):
        self.random, self.among = random.Random(seed), among
        self.slots, self.peer_groups, self.messages, self.faults, self.window = (
            slots,
            peer_groups,
            messages,
            faults,
            window,
        )
        self.kinds = [self.random.choice(KINDS) for _ in range(messages + 8 * window * slots)]
        count = len(self.kinds)
        self.asked = {n for n in range(count - 4) if self.random.random() < QUESTIONS}
        self.records = [first_record(Member(i) for i in range(first))]
        self.ranks: dict[At, Rank] = {}
        self.frames: dict[tuple[At, At], list[protocol_events.PieceReceived]] = {}
        self.votes: list[tuple[At, protocol_events.Voted]] = []
        self.reports: list[Report] = []
        self.questions: list[tuple[At, Record]] = []
        self.answers: list[tuple[At, int]] = []
        self.pace = self.random.choice((0.3, 0.03, 0.003))
        self.got: dict[At, dict[int, Outcome]] = {}
        self.sealed: dict[int, Outcome] = {}
        self.incarnations = dict.fromkeys(range(slots), 0)
        self.events = dict.fromkeys(
            (*FAULTS, "early", "change", "counted early", "all gone", "begun", "behind"), 0
        )
        self.frozen: set[int] = set()
        for m in self.records[0].members:
            self._enter(m, self.records[0])

    def run(self, steps: int = 150) -> Storm:
        """Live: so many steps with faults, then to the end. Raises a `Violation`."""
        for _ in range(steps):
            if self.random.random() < 0.08 and self.faults:
                self._fault()
            else:
                self._step()
        for _ in range(20000):
            if not (self._step() or any(self._decide(at, waited=True) for at in list(self.ranks))):
                break
        else:
            raise Violation("stuck", "no end is in sight")
        self._check_end()
        return self

    # ---- what may happen -----------------------------------------------------------------------

    def _step(self) -> bool:
        """One step of one rank. Tries ranks in random order until one changes something; whether
        one did.
        """
        if self.random.random() < 0.75 and (
            waiting := [k for k, frames in self.frames.items() if frames]
        ):
            link = self.random.choice(waiting)
            if self._arrive(link):
                return True
        if self.random.random() < self.pace and self._store():
            return True
        order = list(self.ranks)
        self.random.shuffle(order)
        return any(self._turn(at) for at in order) or self._store()

    def _store(self) -> bool:
        """The store takes a question or gives an answer, to one rank; whether there is any."""
        tries = [
            self._ask,
            *(lambda at=at: self._answer(at) or self._fetch(at) for at in self.ranks),
        ]
        self.random.shuffle(tries)
        return any(t() for t in tries)

    def _ask(self) -> bool:
        """A question reaches the store: compare_set. The answer is another step."""
        if not self.questions:
            return False
        at, record = self.questions.pop(self.random.randrange(len(self.questions)))
        if record.epoch == len(self.records):
            self._record(record)
        self.answers.append((at, record.epoch))
        return True

    def _turn(self, at: At) -> bool:
        """Something that changes this rank, in random order of what there is."""
        tries = [
            self._launch,
            self._vote,
            self._beat,
            self._hear,
            self._decide,
            self._look,
            self._any_frame,
        ]
        self.random.shuffle(tries)
        return any(t(at) for t in tries)

    def _launch(self, at: At) -> bool:
        rank = self.ranks[at]
        if rank.state not in ("running", "frozen"):
            return False
        n = rank.next if rank.begun else self._begins(rank.next)
        if n >= self._end() or (rank.begun and n >= rank.landed + rank.window):
            return False
        begun = [r.landed for m, r in self.ranks.items() if self._has_begun(m)]
        if not rank.begun and n > max(begun, default=0):
            return False  # a newcomer first applies all that comes before
        return self._feed(at, protocol_events.Launched(n, self.kinds[n], n in self.asked))

    def _joined(self) -> Iterator[tuple[Member, int]]:
        """Who has joined, and its base as it was planned."""
        for old, new in itertools.pairwise(self.records):
            for m, base in zip(new.members, new.base, strict=True):
                if m not in old.members:
                    yield m, base

    def _has_begun(self, at: At) -> bool:
        return at[0] in self.records[-1].members and self.ranks[at].begun

    def _begins(self, base: int) -> int:
        """The first message from there on that is no question."""
        while base in self.asked:
            base += 1
        return base

    def _behind(self, record: Record) -> Record:
        """With all questions that come. Only one at a base moves anything."""
        for n in sorted(self.asked):
            if n in record.base:
                record = record.asked(n)
        return record

    def _may_go_on(self, m: Member) -> bool:
        """Whether an island counts as begun in a change: each of its ranks has launched its base,
        and a frozen one had done so before it froze, which is what it has reported.
        """
        for r in range(self.peer_groups):
            rank, base = self.ranks[m, r], self._base((m, r))
            launched = rank.sent if rank.state == "frozen" else rank.next
            if 0 < base >= launched:
                return False
        return True

    def _base(self, at: At) -> int:
        record = self.ranks[at].record
        return record.base[record.members.index(at[0])]

    def _end(self) -> int:
        """The last joiner takes part in two messages at least."""
        base = max(b for record in self.records for b in record.base)
        return max(self.messages, self._begins(base) + 2)

    def _any_frame(self, at: At) -> bool:
        links = [k for k, frames in self.frames.items() if k[1] == at and frames]
        return any(self._arrive(link) for link in links)

    def _arrive(self, link: tuple[At, At]) -> bool:
        """The first frame of a link; one of an epoch whose record is not here waits."""
        rank, frames = self.ranks.get(link[1]), self.frames[link]
        if rank is None or (
            frames[0].epoch > rank.record.epoch and rank.state in ("running", "frozen")
        ):
            return False
        frame = frames.pop(0)
        if rank.state in ("running", "frozen") and frame.view == rank.record.view:
            self._feed(link[1], frame)
        return True

    def _vote(self, at: At) -> bool:
        epoch = self.ranks[at].record.epoch
        own = [(to, v) for to, v in self.votes if to == at and v.epoch <= epoch]
        if not own:
            return False
        vote = self.random.choice(own)
        self.votes.remove(vote)
        self._feed(at, vote[1])
        return True

    def _fetch(self, at: At) -> bool:
        """The store answers with the record that a frame or a vote has announced."""
        epoch = self.ranks[at].record.epoch
        frames = [f[0].epoch for link, f in self.frames.items() if link[1] == at and f]
        announced = [*frames, *(v.epoch for to, v in self.votes if to == at)]
        if max(announced, default=0) <= epoch or self.ranks[at].state not in ("running", "frozen"):
            return False
        return self._feed(at, protocol_events.RecordSeen(self.records[epoch + 1]))

    def _answer(self, at: At) -> bool:
        """The store answers what this rank has proposed with what stands there."""
        epochs = [epoch for to, epoch in self.answers if to == at]
        if not epochs:
            return False
        self.answers.remove((at, epochs[0]))
        self._learn(at, epochs[0])
        return True

    def _beat(self, at: At) -> bool:
        rank = self.ranks[at]
        for m in rank.record.members:
            peer = self.ranks.get((m, at[1]))
            if (
                m != at[0]
                and peer is not None
                and self._feed(at, protocol_events.LandedHeard(peer.record.view, m, peer.landed))
            ):
                return True
        return False

    def _hear(self, at: At) -> bool:
        """Of a change that has begun, or that a member is gone: its connection closes."""
        rank = self.ranks[at]
        gone = [
            m
            for m in rank.record.members
            if m not in rank.lost and any((m, r) not in self.ranks for r in range(self.peer_groups))
        ]
        return (
            rank.record.view in self.frozen
            and self._feed(at, protocol_events.FrozenHeard(rank.record.view))
        ) or any(self._feed(at, protocol_events.ConnectionLost(m)) for m in gone)

    def _decide(self, at: At, waited: bool = False) -> bool:
        rank = self.ranks[at]
        waited = waited or self.random.random() < 0.05
        asked = any(to == at for to, _ in (*self.questions, *self.answers))
        due = rank.state == "frozen" and len(self.records) == rank.record.epoch + 1 and not asked
        return due and self._feed(at, protocol_events.ReportsSeen(tuple(self.reports), waited))

    def _look(self, at: At) -> bool:
        """The next record. A running member reads the store only when something tells it to: see
        `_learn`.
        """
        rank = self.ranks[at]
        if len(self.records) == rank.record.epoch + 1 or rank.state not in ("running", "frozen"):
            return False
        record = self.records[rank.record.epoch + 1]
        if (
            rank.state == "running"
            and at[0] in record.members
            and record.view == rank.record.view
            and self.random.random() < 0.9
        ):
            return False
        return self._feed(at, protocol_events.RecordSeen(record))

    def _learn(self, at: At, epoch: int) -> None:
        """Records come before what is of their epoch."""
        while at in self.ranks and self.ranks[at].record.epoch < epoch:
            self._feed(
                at, protocol_events.RecordSeen(self.records[self.ranks[at].record.epoch + 1])
            )

    # ---- faults --------------------------------------------------------------------------------

    def _fault(self) -> None:
        kind = self.random.choice(self.among)
        alive = sorted({m for m, _ in self.ranks if m in self.records[-1].members})
        at = (self.random.choice(alive), self.random.randrange(self.peer_groups)) if alive else None
        if at is None or at not in self.ranks:
            return
        if kind == "join":
            taken = {m.slot for m in self.records[-1].members} | {m.slot for m, _ in self.ranks}
            free = [s for s in range(self.slots) if s not in taken]
            if free and self.ranks[at].record.epoch + 1 == len(self.records):
                slot = self.random.choice(free)
                self._feed(at, protocol_events.JoinPlanned(Member(slot, self.incarnations[slot])))
        elif kind == "suspect":
            self._feed(at, protocol_events.ConnectionLost(self.random.choice(alive)))
        elif len(alive) > 1:
            whole = self.random.random() < 0.5 or kind == "leave"
            for peer_group in range(self.peer_groups) if whole else [at[1]]:
                if kind == "leave":
                    self._say_early((at[0], peer_group))
                    self._feed((at[0], peer_group), protocol_events.Leave())
                self.ranks.pop((at[0], peer_group), None)
        else:
            return
        self.events[kind] += 1
        self.faults -= 1

    def _say_early(self, at: At) -> None:
        """Its part of the message that it would launch next, to any of its peers (early-part); some
        peer groups may not come so far.
        """
        rank = self.ranks.get(at)
        if (
            rank is None
            or rank.state != "running"
            or rank.next >= rank.landed + rank.window
            or self.random.random() < 0.2
        ):
            return
        # a newcomer that still follows has nothing of its own
        if not self._has_begun(at) or rank.next >= self._end():
            return
        # a question may come in between
        kind = self.kinds[rank.next] if self.random.random() < 0.8 else self.random.choice(KINDS)
        piece, record = Piece("early", at[0]), rank.record
        for m in rank.record.contributors(rank.next):
            if m != at[0] and self.random.random() < 0.7:
                frame = protocol_events.PieceReceived(
                    record.view, record.epoch, at[0], rank.next, kind, piece, rank.landed
                )
                self.frames.setdefault((at, (m, at[1])), []).append(frame)
                self.events["early"] += 1

    def _enter(self, m: Member, record: Record) -> None:
        self.incarnations[m.slot] += 1
        for peer_group in range(self.peer_groups):
            self.ranks[m, peer_group] = entered(
                m, peer_group, self.peer_groups, record, self.window
            )
            self.got[m, peer_group] = {}

    # ---- what a rank asks for ------------------------------------------------------------------

    def _feed(self, at: At, event: protocol_events.Event) -> bool:
        before = self.ranks.get(at)
        if before is None:
            return False
        self.ranks[at], actions = before.step(event)
        for action in actions:
            self._act(at, action)
        if at in self.ranks:
            self._check_kept(at)
        if self.ranks.get(at, before).state == "expelled":
            del self.ranks[at]  # it ends, and its links close
        return (
            any(not isinstance(a, protocol_events.TooFew) for a in actions)
            or self.ranks.get(at) != before
        )

    def _act(self, at: At, action: protocol_events.Action) -> None:
        if isinstance(action, protocol_events.Send):
            frame = protocol_events.PieceReceived(
                action.view, action.epoch, at[0], action.n, action.kind, action.piece, action.landed
            )
            for m in action.to:
                self.frames.setdefault((at, (m, at[1])), []).append(frame)
        elif isinstance(action, protocol_events.CastVote):
            self.votes += [
                ((at[0], r), protocol_events.Voted(action.ballot, action.epoch))
                for r in range(self.peer_groups)
                if r != at[1]
            ]
        elif isinstance(action, protocol_events.PostReport):
            self.reports.append(action.report)
        elif isinstance(action, protocol_events.Freeze):
            self.frozen.add(action.view)
        elif isinstance(action, protocol_events.ProposeRecord):
            if (at, action.record) not in self.questions:
                self.questions.append((at, action.record))
        elif isinstance(action, protocol_events.Deliver):
            self._delivered(at, action)
        elif isinstance(action, protocol_events.Free):
            self._freed(at, action.n)
        elif isinstance(action, protocol_events.SealAllowed):
            self._sealed(at, action.below)

    def _record(self, record: Record) -> None:
        """It is in the store. A newcomer has loaded what comes before its base."""
        old = self.records[-1]
        self.records.append(record)
        for m in set(record.members) - set(old.members):
            self._enter(m, record)
        if record.view == old.view:
            return
        self.events["change"] += 1
        self.events["counted early"] += any(s.early for s in record.settlements)
        behind = self._behind(record)
        for (m, peer_group), got in self.got.items():
            for n, outcome in got.items() if m in record.members else ():
                if n >= record.stable:
                    new = behind.settlement(n)
                    same = outcome == (new.contributors, needed(self.kinds[n], new))
                    self._check(
                        "I2",
                        same,
                        "{}, rank {}, delivered {}: {}, now {}",
                        m,
                        peer_group,
                        n,
                        outcome,
                        new,
                    )
        for n in range(record.stable, max(r.next for r in self.ranks.values()) + 1):
            before = self._behind(old).settlement(n).contributors
            grown = set(behind.settlement(n).contributors) - set(before)
            self._check("I3", not grown, "{} in record {} has {} again", n, record.epoch, grown)

    # ---- invariants ----------------------------------------------------------------------------

    def _check(self, name: str, holds: bool, text: str, *about: object) -> None:
        if not holds:
            raise Violation(name, text.format(*about))

    def _members(self) -> tuple[Member, ...]:
        return self.records[-1].members

    def _delivered(self, at: At, action: protocol_events.Deliver) -> None:
        n, outcome = action.n, (action.contributors, action.pieces)
        self._check("I2", n not in self.got[at], "{} delivers {} twice", at, n)
        self.got[at][n] = outcome
        if at[0] not in self._members():
            return
        same = all(
            got.get(n, outcome) == outcome
            for (m, _), got in self.got.items()
            if m in self._members()
        )
        self._check("I1", same, "{} delivers {} with {}", at, n, outcome)
        lacks = set(self._behind(self.records[-1]).contributors(n)) - set(outcome[0])
        self._check("I4", not lacks, "{} delivers {} without what {} gave", at, n, lacks)
        sealed = self.sealed.get(n, outcome)
        self._check(
            "I5", sealed == outcome, "{} delivers {} with {}, sealed is {}", at, n, outcome, sealed
        )

    def _freed(self, at: At, n: int) -> None:
        if n < self._base(at):
            return  # a question that this newcomer was not asked
        for m, base in zip(self.ranks[at].record.members, self.ranks[at].record.base, strict=True):
            self._check(
                "I8",
                n < base or n in self.got[m, at[1]],
                "{} frees {}, which {} has not delivered",
                at,
                n,
                m,
            )

    def _sealed(self, at: At, below: int) -> None:
        for n, outcome in self.got[at].items():
            if n < below:
                sealed = self.sealed.setdefault(n, outcome)
                self._check(
                    "I5",
                    sealed == outcome,
                    "{} seals {} as {}, sealed is {}",
                    at,
                    n,
                    outcome,
                    sealed,
                )

    def _check_kept(self, at: At) -> None:
        rank = self.ranks[at]
        if rank.state == "frozen":
            return
        self._check(
            "settle-all-open",
            len(rank.open) <= 2 * self.window or not self._beats_heard(rank),
            "{} keeps {}",
            at,
            rank.open,
        )

    def _beats_heard(self, rank: Rank) -> bool:
        """Whether it knows how far all members have landed."""
        peers = [self.ranks.get((m, rank.rank)) for m in rank.record.members]
        return all(
            p is not None and p.landed <= h or m == rank.me
            for m, p, h in zip(rank.record.members, peers, rank.heard, strict=True)
        )

    def _check_end(self) -> None:
        """I9: some epoch goes on, if anybody is left; all of its members deliver everything, with
        one history.
        """
        histories = set()
        for m, base in self._joined():
            begun = any(n >= base for n in self.got[m, 0])
            self.events["begun"] += begun
            self.events["behind"] += begun and base in self.asked
        newest = self.records[-1]
        whole = [
            (m, b)
            for m, b in zip(newest.members, newest.base, strict=True)
            if all((m, r) in self.ranks for r in range(self.peer_groups))
        ]
        if not any(self._may_go_on(m) for m, _ in whole):
            # all members crashed, but newcomers that had not begun: the run starts again from a
            # checkpoint
            self.events["all gone"] += 1
            return
        newest = self._behind(newest)
        first = max(newest.base)
        for m in newest.members:
            for peer_group in range(self.peer_groups):
                rank = self.ranks.get((m, peer_group))
                fine = rank is not None and rank.state == "running" and rank.record == newest.bare()
                fine = fine and rank is not None and rank.landed == self._end() and not rank.open
                self._check(
                    "I9",
                    fine,
                    "{}, rank {}, ends as {}; the newest record is {}",
                    m,
                    peer_group,
                    rank,
                    newest,
                )
                history = ""
                for n in range(first, self._end()):
                    history = extended(history, n, self.got[m, peer_group][n][0])
                histories.add(history)
        self._check("I1", len(histories) == 1, "members have different histories")


def storms(seeds: Any, **options: Any) -> dict[str, int]:
    """Many lives; what happened in all of them."""
    total: dict[str, int] = {}
    for seed in seeds:
        try:
            found = Storm(seed, **options).run().events
        except Violation as violation:
            raise Violation(violation.name, f"seed {seed}: {violation}") from violation
        total = {k: total.get(k, 0) + v for k, v in found.items()}
    return total
