"""Every history of a few messages under `fsdp_demo.comm.membership`, up to histories that differ in nothing a rank could notice.

A state is: for each rank its machine, the frames and votes on the way to it, a record it has not adopted yet, and what it delivered;
and what was sealed by whom ever. `Explorer.run` visits every state that can be reached and checks the invariants after every step.

What is left out, and why nothing is lost by it (tests/comm/test_membership_exhaustive.py compares with `everything.py`, which leaves
out nothing, where that is small enough):

1. Steps of different ranks do not touch each other, but through what is sent. So all that a rank does in a view before it freezes is put
   before the first freeze of the change; what comes to a frozen rank later (K1) follows the freezes at once.
2. A crashed island, a stopped, a slow and an unheard one take no part in the reports of a change. All are one choice here: whose ranks
   report. What such an island did before is explored; what it does later reaches nobody who counts, but for what it seals, which it
   might as well have sealed before the change.
3. Of a change only whose reports count matters, not who suspected whom; `largest` has its own tests.
4. Ranks adopt a record at once, but for one rank at most that has voted in the old view and has not delivered: it lags for as long as
   it likes, and hears the votes of ranks that are further (K24). Who lags without having voted just receives later.
5. A vote, a beat or a share of leg 1 that completes nothing is put off until it does, or until a frame behind it is wanted.
6. Islands are alike and lines are alike: states that differ by names alone are one. Epochs are counted from the newest.
7. A state that was met with more changes left is not entered again with fewer.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from fsdp_demo.comm import moves
from fsdp_demo.comm.epochs import Kind, Member, Piece, Record, needed
from fsdp_demo.comm.membership import Rank

from .relabel import Relabel

NOW = 4
"""The newest epoch in every canonical state."""

Outcome = tuple[tuple[Member, ...], frozenset[Piece]]


class Violation(AssertionError):
    """An invariant does not hold, or nothing can happen any more. `name`: I1 to I8, or "stuck"."""

    def __init__(self, name: str, text: str):
        super().__init__(f"{name}: {text}")
        self.name = name


class Node(NamedTuple):
    """One rank and what is on the way to it. inbox: by slot of the sender. got: by number of the message."""

    machine: Rank
    inbox: tuple[tuple[moves.Received, ...], ...]
    votes: tuple[moves.Voted, ...]
    pending: Record | None
    got: tuple[Outcome | None, ...]


Nodes = list[Node | None]
Sealed = tuple[Outcome | None, ...]


class State(NamedTuple):
    nodes: tuple[Node | None, ...]
    sealed: Sealed


class Explorer:
    """`islands` x `lines` ranks, one message of each of `kinds`, at most `changes` changes.

    Args:
        launched: all messages are launched at the start; else each rank launches when it likes.
        machine: the class of the machine, for mutants.
        unchecked: names of invariants that are not checked.

    Attributes:
        states, steps: how many were visited.
    """

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        islands: int = 3,
        lines: int = 2,
        changes: int = 2,
        launched: bool = True,
        machine: type[Rank] = Rank,
        unchecked: frozenset[str] = frozenset(),
    ):
        self.kinds, self.islands, self.lines, self.changes, self.unchecked = kinds, islands, lines, changes, unchecked
        self.launched, self.machine = launched, machine
        self.states = self.steps = 0
        self.endings: set[tuple[Any, ...]] = set()
        names = itertools.product(itertools.permutations(range(islands)), itertools.permutations(range(lines)))
        self._names = list(names)
        self._relabels: dict[tuple[int, int], Relabel] = {}
        self._ids: dict[Any, int] = {None: 0}
        self._values: list[Any] = [None]
        self._renamed: dict[tuple[int, int, int], int] = {}

    # ---- the search ----------------------------------------------------------------------------------------------------------------------

    def run(self) -> Explorer:
        """Visit everything; raise the first `Violation`."""
        seen: dict[tuple[int, ...], int] = {}
        left: list[list[tuple[int, ...]]] = [[] for _ in range(self.changes + 1)]
        left[self.changes].append(self._key(self._start()))
        for budget in range(self.changes, -1, -1):
            todo = left[budget]
            while todo:
                key = todo.pop()
                if seen.get(key, -1) >= budget:
                    continue
                seen[key] = budget
                self.states += 1
                state = State(tuple(self._values[i] for i in key[:-1]), self._values[key[-1]])
                moved = False
                for after in self._steps(state):
                    moved = True
                    self.steps += 1
                    todo.append(self._key(after))
                if not moved:
                    self._check_end(state)
                if budget:
                    for after in self._changes(state):
                        self.steps += 1
                        left[budget - 1].append(self._key(after))
        return self

    def _start(self) -> State:
        members = tuple(Member(i) for i in range(self.islands))
        record, none = Record(NOW, NOW, members, (0,) * self.islands), frozenset()
        nodes: Nodes = []
        for i, line in itertools.product(range(self.islands), range(self.lines)):
            n = len(self.kinds)
            machine = self.machine(
                members[i], line, self.lines, n, 1, record, "running", none, 0, 0, 0, 0, (0,) * self.islands, (), none
            )
            nodes.append(Node(machine, ((),) * self.islands, (), None, (None,) * n))
        state = State(tuple(nodes), (None,) * len(self.kinds))
        for at, n in itertools.product(range(len(nodes)), range(len(self.kinds)) if self.launched else ()):
            state = self._apply(state, at, [moves.Launched(n, self.kinds[n])])
        return state

    # ---- canonical states ----------------------------------------------------------------------------------------------------------------

    def _id(self, value: Any) -> int:
        found = self._ids.get(value)
        if found is None:
            found = self._ids[value] = len(self._values)
            self._values.append(value)
        return found

    def _key(self, state: State) -> tuple[int, ...]:
        """The ids of the nodes and of what was sealed, under the names that make them the smallest."""
        newest = max(max(n.machine.record.epoch, n.pending.epoch if n.pending else 0) for n in state.nodes if n is not None)
        ids = [self._id(n) for n in state.nodes]
        sealed = self._id(state.sealed)
        best: tuple[int, ...] | None = None
        for number, (islands, lines) in enumerate(self._names):
            key = [0] * (len(ids) + 1)
            for at, i in enumerate(ids):
                if i:
                    island, line = divmod(at, self.lines)
                    key[islands[island] * self.lines + lines[line]] = self._rename(i, number, NOW - newest)
            key[-1] = self._rename(sealed, number, NOW - newest)
            if best is None or tuple(key) < best:
                best = tuple(key)
        assert best is not None
        return best

    def _rename(self, i: int, number: int, shift: int) -> int:
        found = self._renamed.get((i, number, shift))
        if found is None:
            name = self._relabels.get((number, shift))
            if name is None:
                name = self._relabels[number, shift] = Relabel(*self._names[number], shift)
            value = self._values[i]
            if isinstance(value, Node):
                inbox = [()] * self.islands
                for slot, frames in enumerate(value.inbox):
                    inbox[name.islands[slot]] = name(frames)
                votes = tuple(sorted(name(value.votes), key=lambda v: v.ballot))
                value = Node(name(value.machine), tuple(inbox), votes, name(value.pending), tuple(map(self._outcome(name), value.got)))
            else:
                value = tuple(map(self._outcome(name), value))
            found = self._renamed[i, number, shift] = self._id(value)
        return found

    @staticmethod
    def _outcome(name: Relabel) -> Any:
        return lambda got: None if got is None else (tuple(sorted(name(got[0]))), name(got[1]))

    # ---- steps within a view -------------------------------------------------------------------------------------------------------------

    def _steps(self, state: State) -> Iterator[State]:
        for at, node in enumerate(state.nodes):
            if node is None:
                continue
            yield from self._vote_steps(state, at, node)
            if node.pending is not None:
                yield self._adopt(state, at)
                continue
            if node.machine.next < len(self.kinds):
                n = node.machine.next
                yield self._apply(state, at, [moves.Launched(n, self.kinds[n])])
            yield from self._frame_steps(state, at, node)
            yield from self._beat_steps(state, at, node)

    def _vote_steps(self, state: State, at: int, node: Node) -> Iterator[State]:
        """A vote for what this rank has voted for itself."""
        own = {b.n for b in node.machine.ballots if b.rank == node.machine.rank}
        for vote in node.votes:
            if vote.ballot.n in own:
                nodes = list(state.nodes)
                nodes[at] = node._replace(votes=tuple(v for v in node.votes if v != vote))
                yield self._apply(state._replace(nodes=tuple(nodes)), at, [vote])

    def _frame_steps(self, state: State, at: int, node: Node) -> Iterator[State]:
        """The next frame of one sender, with the shares before it; or the last shares that were missing."""
        for slot, frames in enumerate(node.inbox):
            count = next((k for k, f in enumerate(frames) if f.piece.what != "share"), None)
            if count is not None:
                yield self._arrive(state, at, {slot: count + 1})
        for n, kind in enumerate(self.kinds):
            if kind == "gather":
                continue
            entry, settled = node.machine._entry(n), node.machine.record.settlement(n)
            missing = [m for m in settled.contributors if m not in entry.shares and m != node.machine.me]
            heads = {m.slot: node.inbox[m.slot][0] for m in missing if node.inbox[m.slot]}
            if missing and len(heads) == len(missing) and all(f.n == n and f.piece.what == "share" for f in heads.values()):
                yield self._arrive(state, at, dict.fromkeys(heads, 1))

    def _arrive(self, state: State, at: int, counts: dict[int, int]) -> State:
        nodes = list(state.nodes)
        node = nodes[at]
        assert node is not None
        events = [f for slot, count in counts.items() for f in node.inbox[slot][:count]]
        nodes[at] = node._replace(inbox=tuple(frames[counts.get(slot, 0) :] for slot, frames in enumerate(node.inbox)))
        return self._apply(state._replace(nodes=tuple(nodes)), at, events)

    def _beat_steps(self, state: State, at: int, node: Node) -> Iterator[State]:
        """Beats of all members on the line, when they say that more is stable."""
        machine = node.machine
        peers = [state.nodes[m.slot * self.lines + machine.rank] for m in machine.record.members]
        landed = min(p.machine.landed if p else 0 for p in peers)
        if landed > min(h for m, h in zip(machine.record.members, machine.heard, strict=True) if m != machine.me or len(peers) == 1):
            yield self._apply(state, at, [moves.LandedHeard(machine.record.view, m, landed) for m in machine.record.members if m != machine.me])

    def _apply(self, state: State, at: int, events: list[moves.Event]) -> State:
        """Feed events to one rank and do what it asks for."""
        nodes, sealed = list(state.nodes), list(state.sealed)
        for event in events:
            node = nodes[at]
            assert node is not None
            machine, actions = node.machine.step(event)
            nodes[at] = node._replace(machine=machine)
            for action in actions:
                self._act(nodes, sealed, at, action)
        return State(tuple(nodes), tuple(sealed))

    def _act(self, nodes: Nodes, sealed: list[Outcome | None], at: int, action: moves.Action, sends: bool = True) -> None:
        node = nodes[at]
        assert node is not None
        if isinstance(action, moves.Send) and sends:
            send(nodes, self.lines, node.machine, action)
        elif isinstance(action, moves.CastVote):
            for other in range(node.machine.me.slot * self.lines, (node.machine.me.slot + 1) * self.lines):
                sibling = nodes[other]
                if other != at and sibling is not None and sibling.got[action.ballot.n] is None:
                    nodes[other] = sibling._replace(votes=(*sibling.votes, moves.Voted(action.ballot, action.epoch)))
        elif isinstance(action, moves.Deliver):
            self._delivered(nodes, sealed, at, action)
        elif isinstance(action, moves.Free):
            self._freed(nodes, node, action.n)
        elif isinstance(action, moves.SealAllowed):
            for n in range(action.below):
                self._check("I5", sealed[n] is None or sealed[n] == node.got[n], f"{node.machine.me} seals {node.got[n]} as {n}; sealed is {sealed[n]}")
                sealed[n] = node.got[n]

    # ---- a change ------------------------------------------------------------------------------------------------------------------------

    def _changes(self, state: State) -> Iterator[State]:
        """For every set of islands: they freeze and report, the record is made, and all but at most one rank adopt it."""
        alive = [i for i in range(self.islands) if state.nodes[i * self.lines] is not None]
        for size in range(len(alive), 0, -1):
            for stay in itertools.combinations(alive, size):
                ranks = [i * self.lines + line for i in stay for line in range(self.lines)]
                if all((n := state.nodes[at]) is not None and n.pending is None for at in ranks):
                    yield from self._change(state, ranks)

    def _change(self, state: State, ranks: list[int]) -> Iterator[State]:
        nodes: Nodes = [n if at in ranks else None for at, n in enumerate(state.nodes)]
        reports = []
        for at in ranks:
            node = nodes[at]
            assert node is not None
            machine, actions = node.machine.step(moves.FrozenHeard(node.machine.record.view))
            reports += [a.report for a in actions if isinstance(a, moves.PostReport)]
            nodes[at] = node._replace(machine=machine)
        frozen = State(tuple(nodes), state.sealed)
        for late in self._late(frozen, ranks):
            records = {self._record(late, at, tuple(reports)) for at in ranks}
            for record in records:
                self._check_record(late, record)
                yield from self._adopted(late, record, ranks)

    def _late(self, state: State, ranks: list[int]) -> Iterator[State]:
        """Frames that come to frozen ranks: they must change nothing (I7)."""
        if "I7" not in self.unchecked:
            for at in ranks:
                node = state.nodes[at]
                assert node is not None
                for frame in itertools.chain(*node.inbox):
                    self._check("I7", node.machine.step(frame)[0] == node.machine, f"{node.machine.me} is frozen and takes {frame}")
            yield state
            return
        choices = []
        for at in ranks:
            node = state.nodes[at]
            assert node is not None
            prefixes = itertools.product(*(range(len(frames), -1, -1) for frames in node.inbox))
            choices.append([(at, dict(enumerate(counts))) for counts in prefixes])
        for picked in itertools.product(*choices):
            after = state
            for at, counts in picked:
                after = self._arrive(after, at, counts)
            for at in ranks:  # and so the votes pass
                node = after.nodes[at]
                assert node is not None
                for vote in node.votes:
                    after = self._apply(after, at, [vote])
            yield after

    def _record(self, state: State, at: int, reports: tuple[Any, ...]) -> Record:
        node = state.nodes[at]
        assert node is not None
        _, (action,) = node.machine.step(moves.ReportsSeen(reports, waited=True))
        assert isinstance(action, moves.ProposeRecord)
        return action.record

    def _adopted(self, state: State, record: Record, ranks: list[int]) -> Iterator[State]:
        """The record is in the store. What the adopting ranks send is on its way; at most one rank lags."""
        nodes: Nodes = [None if n is None else n._replace(inbox=((),) * self.islands, pending=replace(record, forwards=())) for n in state.nodes]
        for at in ranks:
            node = nodes[at]
            assert node is not None
            for action in node.machine.step(moves.RecordSeen(record))[1]:
                if isinstance(action, moves.Send):
                    send(nodes, self.lines, node.machine, action)
        after = State(tuple(nodes), state.sealed)
        voted = [at for at in ranks if (n := nodes[at]) and any(b.rank == n.machine.rank for b in n.machine.ballots)]
        for lags in [None, *voted]:
            done = after
            for at in ranks:
                done = self._adopt(done, at) if at != lags else done
            yield done

    def _adopt(self, state: State, at: int) -> State:
        """One rank reads the record; its sends are under way already. Votes of the old view that come now must count for nothing."""
        nodes, sealed = list(state.nodes), list(state.sealed)
        node = nodes[at]
        assert node is not None and node.pending is not None
        machine, actions = node.machine.step(moves.RecordSeen(node.pending))
        self._check("I6", machine.record == node.pending.bare(), "a rank goes on under another record than the store's")
        stale = [v for v in node.votes if v.ballot.view < node.pending.view]
        votes = tuple(v for v in node.votes if v not in stale)
        nodes[at] = node._replace(machine=machine, pending=None, votes=votes)
        for action in actions:
            self._act(nodes, sealed, at, action, sends=False)
        return self._apply(State(tuple(nodes), tuple(sealed)), at, list(stale))

    # ---- invariants ----------------------------------------------------------------------------------------------------------------------

    def _check(self, name: str, holds: bool, text: str) -> None:
        if not holds and name not in self.unchecked:
            raise Violation(name, text)

    def _delivered(self, nodes: Nodes, sealed: list[Outcome | None], at: int, action: moves.Deliver) -> None:
        node, n = nodes[at], action.n
        assert node is not None
        got = (action.contributors, action.pieces)
        self._check("I2", node.got[n] is None, f"{node.machine.me} delivers {n} twice")
        for other in nodes:
            if other is not None and other.got[n] is not None:
                self._check("I1", other.got[n] == got, f"{node.machine.me} delivers {n} with {got}, {other.machine.me} did with {other.got[n]}")
        members = {m for o in nodes if o is not None for m in (o.pending or o.machine.record).contributors(n)}
        self._check("I4", members <= set(action.contributors), f"{n} lacks what a member contributed: {got}")
        attempts = {p.attempt for p in action.pieces if p.what == "part"} or {0}
        one = [needed(self.kinds[n], node.machine.record.settlement(n)._replace(contributors=got[0], attempt=a)) for a in attempts]
        self._check("I1", one == [action.pieces], f"{node.machine.me} delivers {n} from {sorted(action.pieces)}: not one attempt, or not all of it")
        self._check("I5", sealed[n] in (None, got), f"{node.machine.me} delivers {n} with {got}; a checkpoint is sealed with {sealed[n]}")
        nodes[at] = node._replace(
            got=tuple(got if k == n else g for k, g in enumerate(node.got)), votes=tuple(v for v in node.votes if v.ballot.n != n)
        )

    def _freed(self, nodes: Nodes, node: Node, n: int) -> None:
        for m in node.machine.record.members:
            peer = nodes[m.slot * self.lines + node.machine.rank]
            self._check("I8", peer is not None and peer.got[n] is not None, f"{node.machine.me} frees {n}, which {m} has not delivered")

    def _check_record(self, state: State, record: Record) -> None:
        """I2 and I3 for what the members have delivered and how it was settled before."""
        for node in state.nodes:
            for n, kind in enumerate(self.kinds) if node is not None else ():
                if n < record.stable:
                    continue
                assert node is not None
                old, new = node.machine.record.settlement(n), record.settlement(n)
                self._check("I3", set(new.contributors) <= set(old.contributors), f"{n} was settled as {old}, now as {new}")
                same = node.got[n] in (None, (new.contributors, needed(kind, new)))
                self._check("I2", same, f"{node.machine.me} delivered {n} as {node.got[n]}, now it is settled as {new}")

    def _check_end(self, state: State) -> None:
        """Nothing can happen any more in this view: all is delivered everywhere, and freed."""
        for node in state.nodes:
            if node is not None:
                done = None not in node.got and not node.machine.open
                self._check("stuck", done, f"{node.machine.me}.{node.machine.rank} waits for ever: {node.machine.open}")
        kept: dict[int, Any] = defaultdict(set)
        for at, node in enumerate(state.nodes):
            if node is not None:
                kept[at // self.lines].add(tuple(sets(g) for g in node.got))
        self.endings.add((tuple(sorted((i, *v) for i, v in kept.items())), tuple(sets(s) for s in state.sealed)))


def sets(got: Outcome | None) -> Any:
    """Slots of the contributors alone."""
    return None if got is None else tuple(m.slot for m in got[0])


def send(nodes: Nodes, lines: int, machine: Rank, action: moves.Send) -> None:
    """Put a frame on its way to each receiver that is still there."""
    frame = moves.Received(action.view, action.epoch, machine.me, action.n, action.kind, action.piece)
    for m in action.to:
        node = nodes[m.slot * lines + machine.rank]
        if node is not None:
            inbox = list(node.inbox)
            inbox[machine.me.slot] += (frame,)
            nodes[m.slot * lines + machine.rank] = node._replace(inbox=tuple(inbox))
