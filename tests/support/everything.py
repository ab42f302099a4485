"""The membership protocol in every order, with nothing left out: for cases so small that this can
be done.

Each launch, frame, vote, beat, suspicion, crash, freeze, report, proposal and adoption is a step of
its own, of each rank, and any of them may come next. What comes out is compared with `explorer.py`,
which leaves out what its docstring argues away.

With `join`, one island more may be let in. The store may then be as late as it likes: a question on
the way to it is taken at any time, and each rank hears of a record at another time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from fsdp_demo.membership import protocol_events
from fsdp_demo.membership.machine import Rank, entered
from fsdp_demo.membership.protocol_types import Kind, Member, Record, Report, first_record

from .invariants import Outcome, Violation


class World(NamedTuple):
    """ranks: None if crashed. frames: (from, to) -> what is on the way, in order. votes: (to,
    vote). records: what the store holds. asked: records on the way to the store. joins: how many
    islands may still be let in.
    """

    ranks: tuple[Rank | None, ...]
    got: tuple[tuple[Outcome | None, ...], ...]
    frames: tuple[tuple[tuple[int, int], tuple[protocol_events.PieceReceived, ...]], ...]
    votes: frozenset[tuple[int, protocol_events.Voted]]
    reports: tuple[Report, ...]
    records: tuple[Record, ...]
    crashes: int
    asked: frozenset[Record] = frozenset()
    joins: int = 0


class Everything:
    """`islands` x `peer_groups` ranks, one message of each kind; at most `changes` records and
    `crashes` crashed islands.

    Args:
        join: whether one island more may come; its record is one of `changes`.
        questions: numbers of the messages in which a newcomer is not asked.
        window: of each rank; as many as there are messages if None.
        machine: the class of the machine, for mutants.

    Attributes:
        worlds: how many states were visited.
        endings: for each that nothing can be added to: slot and contributors delivered, of each
            member of the newest record.
    """

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        islands: int,
        peer_groups: int,
        changes: int = 1,
        crashes: int = 1,
        join: bool = False,
        questions: frozenset[int] = frozenset(),
        window: int | None = None,
        machine: type[Rank] = Rank,
    ):
        self.kinds, self.islands, self.peer_groups, self.changes, self.crashes = (
            kinds,
            islands,
            peer_groups,
            changes,
            crashes,
        )
        self.join, self.questions, self.machine = join, questions, machine
        self.window = len(kinds) if window is None else window
        self.endings: set[Any] = set()
        self.worlds = 0

    def run(self) -> Everything:
        """Visit all; raise a `Violation` of I1, I2 or "stuck"."""
        record = first_record(Member(i) for i in range(self.islands))
        ranks = tuple(r for m in record.members for r in self._entered(m, record))
        none: tuple[None, ...] = (None,) * len(self.kinds)
        start = World(
            ranks,
            (none,) * len(ranks),
            (),
            frozenset(),
            (),
            (record,),
            self.crashes,
            joins=int(self.join),
        )
        seen, todo = {start}, [start]
        while todo:
            world = todo.pop()
            self.worlds += 1
            after = [w for w in self._progress(world) if w != world]
            if not after:
                self._end(world)
            for w in itertools.chain(after, self._faults(world)):
                if w not in seen:
                    seen.add(w)
                    todo.append(w)
        return self

    def _entered(self, m: Member, record: Record) -> list[Rank]:
        made = [
            entered(m, r, self.peer_groups, record, self.window) for r in range(self.peer_groups)
        ]
        return [self.machine(**vars(rank)) for rank in made]

    def _launch(self, w: World, rank: Rank) -> protocol_events.Launched | None:
        """A newcomer first applies what comes before the message that it begins with: the others
        have delivered that.
        """
        n = rank.next if rank.begun else self._begins(rank.next)
        others = [r.landed for r in w.ranks if r is not None and r.me != rank.me and r.begun]
        if n >= len(self.kinds) or not rank.begun and n > max(others, default=n):
            return None
        if rank.begun and n >= rank.landed + rank.window:
            return None
        return protocol_events.Launched(n, self.kinds[n], n in self.questions)

    def _begins(self, base: int) -> int:
        return next(n for n in itertools.count(base) if n not in self.questions)

    def _progress(self, w: World) -> Iterator[World]:
        """All that can happen without a new fault."""
        for record in w.asked:
            yield self._written(w._replace(asked=w.asked - {record}), record)
        for at, rank in enumerate(w.ranks):
            if rank is None or rank.state == "expelled":
                continue
            if (launched := self._launch(w, rank)) is not None:
                yield self._fed(w, at, launched)
            for link, frames in w.frames:
                if link[1] == at and frames[0].epoch <= rank.record.epoch:
                    left = {**dict(w.frames), link: frames[1:]}
                    yield self._fed(w._replace(frames=_sorted(left)), at, frames[0])
            for to, vote in w.votes:
                if to == at and vote.epoch <= rank.record.epoch:
                    yield self._fed(w._replace(votes=w.votes - {(to, vote)}), at, vote)
            for m in rank.record.members:
                peer = w.ranks[m.slot * self.peer_groups + rank.rank]
                if m != rank.me and peer is not None and peer.record.view == rank.record.view:
                    yield self._fed(
                        w, at, protocol_events.LandedHeard(rank.record.view, m, peer.landed)
                    )
            if any(r.view == rank.record.view for r in w.reports):
                yield self._fed(w, at, protocol_events.FrozenHeard(rank.record.view))
            if rank.state == "frozen":
                yield self._fed(w, at, protocol_events.ReportsSeen(w.reports, waited=True))
            for record in w.records:
                if record.epoch == rank.record.epoch + 1:
                    yield self._fed(w, at, protocol_events.RecordSeen(record))

    def _faults(self, w: World) -> Iterator[World]:
        """A suspicion, right or wrong, the crash of an island, or the plan to let one in."""
        more = len(w.records) <= self.changes - self.join
        for at, rank in enumerate(w.ranks):
            if (
                rank is not None
                and rank.state == "running"
                and more
                and rank.record.epoch == w.records[-1].epoch
            ):
                for m in rank.record.members:
                    yield self._fed(w, at, protocol_events.ConnectionLost(m)) if m != rank.me else w
        first = w.ranks[0]
        if w.joins and first is not None and first.next + self.window < len(self.kinds):
            newcomer = protocol_events.JoinPlanned(Member(self.islands))
            after = self._fed(w, 0, newcomer)
            yield after._replace(joins=0) if after != w else w
        if w.crashes and more:
            for i in range(len(w.ranks) // self.peer_groups):
                ranks = tuple(
                    None if at // self.peer_groups == i else r for at, r in enumerate(w.ranks)
                )
                yield w._replace(ranks=ranks, crashes=w.crashes - 1)

    def _fed(self, w: World, at: int, event: protocol_events.Event) -> World:
        rank = w.ranks[at]
        assert rank is not None
        try:
            after, actions = rank.step(event)
        except ValueError as error:
            raise Violation("promise", str(error)) from error
        w = w._replace(ranks=(*w.ranks[:at], after, *w.ranks[at + 1 :]))
        for action in actions:
            w = self._acted(w, at, after, action)
        return w

    def _acted(self, w: World, at: int, rank: Rank, action: protocol_events.Action) -> World:
        if isinstance(action, protocol_events.Send):
            frames = dict(w.frames)
            for m in action.to:
                link = (at, m.slot * self.peer_groups + rank.rank)
                frame = protocol_events.PieceReceived(
                    action.view, action.epoch, rank.me, action.n, action.kind, action.piece
                )
                frames[link] = (*frames.get(link, ()), frame)
            return w._replace(frames=_sorted(frames))
        if isinstance(action, protocol_events.CastVote):
            first = at - at % self.peer_groups
            to = {
                (k, protocol_events.Voted(action.ballot, action.epoch))
                for k in range(first, first + self.peer_groups)
                if k != at
            }
            return w._replace(votes=w.votes | to)
        if isinstance(action, protocol_events.PostReport):
            return w._replace(reports=(*w.reports, action.report))
        if isinstance(action, protocol_events.ProposeRecord):
            if self.join:
                return w._replace(asked=w.asked | {action.record})
            return self._written(w, action.record)
        if isinstance(action, protocol_events.Deliver):
            return self._delivered(w, at, action)
        return w

    def _written(self, w: World, record: Record) -> World:
        """compare_set. A newcomer that it names is there from then on."""
        if record.epoch != len(w.records):
            return w
        new = [m for m in record.members if m.slot * self.peer_groups >= len(w.ranks)]
        ranks = [r for m in new for r in self._entered(m, record)]
        none: tuple[None, ...] = (None,) * len(self.kinds)
        return w._replace(
            records=(*w.records, record),
            ranks=(*w.ranks, *ranks),
            got=(*w.got, *(none for _ in ranks)),
        )

    def _delivered(self, w: World, at: int, action: protocol_events.Deliver) -> World:
        if w.got[at][action.n] is not None:
            raise Violation("I2", f"{action} twice")
        own = tuple(
            (action.contributors, action.pieces) if n == action.n else g
            for n, g in enumerate(w.got[at])
        )
        w = w._replace(got=(*w.got[:at], own, *w.got[at + 1 :]))
        outcomes = {w.got[k][action.n] for k in self._members(w)} - {None}
        if len(outcomes) > 1:
            raise Violation("I1", f"members deliver {action.n} differently: {outcomes}")
        return w

    def _members(self, w: World) -> list[int]:
        return [
            m.slot * self.peer_groups + peer_group
            for m in w.records[-1].members
            for peer_group in range(self.peer_groups)
        ]

    def _end(self, w: World) -> None:
        """Nothing more happens by itself: the members have all, or one of them crashed and nobody
        has noticed yet.
        """
        members = self._members(w)
        if any(w.ranks[k] is None for k in members):
            return
        newest = w.records[-1]
        bases = {m.slot: base for m, base in zip(newest.members, newest.base, strict=True)}
        for k in members:
            rank, base = w.ranks[k], self._begins(bases[k // self.peer_groups])
            base = base if bases[k // self.peer_groups] else 0
            lacks = rank is None or None in w.got[k][base:] or rank.state != "running" or rank.open
            if lacks:
                raise Violation("stuck", f"{rank}")
        sets = {
            m.slot: tuple(
                tuple(x.slot for x in got[0]) for got in w.got[m.slot * self.peer_groups] if got
            )
            for m in w.records[-1].members
        }
        self.endings.add(tuple(sorted(sets.items())))


def _sorted(
    frames: dict[tuple[int, int], tuple[protocol_events.PieceReceived, ...]],
) -> tuple[tuple[tuple[int, int], tuple[protocol_events.PieceReceived, ...]], ...]:
    return tuple(sorted((link, left) for link, left in frames.items() if left))


def renamed(endings: set[Any], islands: int) -> set[Any]:
    """Endings that differ by the names of islands alone are one."""
    return {min(_named(e, p) for p in itertools.permutations(range(islands))) for e in endings}


def _named(ending: Any, p: tuple[int, ...]) -> Any:
    return tuple(
        sorted(
            (p[slot], tuple(tuple(sorted(p[x] for x in xs)) for xs in sets))
            for slot, sets in ending
        )
    )
