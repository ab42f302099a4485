"""Every history of one or two open messages among three islands, and eleven mutants that must be
found.

Explored here, by `tests/support/explorer.py`, whose docstring says what is left out and why
(numbers: docs/membership.md):

* one message (gather, mixed) on 3 islands x 1 peer group, launched at any time, with
  changes that leave nobody out;
* one message (gather, mixed) on 3 islands x 2 peer groups, launched at the start, and launched at
  any time by each rank;
* two messages (all four orders of gather and mixed) on 3 islands x 1 peer group, launched at the
  start, with changes that leave nobody out;
* slow: the same one message with changes that leave nobody out, too;
* two messages (all four orders) on 3 islands x 1 peer group, launched at any time by each rank,
  with changes that leave out one or two islands;
* a mixed message before a gather on 2 islands x 2 peer groups, launched at any time, with one
  change;
* a join beside a store that answers as late as it likes, to each rank at another time, with nothing
  left out: one member and a newcomer; slow: two members and a newcomer;
* the same where questions lie at the newcomer's base and behind it: one member and a newcomer;
  slow: with two changes more, and two members and a newcomer;
* slow: two messages (all four orders of gather and mixed) on 3 islands x 2 peer groups, both
  launched, at most 2 changes that leave out one or two islands each.

"At any time" is before a change, while it goes on, or in a later view, while others hold the
message or have delivered one after it. "At most 2 crashes" are those that changes leave out; a
crash that no change follows stops an island, and the others wait as they do for a slow one. I1 to
I8 are checked after every step, and that nothing waits for ever when no more faults come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_demo.membership.protocol_types import Kind

from ..support import mutants
from ..support.everything import Everything, renamed
from ..support.explorer import Explorer
from ..support.invariants import Violation

Kinds = tuple[Kind, ...]
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
ORDERS = [
    *(("gather", "mixed"), ("mixed", "gather")),
    *(pytest.param((k, k), marks=pytest.mark.slow) for k in ("gather", "mixed")),
]


@pytest.mark.parametrize("kind, states", [("gather", 300), ("mixed", 2100)])
def test_explorer_one_message(kind: Kind, states: int) -> None:
    """Every history of one message keeps the invariants."""
    explorer = Explorer((kind,), idle=False).run()
    assert explorer.states > states and len(explorer.endings) > 3


@pytest.mark.parametrize("kind, states", [("gather", 900), ("mixed", 3400)])
def test_explorer_one_late_message_two_peer_groups(kind: Kind, states: int) -> None:
    """Every history of one late message keeps the invariants: an island, or one rank of it,
    launches only when the members have changed, once or twice; the others hold the message
    before.
    """
    assert Explorer((kind,), late="rank", idle=False).run().states > states


@pytest.mark.parametrize("kind", ["gather", "mixed"])
def test_explorer_one_message_at_any_time(kind: Kind) -> None:
    """Every history of one message that each rank launches at any time keeps the invariants."""
    assert Explorer((kind,), peer_groups=1, late="rank").run().states > 150


@pytest.mark.parametrize("kinds", ORDERS)
def test_explorer_two_messages_one_peer_group(kinds: Kinds) -> None:
    """Every history of two messages in one peer group keeps the invariants."""
    assert Explorer(kinds, peer_groups=1).run().states > 600


def test_explorer_mixed_before_gather_two_peer_groups() -> None:
    """Every history of a mixed message before a gather, on two islands, keeps the invariants."""
    assert Explorer(("mixed", "gather"), islands=2, changes=1, late="island").run().states > 2800


@pytest.mark.parametrize("kinds", ORDERS)
def test_explorer_two_late_messages_one_peer_group(kinds: Kinds) -> None:
    """Every history of two messages that each rank launches at any time keeps the invariants."""
    assert Explorer(kinds, peer_groups=1, late="rank", idle=False).run().states > 300


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kinds, states", [
    (("gather", "gather"), 24000),
    (("gather", "mixed"), 129000),
    (("mixed", "gather"), 45000),
    (("mixed", "mixed"), 181000),
])  # fmt: skip
def test_explorer_two_messages_two_peer_groups(kinds: Kinds, states: int) -> None:
    """Every history of two messages in two peer groups keeps the invariants."""
    assert Explorer(kinds, idle=False).run().states > states


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind, states", [("gather", 5600), ("mixed", 22000)])
def test_explorer_changes_that_keep_all_members(kind: Kind, states: int) -> None:
    """Every history of one message with changes that leave nobody out keeps the invariants."""
    assert Explorer((kind,)).run().states > states


# ---- nothing is lost by what is left out -------------------------------------------------------


@pytest.mark.parametrize(
    "kind, changes", [("gather", 1), ("mixed", 1), ("gather", 2), ("mixed", 2)]
)
def test_explorer_endings_are_those_of_every_order(kind: Kind, changes: int) -> None:
    """The explorer finds the endings of every order of every single step, for two islands in one
    peer group.
    """
    every = Everything((kind,), 2, 1, changes).run()
    few = Explorer((kind,), 2, 1, changes, late="rank").run()
    assert renamed(every.endings, 2) == renamed({kept for kept, _ in few.endings}, 2)
    assert every.worlds > 3 * few.states


# ---- a join beside a slow store ----------------------------------------------------------------


@pytest.mark.parametrize("islands", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("kind", ["gather", "mixed"])
def test_explorer_join_confirmed_at_any_time(kind: Kind, islands: int) -> None:
    """The store's confirmation of a join, its answer and every look at the record may come after
    any other step.
    """
    found = _joins((kind,) * 2, islands)
    newcomer = (islands, (tuple(range(islands + 1)),))
    assert any(newcomer in ending for ending in found.endings)


def _joins(kinds: Kinds, islands: int, crashes: int = 0, **options: Any) -> Everything:
    return Everything(kinds, islands, 1, crashes=crashes, join=True, window=1, **options).run()


@pytest.mark.parametrize("kind", ["gather", "mixed"])
@pytest.mark.parametrize("asked", [(1,), (1, 2), (1, 3), (2,), (2, 3)])
def test_explorer_newcomer_begins_behind_questions(kind: Kind, asked: tuple[int, ...]) -> None:
    """The first message of a newcomer lies behind the questions at its base."""
    _begins_behind(_joins((kind,) * 4, 1, questions=frozenset(asked)), asked)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind, asked", [("gather", (1, 2)), ("mixed", (1, 3))])
def test_explorer_newcomer_begins_behind_questions_in_changes(
    kind: Kind, asked: tuple[int, ...]
) -> None:
    """The first message of a newcomer lies behind the questions at its base, also while members are
    lost.
    """
    found = _joins((kind,) * 4, 1, questions=frozenset(asked), changes=3, crashes=1)
    _begins_behind(found, asked)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_explorer_newcomer_of_two_begins_behind_a_question() -> None:
    """A newcomer that joins two members begins behind the question at its base."""
    _begins_behind(_joins(("gather",) * 3, 2, questions=frozenset([1])), (1,))


def _begins_behind(found: Everything, asked: tuple[int, ...]) -> None:
    """The first message with the newcomer is no question, and while it is a member it is in all
    that come after it.
    """
    begun = set()
    for ending in map(dict, found.endings):
        with_it = [found.islands in of for of in ending.get(0, ())]
        if any(with_it):
            first = with_it.index(True)
            assert all(with_it[first:]) or found.islands not in ending
            begun.add(first)
    assert begun and not begun.intersection(asked)


# ---- mutants -----------------------------------------------------------------------------------

FOUND: list[tuple[type, Kind, int, str, set[str]]] = [
    (mutants.NoFreeze, "gather", 2, "I7", set()),
    (mutants.NoFreeze, "gather", 2, "I2", {"I7"}),
    (mutants.PeerGroupDecides, "gather", 2, "stuck", set()),
    (mutants.NoForwarding, "gather", 1, "stuck", set()),
    (mutants.NoForwarding, "mixed", 1, "stuck", set()),
    (mutants.VoteWithoutEpoch, "gather", 2, "I1", set()),
    (mutants.OwnView, "gather", 1, "stuck", set()),
    (mutants.OwnView, "gather", 2, "I1", {"stuck"}),
    (mutants.SealsAtOnce, "gather", 1, "I8", set()),
    (mutants.SealsAtOnce, "gather", 1, "I5", {"I8"}),
    (mutants.MixedMeans, "mixed", 1, "I1", set()),
]
"""Mutant, message, peer groups, what finds it, and what is not looked at, to see what comes of
it."""


LATE: dict[type, tuple[Kinds, dict[str, Any], str]] = {
    mutants.LeavesLateOut: (("gather",),
        {"late": "island", "peer_groups": 1, "unchecked": frozenset({"launch"})}, "I4"),
    mutants.BeginsAgain: (("mixed", "gather"), {"islands": 2}, "I2"),
}  # fmt: skip
"""Mutants that only these dimensions find: messages, what is explored, and what finds it."""


def found_by(name: str, explore: Callable[[], Any]) -> None:
    """Exploring breaks this invariant."""
    with pytest.raises(Violation) as found:
        explore()
    assert found.value.name == name


@pytest.mark.parametrize("mutant", LATE)
def test_explorer_finds_mutants_of_late_launches_and_order(mutant: Any) -> None:
    """Late launches, and a mixed message before a gather, find the mutants that need them."""
    kinds, options, name = LATE[mutant]
    found_by(name, lambda: Explorer(kinds, changes=1, machine=mutant, **options).run())


def test_explorer_without_late_launches_misses_these_mutants() -> None:
    """The mutants of `LATE` pass where their dimension is left out: it is needed."""
    Explorer(("gather",), peer_groups=1, changes=1, machine=mutants.LeavesLateOut).run()
    of_two = {"islands": 2, "peer_groups": 1, "changes": 1, "machine": mutants.BeginsAgain}
    Explorer(("gather", "mixed"), **of_two).run()


@pytest.mark.parametrize("mutant, kind, peer_groups, name, unchecked", FOUND)
def test_explorer_finds_mutants(
    mutant: Any, kind: Kind, peer_groups: int, name: str, unchecked: set[str]
) -> None:
    """The explorer finds each mutant by the invariant that it breaks."""
    how = {"peer_groups": peer_groups, "changes": 1, "unchecked": frozenset(unchecked)}
    found_by(name, lambda: Explorer((kind,), machine=mutant, **how).run())


def test_explorer_covers_all_mutants() -> None:
    """Each mutant stands in one of the tables above."""
    joins = {mutants.WaitsForNoStore, mutants.AsksNewcomers}
    assert {m for m, *_ in FOUND} | LATE.keys() | joins == set(mutants.MUTANTS)
    assert len(mutants.MUTANTS) == 11


def test_explorer_finds_a_donor_that_skips_the_store() -> None:
    """A donor that does not wait for the store's answer breaks its promise."""
    machine = mutants.WaitsForNoStore
    found_by("promise", lambda: _joins(("gather",) * 2, 1, machine=machine))


def test_explorer_finds_members_that_ask_newcomers() -> None:
    """Members that ask a newcomer before it has begun wait for ever."""
    machine, asked = mutants.AsksNewcomers, frozenset([1])
    found_by("stuck", lambda: _joins(("gather",) * 3, 1, questions=asked, machine=machine))
    _joins(("gather",) * 3, 1, machine=mutants.AsksNewcomers)
