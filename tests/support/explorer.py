"""Every history of a few messages under `fsdp_demo.membership.machine`, up to histories that differ
in nothing a rank could notice.

A state is: for each rank its machine, the frames and votes on the way to it, a record it has not
adopted yet, and what it delivered; and what was sealed by whom ever. `Explorer.run` visits every
state that can be reached and checks the invariants after every step.

What is left out, and why nothing is lost by it (tests/membership/test_explorer.py compares
with `everything.py`, which leaves out nothing, where that is small enough):

1. Steps of different ranks do not touch each other, but through what is sent. So all that a rank
   does in a view before it freezes is put before the first freeze of the change; what comes to a
   frozen rank later (freeze-first) follows the freezes at once.
2. A crashed island, a stopped, a slow and an unheard one take no part in the reports of a change.
   All are one choice here: whose ranks report. What such an island did before is explored; what it
   does later reaches nobody who counts, but for what it seals, which it might as well have sealed
   before the change.
3. Of a change only whose reports count matters, not who suspected whom; `largest` has its own
   tests.
4. Ranks adopt a record at once, but for one rank at most that has voted in the old view and has not
   delivered: it lags for as long as it likes, and hears the votes of ranks that are further
   (vote-with-view). Who lags without having voted just receives later.
5. A vote, a beat or a share of leg 1 that completes nothing is put off until it does, or until a
   frame behind it is wanted.
6. A message that a rank launches before a change is launched when the view begins; what it receives
   before it launches may as well come later. Else it is launched in a later view, and that while it
   is frozen comes to the same as when it has adopted: checked.
7. Islands are alike and peer groups are alike: states that differ by names alone are one. Epochs
are
   counted from the newest.
8. A state that was met with more changes left is not entered again with fewer.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from fsdp_demo.membership import protocol_events
from fsdp_demo.membership.machine import Rank
from fsdp_demo.membership.protocol_types import Kind, Member, Record

from .invariants import Invariants, Key, Node, remembered
from .relabel import Relabel, outcome

NOW = 4
"""The newest epoch in every canonical state."""

Local = tuple[int, tuple[protocol_events.Action, ...]]
"""What becomes of one rank in a step, and what it asks for."""


class Explorer(Invariants):
    """`islands` x `peer_groups` ranks, one message of each of `kinds`, at most `changes` changes.

    Args:
        late: who may launch a message in a later view than others do. Nobody: all is launched at
            the start; "island": the ranks of an island alike; "rank": each rank for itself.
        idle: also changes that leave nobody out.
        machine: the class of the machine, for mutants.
        unchecked: names of invariants that are not checked.

    Attributes:
        states, steps: how many were visited.
        endings: what came out: for each island that stayed, whose contributions it delivered; and
            the same of what was sealed.
    """

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        islands: int = 3,
        peer_groups: int = 2,
        changes: int = 2,
        late: Literal["nobody", "island", "rank"] = "nobody",
        idle: bool = True,
        machine: type[Rank] = Rank,
        unchecked: frozenset[str] = frozenset(),
    ):
        self.kinds, self.islands, self.peer_groups, self.changes, self.unchecked = (
            kinds,
            islands,
            peer_groups,
            changes,
            unchecked,
        )
        self.late, self.idle, self.machine = late, idle, machine
        self.states = self.steps = 0
        self.endings: set[Any] = set()
        names = list(
            itertools.product(
                itertools.permutations(range(islands)), itertools.permutations(range(peer_groups))
            )
        )
        self._names = [Relabel(i, peer_group, 0) for i, peer_group in names]
        at = [(i, peer_group) for i in range(islands) for peer_group in range(peer_groups)]
        self._orders = [
            [at.index((i.index(a), peer_group.index(b))) for a, b in at] for i, peer_group in names
        ]
        self._ids: dict[Any, int] = {None: 0}
        self._values: list[Any] = [None]
        self._renamed: dict[int, tuple[int, ...]] = {0: (0,) * len(names)}
        self._kept: dict[Any, Any] = {}

    # ---- the search ----------------------------------------------------------------------------

    def run(self) -> Explorer:
        """Visit everything; raise the first `Violation`."""
        # there are no circles: the collector would look through millions of values, again and again
        gc.disable()
        try:
            self._search()
        finally:
            gc.enable()
        return self

    def _search(self) -> None:
        seen: dict[Key, int] = {}
        entered: list[dict[Key, None]] = [{} for _ in range(self.changes + 1)]
        entered[self.changes][self._named(self._start())] = None
        for budget in range(self.changes, -1, -1):
            todo: list[Key] = []
            for key in entered[budget]:
                if seen.get(key, -1) < budget:
                    seen[key] = budget
                    self._check_end(self._run_out(key))
                    todo += (self._named(k) for k in self._futures(key)) if budget else ()
            while todo:
                key = todo.pop()
                if seen.get(key, -1) < budget:
                    seen[key] = budget
                    after = {self._named(self._run_out(k)) for k in self._steps(key)}
                    todo += after
                    stay = (*(i if i and self._node(i).stays else 0 for i in key[:-1]), key[-1])
                    changed = {self._named(k) for k in self._change(stay)}
                    entered[budget - 1].update(dict.fromkeys(changed))
                    self.steps += len(after) + len(changed)
        self.states = len(seen)

    def _futures(self, key: Key) -> Iterator[Key]:
        """For every set of islands that may be the members after the next change, and all that
        their ranks may launch before it: the state with these marked, the others run ahead."""
        alive, found = (
            [i for i in range(self.islands) if key[i * self.peer_groups]],
            dict[Key, None](),
        )
        for size in range(len(alive) if self.idle else len(alive) - 1, 0, -1):
            for stay in itertools.combinations(alive, size):
                for until in self._launches(key, stay):
                    state = (
                        *(
                            self._marked(i, at // self.peer_groups in stay, until.get(at, 0))
                            for at, i in enumerate(key[:-1])
                        ),
                        key[-1],
                    )
                    for at in until:
                        state = self._done(state, at, *self._launched(state[at]))
                    found[self._named(state)] = None
        return map(self._run_out, found)

    def _launches(self, key: Key, stay: tuple[int, ...]) -> Iterator[dict[int, int]]:
        """How many messages each rank of these islands has launched at the next change. It launches
        them at once.
        """
        ranks = [
            i * self.peer_groups + peer_group
            for i in stay
            for peer_group in range(self.peer_groups)
        ]
        each = [range(self._node(key[at]).machine.next, len(self.kinds) + 1) for at in ranks]
        for counts in itertools.product(*each) if self.late != "nobody" else ():
            by_island = [
                counts[k : k + self.peer_groups] for k in range(0, len(counts), self.peer_groups)
            ]
            if self.late == "rank" or all(len(set(of)) == 1 for of in by_island):
                yield dict(zip(ranks, counts, strict=True))
        if self.late == "nobody":
            yield dict.fromkeys(ranks, len(self.kinds))

    @remembered
    def _marked(self, i: int, stays: bool, until: int) -> int:
        return self._id(self._node(i)._replace(stays=stays, until=until)) if i else 0

    @remembered
    def _launched(self, i: int) -> Local:
        """The rank launches what it launches in this view; one that lags does so when it has
        adopted its record.
        """
        node = self._node(i)
        numbers = range(node.machine.next, node.until) if node.pending is None else ()
        return self._fed(i, tuple(protocol_events.Launched(n, self.kinds[n]) for n in numbers))

    def _run_out(self, key: Key) -> Key:
        """All that the islands do which are not marked to stay, in one order: a rank that lags
        adopts last.
        """
        while (after := self._eager(key)) is not None:
            key = after
        return key

    def _eager(self, key: Key) -> Key | None:
        last = None
        for at, i in enumerate(key[:-1]):
            if not i or self._node(i).stays:
                continue
            own = self._own(i)
            if own and self._node(i).pending is not None and len(own) == 1:
                last = at
            elif own:
                return self._done(key, at, *own[0])
            elif (beaten := self._beat(key, at)) is not None:
                return beaten
        return None if last is None else self._done(key, last, *self._own(key[last])[0])

    def _start(self) -> Key:
        members = tuple(Member(i) for i in range(self.islands))
        record = Record(NOW, NOW, members, (0,) * self.islands)
        heard, n = (0,) * self.islands, len(self.kinds)
        key = []
        for i, peer_group in itertools.product(range(self.islands), range(self.peer_groups)):
            machine = self.machine(
                members[i], peer_group, self.peer_groups, n, 1, record, 0, 0, 0, 0, heard
            )
            key.append(self._id(Node(machine, ((),) * self.islands, (), None, (None,) * n)))
        state = (*key, self._id((None,) * n))
        for at, k in itertools.product(range(len(key)), range(n) if self.late == "nobody" else ()):
            state = self._done(
                state, at, *self._fed(state[at], (protocol_events.Launched(k, self.kinds[k]),))
            )
        return state

    # ---- names ---------------------------------------------------------------------------------

    def _named(self, key: Key) -> Key:
        """The same state under the names that make its numbers the smallest."""
        all_names = []
        for i in key:
            names = self._renamed.get(i)
            if names is None:
                names = self._renamed[i] = tuple(
                    self._id(self._rename(self._values[i], name)) for name in self._names
                )
            all_names.append(names)
        last = all_names[-1]
        return min(
            (*[all_names[at][k] for at in order], last[k]) for k, order in enumerate(self._orders)
        )

    def _rename(self, value: Any, name: Relabel) -> Any:
        if not isinstance(value, Node):
            return tuple(outcome(got, name) for got in value)
        inbox: list[Any] = [()] * self.islands
        for slot, frames in enumerate(value.inbox):
            inbox[name.islands[slot]] = name(frames)
        votes = tuple(sorted(name(value.votes), key=lambda v: v.ballot))
        got = tuple(outcome(got, name) for got in value.got)
        return Node(
            name(value.machine),
            tuple(inbox),
            votes,
            name(value.pending),
            got,
            value.stays,
            value.until,
        )

    # ---- steps within a view -------------------------------------------------------------------

    def _steps(self, key: Key) -> Iterator[Key]:
        for at, i in enumerate(key[:-1]):
            if i and self._node(i).stays:
                for after, actions in self._own(i):
                    yield self._done(key, at, after, actions)
                if (beaten := self._beat(key, at)) is not None:
                    yield beaten

    @remembered
    def _own(self, i: int) -> list[Local]:
        return list(self._own_steps(i))

    def _own_steps(self, i: int) -> Iterator[Local]:
        """What can happen on one rank next."""
        node = self._node(i)
        voted = {b.n for b in node.machine.ballots if b.rank == node.machine.rank}
        for vote in node.votes:
            if vote.ballot.n in voted:
                yield self._fed(
                    self._id(node._replace(votes=tuple(v for v in node.votes if v != vote))),
                    (vote,),
                )
        if node.pending is not None:
            yield self._adopt(i)
            return
        if node.machine.next < len(self.kinds) and not node.stays:
            yield self._fed(
                i, (protocol_events.Launched(node.machine.next, self.kinds[node.machine.next]),)
            )
        # the next frame of one sender, with the shares before it
        for slot, frames in enumerate(node.inbox):
            count = next((k for k, f in enumerate(frames) if f.piece.what != "share"), None)
            if count is not None:
                yield self._arrived(i, {slot: count + 1})
        for n, kind in enumerate(self.kinds):  # the last shares that were missing
            settled, have = node.machine.record.settlement(n), node.machine._entry(n).shares
            missing = (
                [m for m in settled.contributors if m not in have and m != node.machine.me]
                if kind != "gather"
                else []
            )
            heads = [node.inbox[m.slot][0] for m in missing if node.inbox[m.slot]]
            if (
                missing
                and len(heads) == len(missing)
                and all(f.n == n and f.piece.what == "share" for f in heads)
            ):
                yield self._arrived(i, {m.slot: 1 for m in missing})

    def _arrived(self, i: int, counts: dict[int, int]) -> Local:
        """So many frames of each slot come."""
        node = self._node(i)
        inbox = tuple(frames[counts.get(slot, 0) :] for slot, frames in enumerate(node.inbox))
        return self._fed(
            self._id(node._replace(inbox=inbox)),
            tuple(f for slot, c in counts.items() for f in node.inbox[slot][:c]),
        )

    def _beat(self, key: Key, at: int) -> Key | None:
        """Beats of all members in the peer group, when they say that more is stable."""
        peers, freed = self._beats(key[at])
        if peers and (landed := min(self._landed(key[i]) for i in peers)) > freed:
            after, actions = self._beaten(key[at], landed)
            return self._done(key, at, after, actions) if after != key[at] else None
        return None

    @remembered
    def _beats(self, i: int) -> tuple[tuple[int, ...], int]:
        """Where the members of this rank's peer group are, and what it has freed; nowhere, if it
        has not adopted its record.
        """
        node = self._node(i)
        members = node.machine.record.members if node.pending is None else ()
        return tuple(
            m.slot * self.peer_groups + node.machine.rank for m in members
        ), node.machine.freed

    @remembered
    def _landed(self, i: int) -> int:
        return self._node(i).machine.landed if i else 0

    @remembered
    def _beaten(self, i: int, landed: int) -> Local:
        machine = self._node(i).machine
        beats = (
            protocol_events.LandedHeard(machine.record.view, m, landed)
            for m in machine.record.members
            if m != machine.me
        )
        return self._fed(i, tuple(beats))

    def _fed(self, i: int, events: tuple[protocol_events.Event, ...]) -> Local:
        """One rank after these events, and all it asks for."""
        node, asked = self._node(i), []
        machine, got = node.machine, list(node.got)
        for event in events:
            machine, actions = machine.step(event)
            for action in actions:
                if isinstance(action, protocol_events.Deliver):
                    self._check(
                        "I2", got[action.n] is None, "{} delivers {} twice", machine.me, action.n
                    )
                    got[action.n] = (action.contributors, action.pieces)
                asked.append(action)
        votes = tuple(v for v in node.votes if got[v.ballot.n] is None)
        return self._id(node._replace(machine=machine, votes=votes, got=tuple(got))), tuple(asked)

    def _done(
        self, key: Key, at: int, after: int, actions: tuple[protocol_events.Action, ...]
    ) -> Key:
        """The state when one rank has become `after` and what it asks for is done."""
        state = [*key]
        state[at] = after
        for action in actions:
            if isinstance(action, protocol_events.Send):
                self._send(state, at, action)
            elif isinstance(action, protocol_events.CastVote):
                self._cast(state, at, action)
            elif isinstance(action, protocol_events.Deliver):
                self._check_delivered(state, at, action)
            elif isinstance(action, protocol_events.Free):
                self._check_freed(state, at, action.n)
            elif isinstance(action, protocol_events.SealAllowed):
                state[-1] = self._sealed(state, at, action.below)
        return tuple(state)

    def _send(self, state: list[int], at: int, action: protocol_events.Send) -> None:
        machine = self._node(state[at]).machine
        frame = self._id(
            protocol_events.PieceReceived(
                action.view, action.epoch, machine.me, action.n, action.kind, action.piece
            )
        )
        for m in action.to:
            to = m.slot * self.peer_groups + machine.rank
            state[to] = self._sent(state[to], machine.me.slot, frame) if state[to] else 0

    @remembered
    def _sent(self, i: int, slot: int, frame: int) -> int:
        node = self._node(i)
        inbox = (
            *node.inbox[:slot],
            (*node.inbox[slot], self._values[frame]),
            *node.inbox[slot + 1 :],
        )
        return self._id(node._replace(inbox=inbox))

    def _cast(self, state: list[int], at: int, action: protocol_events.CastVote) -> None:
        first, vote = (
            at - at % self.peer_groups,
            self._id(protocol_events.Voted(action.ballot, action.epoch)),
        )
        for to in range(first, first + self.peer_groups):
            if to != at and state[to]:
                state[to] = self._told(state[to], vote)

    @remembered
    def _told(self, i: int, vote: int) -> int:
        """A vote is on its way to this rank, if it has not delivered."""
        node, voted = self._node(i), self._values[vote]
        votes = tuple(sorted({*node.votes, voted}, key=lambda v: v.ballot))
        return i if node.got[voted.ballot.n] is not None else self._id(node._replace(votes=votes))

    # ---- a change ------------------------------------------------------------------------------

    @remembered
    def _change(self, key: Key) -> list[Key]:
        """A change in which these report that are there."""
        ranks = [at for at, i in enumerate(key[:-1]) if i]
        if any(self._node(key[at]).pending is not None for at in ranks):
            return []
        frozen = [self._frozen(i) if i else (0, 0) for i in key[:-1]]
        reports = tuple(report for _, report in frozen if report)
        found: list[Key] = []
        for late in self._late((*(i for i, _ in frozen), key[-1]), ranks):
            found += self._settled((*(self._stopped(i) for i in late[:-1]), late[-1]), reports)
        return found

    @remembered
    def _settled(self, key: Key, reports: tuple[int, ...]) -> list[Key]:
        """All that may come of these frozen ranks. What one of them proposes is a function of
        record and reports, but for a mutant.
        """
        ranks, found = [at for at, i in enumerate(key[:-1]) if i], []
        alike = self.machine._proposal is Rank._proposal
        for record in {self._record(key[at], reports) for at in (ranks[:1] if alike else ranks)}:
            self._check_record(key, self._values[record])
            found += self._adopted(key, record, ranks)
        return found

    @remembered
    def _stopped(self, i: int) -> int:
        """Of a frozen rank what counts for the next view: no frame of this one, and no share."""
        if not i:
            return 0
        node = self._node(i)
        opened = tuple(replace(e, shares=frozenset()) for e in node.machine.open)
        return self._id(
            node._replace(machine=replace(node.machine, open=opened), inbox=((),) * self.islands)
        )

    @remembered
    def _frozen(self, i: int) -> tuple[int, int]:
        """The rank when it has frozen, and its report."""
        after, actions = self._fed(
            i, (protocol_events.FrozenHeard(self._node(i).machine.record.view),)
        )
        (report,) = (a.report for a in actions if isinstance(a, protocol_events.PostReport))
        return after, self._id(report)

    def _late(self, key: Key, ranks: list[int]) -> Iterator[Key]:
        """Frames that come to frozen ranks: they must change nothing (I7). Where that is not
        checked, they come as they like.
        """
        if "I7" not in self.unchecked:
            for at in ranks:
                self._deaf(key[at])
            yield key
            return
        prefixes = [
            list(itertools.product(*(range(len(f), -1, -1) for f in self._node(key[at]).inbox)))
            for at in ranks
        ]
        for picked in itertools.product(*prefixes):
            after = key
            for at, counts in zip(ranks, picked, strict=True):
                after = self._done(after, at, *self._arrived(after[at], dict(enumerate(counts))))
            for at in ranks:  # and so the votes pass
                after = self._done(after, at, *self._fed(after[at], self._node(after[at]).votes))
            yield after

    @remembered
    def _deaf(self, i: int) -> None:
        node = self._node(i)
        for frame in itertools.chain(*node.inbox):
            self._check(
                "I7",
                node.machine.step(frame)[0] == node.machine,
                "{} is frozen and takes {}",
                node.machine.me,
                frame,
            )

    @remembered
    def _record(self, i: int, reports: tuple[int, ...]) -> int:
        """What this rank proposes."""
        (action,) = self._node(i).machine.step(
            protocol_events.ReportsSeen(tuple(self._values[r] for r in reports), waited=True)
        )[1]
        assert isinstance(action, protocol_events.ProposeRecord)
        return self._id(replace(action.record, history=""))

    def _adopted(self, key: Key, record: int, ranks: list[int]) -> Iterator[Key]:
        """The record is in the store. What the adopting ranks send is on its way; at most one rank
        lags.
        """
        state = [*key]
        for at in ranks:
            state[at] = self._pending(key[at], record)
        for at in ranks:
            self._late_launch(key[at], record)
            for action in self._adopting(key[at], record):
                self._send(state, at, action)
        for lags in [None, *(at for at in ranks if self._waits(key[at]))]:
            after = tuple(state)
            for at in ranks:
                after = self._done(after, at, *self._adopt(after[at])) if at != lags else after
            shift = NOW - self._values[record].epoch
            yield tuple(self._shifted(i, shift) for i in after)

    @remembered
    def _pending(self, i: int, record: int) -> int:
        """The rank when the record is in the store."""
        return self._id(
            self._node(i)._replace(
                pending=replace(self._values[record], forwards=()), stays=None, until=0
            )
        )

    @remembered
    def _adopting(self, i: int, record: int) -> list[protocol_events.Send]:
        """What the rank sends when it adopts the record."""
        return [
            a
            for a in self._node(i).machine.step(protocol_events.RecordSeen(self._values[record]))[1]
            if isinstance(a, protocol_events.Send)
        ]

    @remembered
    def _late_launch(self, i: int, record: int) -> None:
        """What is launched while the rank is frozen comes to the same as what is launched when it
        has adopted.
        """
        machine, seen = self._node(i).machine, protocol_events.RecordSeen(self._values[record])
        launches = [
            protocol_events.Launched(n, self.kinds[n]) for n in range(machine.next, len(self.kinds))
        ]
        before, after = ([*launches, seen], [seen, *launches]) if launches else ([], [])
        (one, sent), (two, later) = self._after(machine, before), self._after(machine, after)
        self._check(
            "launch", (one, sent) == (two, later), "{}: sent {} or {}", machine.me, sent, later
        )

    def _after(self, machine: Rank, events: list[Any]) -> tuple[Rank, list[protocol_events.Action]]:
        asked: list[protocol_events.Action] = []
        for event in events:
            machine, actions = machine.step(event)
            asked += actions
        return machine, sorted(asked, key=repr)

    @remembered
    def _waits(self, i: int) -> bool:
        """Whether the rank has voted for something that it has not delivered."""
        machine = self._node(i).machine
        return any(b.rank == machine.rank for b in machine.ballots)

    @remembered
    def _adopt(self, i: int) -> Local:
        """One rank reads the record; its sends are under way already. Votes of the old view that
        come now must count for nothing.
        """
        node = self._node(i)
        assert node.pending is not None
        stale = tuple(v for v in node.votes if v.ballot.view < node.pending.view)
        votes = tuple(v for v in node.votes if v not in stale)
        after, actions = self._fed(
            self._id(node._replace(votes=votes, pending=None)),
            (protocol_events.RecordSeen(node.pending),),
        )
        self._check(
            "I6",
            self._node(after).machine.record == node.pending.bare(),
            "a rank goes on under another record than the store's",
        )
        actions = tuple(a for a in actions if not isinstance(a, protocol_events.Send))
        after, launched = self._launched(after) if node.stays else (after, ())
        after, more = self._fed(after, stale)
        return after, (*actions, *launched, *more)

    @remembered
    def _shifted(self, i: int, shift: int) -> int:
        """Epochs counted so that the newest is NOW again."""
        name = Relabel(tuple(range(self.islands)), tuple(range(self.peer_groups)), shift)
        return self._id(self._rename(self._values[i], name)) if i else 0
