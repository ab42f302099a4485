"""The notes between ranks: their bytes, and who is to blame for one that cannot be read, for one
that cannot be, and for an error while it is handled.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_demo import PeerLost
from fsdp_demo.elastic import notes
from fsdp_demo.elastic.message_io import EarlyPieces
from fsdp_demo.elastic.newcomer import Following
from fsdp_demo.errors import WireError
from fsdp_demo.membership.protocol_types import Member

from ..support.elastic import Islands, agree, talk
from ..support.inside import in_a_process

A, B = Member(0), Member(1)


def spoil(where: Any, name: str) -> None:
    """The next call of a method of this rank's driver, or of a part of it, fails once."""
    plain = getattr(where, name)

    def fails(*args: Any) -> None:
        setattr(where, name, plain)
        raise KeyError("somewhere inside")

    setattr(where, name, fails)


@in_a_process
def test_note_that_fails_here_is_not_blamed_on_a_peer() -> None:
    """An error while a peer's note is handled ends this island, as any other error of its network
    thread; the peer stays.
    """
    three = Islands(3)

    def before(line: Any, n: int) -> None:
        if (line.slot, n) == (0, 3):
            spoil(line._driver.detector, "note_next")

    three.run(talk(200, before=before))
    slots = agree(three.survivors(0))
    assert slots[-1] == (1, 2) and three.expelled == [(0, 0)]
    assert isinstance(three.results[0, 0], PeerLost)


@in_a_process
def test_note_of_a_sibling_that_fails_here_ends_the_island() -> None:
    """An error while the vote of another rank of the island is taken ends the island: it would
    stand for ever, and the others would wait for it.
    """
    two = Islands(2, ranks=2)

    def before(line: Any, n: int) -> None:
        if (line.slot, n) == (1, 3) and line is two.lines[1, 0]:
            spoil(line._driver, "_take_later")

    two.run(talk(12, before=before))
    assert agree(two.survivors(1))[-1] == (0,) and (1, 0) in two.expelled


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


FROZEN = [
    (notes.Vote(7, 1, 2, 3), '["vote",7,1,2,3]'),
    (notes.ToldToEnd(9, True, -1), '["stops",9,true,-1]'),
    (notes.Frozen(2, (0, 3)), '["frozen",2,[0,3]]'),
    (notes.Beat(12), '["beat",12]'),
    (notes.BeatWanted(), '["landed?"]'),
    (notes.Sign(), '["sign"]'),
    (notes.Stands(4, 2.5), '["stands",4,2.5]'),
    (notes.Refused("torn"), '["refused","torn"]'),
    (notes.EarlyOffered(5, "mixed"), '["early",5,"mixed"]'),
    (notes.EarlyKept(5), '["kept",5]'),
    (notes.Ends("stopped"), '["ends","stopped"]'),
    (notes.Follow({"weight": "ab"}), '["follow",{"weight":"ab"}]'),
    (notes.Ready(), '["ready"]'),
    (notes.Planned(3), '["planned",3]'),
    (notes.Joined(), '["joined"]'),
    (notes.Waits(6, 41), '["waits",6,41]'),
    (notes.Passes(41), '["passes",41]'),
]
"""A note of each kind, and its bytes: a change here is a new wire version."""


def test_note_golden_bytes() -> None:
    """The bytes of every note are frozen, and are read back as the note that they are of."""
    assert {type(note) for note, _ in FROZEN} == set(notes.Note.__subclasses__())
    for note, text in FROZEN:
        assert msgspec.json.encode(note) == text.encode()
        assert notes.read_note(text.encode()) == note


HOSTILE = [
    *(b"", b"{", b"[" * 60_000, b"[]", b"7", b"\xff", b'"beat"', b'{"beat":1}'),
    *(b'["beat"]', b'["beat",1,1]', b'["landed?",1]', b'["beat",null]', b"[1,1]"),
    *(b'["later",[1],{}]', b'["beat","x"]', b'["beat",1.5]', b'["beat",true]'),
    *(b'["beat",-1]', b'["beat",9223372036854775808]', b'["beat",1e999]'),
    *(b'["beat",' + b"9" * 60_000 + b"]", b'["beat",' + b"[" * 60_000),
    *(b'["early",5,"reduce"]', b'["frozen",1,2]', b'["frozen",1,[-1]]', b'["vote",1,2,3]'),
    *(b'["frozen",1,[' + b"1," * 2000 + b"1]]", b'["frozen",1,' + b"[" * 60_000),
    *(b'["stands",1,NaN]', b'["stands",1,-1]', b'["stands",1,1e300]', b'["stops",-2,true,0]'),
    *(b'["refused","' + b"a" * 2000 + b'"]', b'["refused","\xff"]', b'["refused","\\ud800"]'),
    *(b'["follow",{"a":1}]', b'["follow",{"a":' + b"[" * 60_000, b'["ends","fallen"]'),
]


@pytest.mark.parametrize("note", HOSTILE, ids=lambda note: note[:24].decode(errors="replace"))
def test_note_of_another_form_cannot_be_read(note: bytes) -> None:
    """What is not one of the notes, or goes beyond a bound, cannot be read, and says so in one
    short sentence.
    """
    with pytest.raises(WireError, match="^a note cannot be read .*; use one release") as error:
        notes.read_note(note)
    assert len(str(error.value)) < 400


@given(st.binary(max_size=200) | st.sampled_from([text.encode() for _, text in FROZEN]), st.data())
def test_note_of_any_bytes_is_read_or_refused(data: bytes, draw: st.DataObject) -> None:
    """Whatever is sent, reading it gives a note or a WireError."""
    at = draw.draw(st.integers(0, max(len(data) - 1, 0)))
    changed = data[:at] + draw.draw(st.binary(max_size=3)) + data[at + 1 :]
    try:
        assert isinstance(notes.read_note(changed), notes.Note)
    except WireError:
        pass


def test_newcomer_reads_a_damaged_note_as_a_lost_donor() -> None:
    """A newcomer whose donor sends what cannot be read takes it for lost, and asks another one."""
    following = Following.__new__(Following)
    following._record, following._who = None, "island 0"
    wire = SimpleNamespace(notes=deque([b'["planned", "x"]']))
    following._donor = SimpleNamespace(wires={"notes": wire})  # type: ignore[assignment]
    with pytest.raises(PeerLost, match="island 0 sent what cannot be read"):
        _ = following.planned
