"""Backup islands: every order in which the ranks of one island come to an exchange, pass it, end,
or hand a snapshot over; and when enough islands have come.

The gates are those of `elastic/late_rounds.py`. Around them stand the threads of two ranks as lists
of steps: training, the exchange thread with its queue, the network thread with the note to the
other rank. The island may die in any state: nothing that it has sent till then contradicts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_demo.elastic.late_rounds import LateRounds
from fsdp_demo.elastic.notes import Passes, Waits
from fsdp_demo.membership.protocol_types import Member, first_record

RANKS = (0, 1)
State = tuple[Any, ...]
LISTS = ("round", "at", "votes", "step", "mine", "queue", "sent", "busy", "asked", "wants")
LISTS += ("snapshots", "left")


class Broken(AssertionError):
    """An order of events after which the island has contradicted itself."""


class OneIsland:
    """Two ranks of one island, and `rounds` exchanges with the others.

    Args:
        most: passes in a row. ends: training may end ahead of any exchange. joins: an island may
            ask for a snapshot. mutant: what is done wrong.
    """

    def __init__(self, rounds: int, most: int, ends: bool, joins: bool, mutant: str):
        self.rounds, self.most, self.ends, self.joins = rounds, most, ends, joins
        self.mutant = mutant
        self.others = 0  # messages that enough others have sent
        self.round, self.at = [0, 0], ["open", "open"]  # of each rank's training
        self.votes: list[Any] = [None, None]
        self.step: list[Any] = [None, None]  # what the island has voted
        self.mine = ["", ""]  # what each does ahead of its exchange
        self.choice: Any = None  # of one rank, until the other has made it, too
        self.queue: list[tuple[str, ...]] = [(), ()]  # of the exchange threads
        self.sent: list[tuple[str, ...]] = [(), ()]  # message n is an own part, or a pass
        self.busy = [False, False]
        self.notes: tuple[int, ...] = ()  # on the way to rank 1
        self.asked = [False, False]
        self.wants = [False, False]
        self.snapshots: list[Any] = [None, None]
        self.left: list[Any] = [None, None]
        self.gates = [LateRounds(1, most), LateRounds(1, most)]

    # ---- states --------------------------------------------------------------------------------

    def dump(self) -> State:
        gates = [(g.step, g.passed, g._told, g._last, g._in_a_row) for g in self.gates]
        single = (self.others, self.choice, self.notes)
        return (*single, *(tuple(getattr(self, name)) for name in LISTS), *gates)

    def restored(self, state: State) -> OneIsland:
        found = OneIsland(self.rounds, self.most, self.ends, self.joins, self.mutant)
        found.others, found.choice, found.notes = state[:3]
        for name, value in zip(LISTS, state[3:-2], strict=True):
            setattr(found, name, list(value))
        for r, (gate, kept) in enumerate(zip(found.gates, state[-2:], strict=True)):
            gate.step, gate.passed, gate._told, gate._last, gate._in_a_row = kept
            gate._send = found.submits(r, "pass")
        return found

    def submits(self, r: int, what: str) -> Callable[[], None]:
        def submit() -> None:
            self.queue[r] = (*self.queue[r], what)

        return submit

    def delivered(self, n: int) -> bool:
        return n < self.others and all(n < len(self.sent[r]) for r in RANKS)

    # ---- what may come next --------------------------------------------------------------------

    def moves(self) -> Iterator[Callable[[OneIsland], None]]:
        n = self.others
        if n < self.rounds and (n == 0 or self.delivered(n - 1)):
            yield OneIsland.others_send
        for leads in RANKS if self.mutant == "each rank decides" else (0,):
            at = len(self.sent[leads])
            if at < self.others and (not self.asked[0] or self.mutant == "passes as a donor"):
                yield lambda s, r=leads, n=at: s.decide(r, n)
        if self.notes:
            yield OneIsland.hear
        for r in RANKS:
            if self.queue[r] and not self.busy[r]:
                yield lambda s, r=r: s.run(r)
            if self.busy[r] and self.delivered(len(self.sent[r]) - 1):
                yield lambda s, r=r: s.answered(r)
            if self.joins and not self.asked[r]:
                yield lambda s, r=r: s.asked.__setitem__(r, True)
            yield from self.trains(r)

    def trains(self, r: int) -> Iterator[Callable[[OneIsland], None]]:
        at = self.at[r]
        if at == "open":
            yield lambda s: s.open(r)
        elif at == "choose":
            options = ["go"] + ["end"] * self.ends
            handed = "snapshot" in self.queue[r] or self.snapshots[r] is not None
            options += ["snapshot"] * (self.joins and not handed)
            if self.choice is not None and self.choice[0] != r:
                options = [self.choice[1]]
            for choice in options:
                yield lambda s, choice=choice: s.choose(r, choice)
        elif at == "reads wanted":
            yield lambda s: s.reads_wanted(r)
        elif at == "votes":
            yield lambda s: s.vote(r)
        elif at == "has voted":
            yield lambda s: s.settled(r)
        elif at == "resets":
            yield lambda s: s.resets(r)
        elif at == "waits" and self.delivered(self.round[r]) and not self.busy[r]:
            yield lambda s: s.applies(r)

    # ---- the network threads, the exchange threads ---------------------------------------------

    def others_send(self) -> None:
        self.others += 1

    def decide(self, r: int, n: int) -> None:
        if self.gates[r].decide(n) and r == 0 and self.mutant != "each rank decides":
            self.notes = (*self.notes, n)

    def hear(self) -> None:
        self.gates[1].take(self.notes[0])
        self.notes = self.notes[1:]

    def run(self, r: int) -> None:
        job, self.queue[r] = self.queue[r][0], self.queue[r][1:]
        if job in ("own", "pass"):
            self.sent[r], self.busy[r] = (*self.sent[r], job), True
        else:
            getattr(self, "left" if job == "end" else "snapshots")[r] = len(self.sent[r])
            if job == "snapshot" and len(self.sent[r]) != self.round[r]:
                raise Broken(f"message {self.round[r]} is not in a snapshot, nor behind it")

    def answered(self, r: int) -> None:
        self.busy[r] = False

    # ---- training ------------------------------------------------------------------------------

    def open(self, r: int) -> None:
        self.gates[r].open(self.round[r], self.submits(r, "pass"))
        self.at[r] = "choose"

    def choose(self, r: int, choice: str) -> None:
        self.choice = None if self.choice is not None else (r, choice)
        self.mine[r] = choice
        self.at[r] = "reads wanted" if choice == "snapshot" else "votes"

    def reads_wanted(self, r: int) -> None:
        self.wants[r], self.at[r] = self.asked[r], "votes"

    def vote(self, r: int) -> None:
        if self.mine[r] == "snapshot":
            pending = self.gates[r].passed >= 0 and self.mutant != "snapshot while one is passed"
            self.votes[r] = int(not self.wants[r] or pending)
        else:
            self.votes[r] = self.gates[0].close() if r == 0 else -1
        self.at[r] = "in the vote"
        if None not in self.votes:
            self.step, self.votes = [max(self.votes)] * 2, [None, None]
            self.at = ["has voted", "has voted"]

    def settled(self, r: int) -> None:
        step, choice, self.step[r] = self.step[r], self.mine[r], None
        if self.mutant == "rank 1 goes by its own gate" and r == 1 and choice != "snapshot":
            step = self.gates[1].close()
        if choice == "snapshot":
            self.at[r] = "choose"
            if not step:
                self.submits(r, "snapshot")()
            return
        if step >= 0 and not (self.mutant == "ends without asking" and choice == "end"):
            self.gates[r].take(step)
        elif step < 0 and choice == "go":
            self.submits(r, "own")()
        self.at[r] = "resets"

    def resets(self, r: int) -> None:
        self.gates[r].step = -1
        if self.mine[r] == "end":
            self.submits(r, "end")()
            self.at[r] = "done"
        else:
            self.gates[r].passed = -1
            self.at[r] = "waits"

    def applies(self, r: int) -> None:
        self.round[r] += 1
        self.at[r] = "open" if self.round[r] < self.rounds else "done"

    # ---- what must hold ------------------------------------------------------------------------

    def check(self, stuck: bool) -> None:
        here = self.dump()
        for n, kinds in enumerate(zip(*self.sent, strict=False)):
            if len(set(kinds)) > 1:
                raise Broken(f"message {n} is {kinds}: {here}")
        if any("pass " * (self.most + 1) in " ".join((*s, "")) for s in self.sent):
            raise Broken(f"too many passes in a row: {here}")
        for what in (self.left, self.snapshots):
            if None not in what and len(set(what)) > 1:
                raise Broken(f"the ranks end, or hand over, at unlike messages {what}: {here}")
        if any(len(s) > n + 1 for s, n in zip(self.sent, self.round, strict=True)):
            raise Broken(f"more was sent than training has come to: {here}")
        if stuck and (self.at != ["done", "done"] or self.queue != [(), ()]):
            raise Broken(f"nobody can go on: {here}")


def explored(
    rounds: int = 3, most: int = 1, ends: bool = True, joins: bool = False, mutant: str = ""
) -> tuple[int, set[tuple[str, ...]]]:
    """How many states there are, all of which hold; and what rank 0 may send in all."""
    first = OneIsland(rounds, most, ends, joins, mutant)
    todo, seen, endings = [first.dump()], {first.dump()}, set[tuple[str, ...]]()
    while todo:
        here = first.restored(todo.pop())
        moves = list(here.moves())
        here.check(stuck=not moves)
        if not moves:
            endings.add(here.sent[0])
        for move in moves:
            after = first.restored(here.dump())
            move(after)
            if (state := after.dump()) not in seen:
                seen.add(state)
                todo.append(state)
    return len(seen), endings


@pytest.mark.parametrize(
    ("most", "joins"), [(1, False), (2, False), pytest.param(1, True, marks=pytest.mark.slow)]
)
def test_late_rounds_every_order(most: int, joins: bool) -> None:
    """In every order of events all ranks of an island pass an exchange or none, at most `most` in a
    row; each sends one message for each exchange; they end, and hand a snapshot over, at the same
    message; and training always goes on.
    """
    states, endings = explored(most=most, joins=joins, ends=not joins)
    whole = {e for e in endings if len(e) == 3}
    wanted = {("own",) * 3, ("pass", "own", "pass"), ("own", "pass", "own")}
    assert states > 5000 and wanted <= whole and (("pass", "pass", "own") in whole) == (most == 2)


ENDS = ("each rank decides", "rank 1 goes by its own gate", "ends without asking")
JOINS = ("snapshot while one is passed", "passes as a donor")


@pytest.mark.parametrize("mutant", [*ENDS, *JOINS])
def test_late_rounds_wrong_ones_are_found(mutant: str) -> None:
    """The exploration finds what is wrong in five simpler agreements."""
    with pytest.raises(Broken):
        explored(rounds=2, ends=mutant in ENDS, joins=mutant in JOINS, mutant=mutant)


class Network:
    """The loop of the first rank of island 0 among four, all of which have delivered message 0."""

    def __init__(self, backup: int, rank: int = 0):
        self.machine: Any = SimpleNamespace(
            me=A, rank=rank, next=1, state="running", begun=True, record=first_record(MEMBERS)
        )
        self.detector: Any = SimpleNamespace(notes={}, siblings={1: "rank 1"}, send=self.send)
        self.said: list[Any] = []
        self.rounds = LateRounds(backup, most=1)
        self.rounds.loop = cast(Any, self)
        self.rounds.open(7, lambda: self.said.append("pass"))

    def send(self, note: Any, to: Any) -> None:
        self.said.append((note, list(to)))

    def come(self, *members: Member, n: int = 1, step: int = 7) -> None:
        for m in members:
            self.rounds.hear(Waits(n, step), m)

    def passes(self, busy: bool = False) -> bool:
        """Whether it passes, within two beats."""
        for _ in range(2):
            self.rounds.look(busy)
        return bool(self.said)


MEMBERS = A, B, C, D = tuple(map(Member, range(4)))
PASSED = ["pass", (Passes(7), ["rank 1"])]


def test_late_rounds_enough_have_come() -> None:
    """An island passes when all but `backup_islands` contribute, at the second beat, and tells its
    other ranks; one that comes for another message, or is no member any more, does not count.
    """
    network = Network(backup=1)
    network.come(B, C)
    assert not network.passes()
    network.come(D, n=0)
    assert not network.passes()
    network.come(D)
    network.rounds.look(busy=False)
    assert not network.said
    network.rounds.look(busy=False)
    assert network.said == PASSED
    fewer = Network(backup=1)
    fewer.come(B, D)
    assert not fewer.passes()
    fewer.machine.record = first_record((A, B, C))  # D is lost, and what it has said with it
    assert not fewer.passes()
    fewer.machine.record = first_record((A, B))
    assert fewer.passes()


@pytest.mark.parametrize(
    "but",
    ["busy", "frozen", "not begun", "rank 1", "unlike steps", "training came", "in a row"],
)
def test_late_rounds_no_pass(but: str) -> None:
    """An island does not pass while it is a donor or stops, while members change, before its first
    own part, by another rank than the first, where steps are unlike, when its training has come,
    and not twice in a row.
    """
    network = Network(backup=3, rank=int(but == "rank 1"))
    rounds = network.rounds
    network.come(B)
    network.machine.state = "frozen" if but == "frozen" else "running"
    network.machine.begun = but != "not begun"
    if but == "unlike steps":
        network.come(C, step=8)
    if but == "training came":
        assert rounds.close() == -1
    if but == "in a row":
        assert network.passes() and rounds.close() == 7
        rounds.passed = -1
        rounds.open(11, lambda: None)
        network.machine.next, network.said = 2, []
        network.come(B, n=2, step=11)
    assert not network.passes(but == "busy")


def test_late_rounds_told_before_it_is_open() -> None:
    """A rank that hears of a pass while it still applies what comes before, passes when it has; it
    forgets what it hears too late.
    """
    rounds, sent = LateRounds(1, most=1), list[int]()
    rounds.open(3, lambda: sent.append(3))
    rounds.take(7)
    rounds.take(3)
    rounds.take(3)
    assert sent == [3] and rounds.passed == 3
    rounds.passed = -1
    rounds.take(3)
    rounds.open(7, lambda: sent.append(7))
    assert sent == [3, 7] and rounds.close() == 7
