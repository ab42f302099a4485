"""States of the membership protocol as numbers, and I1 to I8 of docs/membership.md as checks on
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fsdp_demo.membership import protocol_events
from fsdp_demo.membership.machine import Rank
from fsdp_demo.membership.protocol_types import Kind, Member, Piece, Record, needed

Outcome = tuple[tuple[Member, ...], frozenset[Piece]]


class Violation(AssertionError):
    """An invariant does not hold, or nothing can happen any more. `name`: I1 to I8, "stuck" or
    "launch".
    """

    def __init__(self, name: str, text: str):
        super().__init__(f"{name}: {text}")
        self.name = name


class Node(NamedTuple):
    """One rank and what is on the way to it. inbox: by slot of the sender. got: by number of the
    message, what it delivered. stays: whether it takes part in the next change; until: how many
    messages it has launched then."""

    machine: Rank
    inbox: tuple[tuple[protocol_events.PieceReceived, ...], ...]
    votes: tuple[protocol_events.Voted, ...]
    pending: Record | None
    got: tuple[Outcome | None, ...]
    stays: bool | None = None
    until: int = 0


Key = tuple[int, ...]
"""A state: the number of each rank's node (0: it is gone), and that of what was sealed. Equal
things have equal numbers.
"""


def remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method's result is kept for each tuple of arguments: numbers only, so that looking it up
    is fast.
    """
    name = method.__name__

    def once(self: Any, *args: Any) -> Any:
        found = self._kept.get((name, args), self)
        if found is self:
            found = self._kept[name, args] = method(self, *args)
        return found

    return once


class Invariants:
    """The checks. `_values` holds what the numbers of a key stand for; `unchecked` names what is
    not checked.
    """

    kinds: tuple[Kind, ...]
    peer_groups: int
    unchecked: frozenset[str]
    endings: set[Any]
    _values: list[Any]
    _ids: dict[Any, int]

    def _node(self, i: int) -> Node:
        return self._values[i]  # type: ignore[no-any-return]

    def _id(self, value: Any) -> int:
        found = self._ids.get(value)
        if found is None:
            found = self._ids[value] = len(self._values)
            self._values.append(value)
        return found

    def _check(self, name: str, holds: bool, text: str, *about: object) -> None:
        """`text` names what is in `about` by {}: put together only if it is said, since most of
        what is checked holds.
        """
        if not holds and name not in self.unchecked:
            raise Violation(name, text.format(*about))

    def _check_delivered(self, state: list[int], at: int, action: protocol_events.Deliver) -> None:
        """I1, I4 and I5 when a rank delivers."""
        n, got, me = action.n, (action.contributors, action.pieces), self._node(state[at]).machine
        nodes = [self._node(i) for i in state[:-1] if i]
        for other in nodes:
            same = other.got[n] in (None, got)
            self._check(
                "I1",
                same,
                "{} delivers {} with {}, {} did with {}",
                me.me,
                n,
                got,
                other.machine.me,
                other.got[n],
            )
        attempts = {p.attempt for p in action.pieces if p.what == "part"} or {0}
        whole = [
            needed(self.kinds[n], me.record.settlement(n)._replace(contributors=got[0], attempt=a))
            for a in attempts
        ]
        self._check(
            "I1",
            whole == [got[1]],
            "{} delivers {} from {}: not one attempt, or not all of it",
            me.me,
            n,
            got[1],
        )
        members = {m for o in nodes for m in (o.pending or o.machine.record).contributors(n)}
        self._check("I4", members <= set(got[0]), "{} lacks what a member contributed: {}", n, got)
        sealed = self._values[state[-1]][n]
        self._check(
            "I5",
            sealed in (None, got),
            "{} delivers {} with {}; a checkpoint is sealed with {}",
            me.me,
            n,
            got,
            sealed,
        )

    def _check_freed(self, state: list[int], at: int, n: int) -> None:
        machine = self._node(state[at]).machine
        for m in machine.record.members:
            i = state[m.slot * self.peer_groups + machine.rank]
            self._check(
                "I8",
                bool(i) and self._node(i).got[n] is not None,
                "{} frees {}, which {} has not delivered",
                machine.me,
                n,
                m,
            )

    def _sealed(self, state: list[int], at: int, below: int) -> int:
        """What is sealed when this rank may seal all messages below one."""
        node, sealed = self._node(state[at]), list(self._values[state[-1]])
        for n in range(below):
            same = sealed[n] in (None, node.got[n])
            self._check(
                "I5",
                same,
                "{} seals {} as {}; sealed is {}",
                node.machine.me,
                node.got[n],
                n,
                sealed[n],
            )
            sealed[n] = node.got[n]
        return self._id(tuple(sealed))

    def _check_record(self, key: Key, record: Record) -> None:
        """I2, I3 and I5 for what the members have delivered, how it was settled before, and what is
        sealed.
        """
        for node in (self._node(i) for i in key[:-1] if i):
            for n, kind in enumerate(self.kinds):
                if n >= record.stable:
                    old, new = node.machine.record.settlement(n), record.settlement(n)
                    got, want = node.got[n], (new.contributors, needed(kind, new))
                    self._check(
                        "I3",
                        set(new.contributors) <= set(old.contributors),
                        "{} was settled as {}, now as {}",
                        n,
                        old,
                        new,
                    )
                    self._check(
                        "I2",
                        got in (None, want),
                        "{} delivered {} as {}, now it is settled as {}",
                        node.machine.me,
                        n,
                        got,
                        new,
                    )

    def _check_end(self, key: Key) -> None:
        """Nothing can happen any more in this view: all is delivered everywhere, and freed."""
        kept: dict[int, Any] = {}
        for at, node in ((at, self._node(i)) for at, i in enumerate(key[:-1]) if i):
            done = None not in node.got and not node.machine.open
            self._check(
                "stuck",
                done,
                "{}, rank {}, waits for ever: {}",
                node.machine.me,
                node.machine.rank,
                node.machine.open,
            )
            kept[at // self.peer_groups] = tuple(_slots(got) for got in node.got)
        self.endings.add(
            (tuple(sorted(kept.items())), tuple(_slots(got) for got in self._values[key[-1]]))
        )


def _slots(got: Outcome | None) -> Any:
    return None if got is None else tuple(m.slot for m in got[0])
