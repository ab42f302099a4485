"""The short words between ranks: who is to blame for one that cannot be read, for one that cannot
be, and for an error while it is handled.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_demo import PeerLost
from fsdp_demo.elastic.failure_detector import read_note
from fsdp_demo.elastic.message_io import EarlyPieces
from fsdp_demo.elastic.newcomer import Following
from fsdp_demo.errors import WireError
from fsdp_demo.membership.protocol_types import Member

from ..support.elastic import Islands, agree, talk
from ..support.threaded import alone

A, B = Member(0), Member(1)


def spoil(where: Any, name: str) -> None:
    """The next call of a method of this rank's driver, or of a part of it, fails once."""
    plain = getattr(where, name)

    def fails(*args: Any) -> None:
        setattr(where, name, plain)
        raise KeyError("somewhere inside")

    setattr(where, name, fails)


def test_note_that_fails_here_is_not_blamed_on_a_peer(run_ranks) -> None:
    """An error while a peer's word is handled ends this island, as any other error of its network
    thread; the peer stays.
    """

    def run() -> None:
        three = Islands(3)

        def before(line: Any, n: int) -> None:
            if (line.slot, n) == (0, 3):
                spoil(line._driver.detector, "heard")

        three.run(talk(40, before=before))
        slots = agree(three.survivors(0))
        assert slots[-1] == (1, 2) and three.expelled == [(0, 0)]
        assert isinstance(three.results[0, 0], PeerLost)

    alone(run_ranks, run)


def test_note_of_a_sibling_that_fails_here_ends_the_island(run_ranks) -> None:
    """An error while the vote of another rank of the island is taken ends the island: it would
    stand for ever, and the others would wait for it.
    """

    def run() -> None:
        two = Islands(2, ranks=2)

        def before(line: Any, n: int) -> None:
            if (line.slot, n) == (1, 3) and line is two.lines[1, 0]:
                spoil(line._driver, "_take_later")

        two.run(talk(12, before=before))
        assert agree(two.survivors(1))[-1] == (0,) and (1, 0) in two.expelled

    alone(run_ranks, run)


def test_offer_that_was_put_off_is_refused() -> None:
    """An impossible offer of an early part that came while this rank was frozen loses the peer that
    made it, and not this rank.
    """
    later, refused, expected = list[Any](), list[Any](), list[Any]()
    machine = SimpleNamespace(state="frozen", landed=3, window=1)
    loop: Any = SimpleNamespace(machine=machine, later=lambda seconds, job: later.append(job))
    traffic: Any = SimpleNamespace(
        refused=lambda *args: refused.append(args), expect_early=lambda *args: expected.append(args)
    )
    pieces = EarlyPieces(loop, traffic)
    pieces.hear(10**6, "gather", B)
    pieces.hear(4, "gather", B)
    assert not refused and not expected
    machine.state = "running"
    for job in later:
        job()
    ((member, error),) = refused
    assert member == B and isinstance(error, WireError) and "1000000" in str(error)
    assert [args[:2] for args in expected] == [(B, 4)]


@pytest.mark.parametrize(
    "note",
    [
        *(b"{", b"[" * 100_000, b"[]", b"7", b"\xff", b'["beat"]', b'["beat", "x"]'),
        *(b'["early", 5, "reduce"]', b'["frozen", 1, 2]', b'["vote", 1, 2, 3]'),
    ],
)
def test_note_of_another_form_cannot_be_read(note: bytes) -> None:
    """A word with something else behind it than belongs there cannot be read."""
    with pytest.raises(ValueError):
        read_note(note)


def test_note_that_is_not_known_is_left_to_the_caller() -> None:
    """A word that is not known is read as it is."""
    assert read_note(b'["later", [1], {}]') == ["later", [1], {}]
    assert read_note(b'["stands", 3, 2]') == ["stands", 3, 2.0]


def test_newcomer_reads_a_damaged_note_as_a_lost_donor() -> None:
    """A newcomer whose donor sends what cannot be read takes it for lost, and asks another one."""
    following = Following.__new__(Following)
    following._record, following._who = None, "island 0"
    notes = SimpleNamespace(notes=deque([b'["planned", "x"]']))
    following._donor = SimpleNamespace(wires={"notes": notes})  # type: ignore[assignment]
    with pytest.raises(PeerLost, match="island 0 sent what cannot be read"):
        _ = following.planned
