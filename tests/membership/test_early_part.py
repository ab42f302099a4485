"""early-part on a bench: an island sends its part of a message that nobody has launched yet, and
leaves.
"""

from __future__ import annotations

import pytest

from fsdp_demo.membership import protocol_events
from fsdp_demo.membership.protocol_types import (
    Forward,
    Kind,
    Member,
    Piece,
    Record,
    Settlement,
    needed,
    read_record,
    record_text,
)

from ..support.bench import A, B, Bench, C

EARLY = Piece("early", C)


def early(bench: Bench, to: Member, peer_group: int, guess: Kind) -> None:
    bench.tell((to, peer_group), protocol_events.PieceReceived(0, 0, C, 0, guess, EARLY))


def left(bench: Bench) -> Record:
    """C leaves; the others settle what is open."""
    for peer_group in range(bench.peer_groups):
        bench.tell((C, peer_group), protocol_events.Leave())
        for m in (A, B):
            bench.tell((m, peer_group), protocol_events.ConnectionLost(C))
    record = bench.propose((A, 0), waited=False)
    assert record is not None and read_record(record_text(record)) == record
    bench.record = record
    bench.adopt(A, B)
    return record


@pytest.mark.parametrize("kind", ["gather", "mixed"])
@pytest.mark.parametrize("guess", ["gather", "mixed"])
@pytest.mark.parametrize("launched", [(), (A,), (A, B)])
def test_early_part_held_once_per_peer_group_counts(
    kind: Kind, guess: Kind, launched: tuple[Member, ...]
) -> None:
    """An early part that one member holds in every peer group counts, whatever kind the leaver
    takes the message to be and whoever waits in it already.
    """
    bench = Bench()
    if launched:
        bench.launch(0, kind, who=launched)
    for peer_group in (0, 1):
        early(bench, A, peer_group, guess)
    bench.let()
    record = left(bench)
    assert record.settlements == (Settlement(0, (A, B, C), 1, (C,)),)
    assert [f for f in record.forwards if f.piece == EARLY] == [
        Forward(peer_group, 0, EARLY, A, (B,)) for peer_group in (0, 1)
    ]
    wanted = needed(kind, record.settlements[0])
    assert EARLY in wanted and not wanted & {Piece("body", C), Piece("part", C, 1)}
    if waiting := [m for m in (A, B) if m not in launched]:
        bench.launch(0, kind, who=waiting)
    bench.let()
    bench.vote()
    assert bench.delivered(A) == bench.delivered(B) == ["ABC"] * 2


@pytest.mark.parametrize("kind", ["gather", "mixed"])
def test_early_part_held_in_one_peer_group_does_not_count(kind: Kind) -> None:
    """An early part that only one of two peer groups holds does not count."""
    bench = Bench()
    early(bench, A, 0, kind)
    early(bench, B, 0, kind)
    assert left(bench).settlements == ()
    bench.launch(0, kind, who=[A, B])
    bench.let()
    bench.vote()
    assert bench.delivered(A) == bench.delivered(B) == ["AB"] * 2


@pytest.mark.parametrize("kind", ["gather", "mixed"])
def test_early_part_is_awaited_before_a_part_is_made(kind: Kind) -> None:
    """B has all shares before A has forwarded the early part, and delivers nothing before it
    comes.
    """
    bench = Bench(peer_groups=1)
    early(bench, A, 0, kind)
    left(bench)
    forwarded = [f for f in bench.frames if f[2].piece == EARLY]
    bench.frames = [f for f in bench.frames if f[2].piece != EARLY]
    bench.launch(0, kind, who=[A, B])
    bench.let()
    assert bench.delivered(B) == [None]
    bench.frames += forwarded
    bench.let()
    assert bench.delivered(A) == bench.delivered(B) == ["ABC"]


def test_early_part_refused_by_a_frozen_rank() -> None:
    """A rank that has frozen takes no early part."""
    bench = Bench()
    bench.freeze(A, B, lost=(C,))
    for peer_group in (0, 1):
        early(bench, A, peer_group, "mixed")
    assert bench.ranks[A, 0].open == () and left(bench).settlements == ()
