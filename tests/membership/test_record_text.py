"""Records and reports as text: what is written reads back, and what is none is refused with its
name.
"""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_demo.files import from_json, to_json
from fsdp_demo.membership.protocol_types import (
    MOST,
    Forward,
    HeldMessage,
    Kind,
    Member,
    Piece,
    Record,
    Report,
    Settlement,
    first_record,
    needed,
    read_record,
    record_text,
)
from fsdp_demo.membership.settlement import propose
from fsdp_demo.store.connection import LARGEST

number = st.integers(0, 2**31)
members = st.builds(Member, st.integers(0, 127), st.integers(0, 50))
several = st.lists(members, max_size=6, unique=True).map(lambda found: tuple(sorted(found)))
pieces = st.builds(Piece, st.sampled_from(["body", "share", "part"]), members, number)
kinds = st.sampled_from(["gather", "mixed"])


@st.composite
def records(draw: st.DrawFn) -> Record:
    who = tuple(sorted(draw(st.lists(members, min_size=1, max_size=6, unique_by=lambda m: m.slot))))
    base = draw(st.lists(number, min_size=len(who), max_size=len(who)))
    settled = st.builds(Settlement, number, several, number, several)
    forwarded = st.builds(Forward, st.integers(0, 8), number, pieces, members, several)
    settlements, forwards = (st.lists(x, max_size=3).map(tuple) for x in (settled, forwarded))
    history = st.text(st.characters(exclude_categories=("Cs",)), max_size=16)
    parts = (settlements, forwards, number, history)
    return Record(draw(number), draw(number), who, tuple(base), *map(draw, parts))


held = st.builds(HeldMessage, number, kinds, st.booleans(), st.frozensets(pieces, max_size=4))
reports = st.builds(
    *(Report, number, members, st.integers(0, 8), several.map(frozenset), number),
    *(st.lists(held, max_size=3).map(tuple), st.booleans()),
)


@settings(max_examples=40)
@given(records())
def test_record_reads_back(record: Record) -> None:
    """A record reads back from its text, in which no byte is wasted."""
    text = record_text(record)
    assert read_record(text) == record and " " not in text.replace(json.dumps(record.history), "")
    assert read_record(text).digest() == record.digest()


def read(text: str) -> Report:
    return from_json(text, Report, "a report in the store")


@given(reports)
def test_report_reads_back(report: Report) -> None:
    """A report reads back from its text."""
    assert read(to_json(report)) == report


@given(reports, st.data())
def test_report_torn_is_refused(report: Report, data: st.DataObject) -> None:
    """The beginning of a report is no report."""
    text = to_json(report)
    with pytest.raises(ValueError, match="a report in the store cannot be read"):
        read(text[: data.draw(st.integers(0, len(text) - 1))])


RECORD = json.loads(record_text(first_record([Member(0), Member(1)])))
HELD = (HeldMessage(3, "gather", False, frozenset()),)
REPORT = json.loads(to_json(Report(0, Member(0), 0, frozenset([Member(0)]), 3, HELD)))


@pytest.mark.parametrize("text", [
    *("", "[]", "null", "7", '"epoch"', "[" * 5000),
    json.dumps({k: v for k, v in RECORD.items() if k != "base"}),
    *(json.dumps({**RECORD, **wrong}) for wrong in (
        *({"epoch": wrong} for wrong in ("later", float("inf"))),
        {"base": [0]},
        *({"members": wrong} for wrong in ("0", "", "-1", "7", "f" * 100_000, 3)),
        {"who": [[0, 0], [0, 1]]},
        {"who": [[1, 0], [0, 0]]},
        {"who": [[0, 0], [0, 0]]},
        {"who": [[0, 0], 1]},
        {"who": [[], []]},
        {"who": [[n, 0] for n in range(MOST + 1)]},
        {"settlements": [[1, "1"]]},
        {"pieces": [["body", "ab", 0]]},
        {"pieces": [["body", 2, 0]]},
        {"pieces": [["body", -1, 0]]},
        {"pieces": [["soul", 0, 0]]},
        {"forwards": [[0, 1, [[0, 0, "2"]]]]},
        {"pieces": [["body", 0, 0]], "forwards": [[0, 1, [[0, 0, "4"]]]]},
    )),
])  # fmt: skip
def test_record_malformed_is_refused(text: str) -> None:
    """Text that is no record is refused with its name."""
    with pytest.raises(ValueError, match="a record in the store cannot be read"):
        read_record(text)


@pytest.mark.parametrize("text", [
    *("", "{}", "null", "[" * 5000),
    *map(json.dumps, (
        REPORT[:5],
        [*REPORT, 0],
        [float("inf"), *REPORT[1:]],
        [0, "ab", *REPORT[2:]],
        [*REPORT[:5], [[3, "gossip", False, []]], True],
        [*REPORT[:5], [[3, "gather", False, [["body", []]]]], True],
    )),
])  # fmt: skip
def test_report_malformed_is_refused(text: str) -> None:
    """Text that is no report is refused with its name."""
    with pytest.raises(ValueError, match="a report in the store cannot be read"):
        read(text)


def large(kind: Kind) -> Record:
    """64 islands of 64 ranks: island 5 is lost while four messages are open, and each rank lacks
    half of the pieces of each.
    """
    generator, members, ranks = random.Random(0), [Member(slot, slot % 3) for slot in range(64)], 64
    old = first_record(members)
    pieces = {n: sorted(needed(kind, old.settlement(n))) for n in range(100, 104)}
    heard = frozenset(members) - {members[5]}

    def report(m: Member, rank: int) -> Report:
        half = {n: frozenset(generator.sample(of, len(of) // 2)) for n, of in pieces.items()}
        held = (HeldMessage(n, kind, False, found) for n, found in half.items())
        return Report(0, m, rank, heard, 100, tuple(held))

    reports = {m: tuple(report(m, rank) for rank in range(ranks)) for m in members if m.slot != 5}
    return propose(old, reports)


def test_record_of_64_islands_of_64_ranks_fits() -> None:
    """The record of 64 islands of 64 ranks with four open messages fits into one value of the
    store.
    """
    record = large("mixed")
    assert len(record.members) == 63 and len(record.forwards) > 64 * 4 * 60
    text = record_text(record)
    assert len(text.encode()) <= LARGEST
    assert read_record(text) == record


def test_report_of_64_islands_is_short() -> None:
    """The report of a rank among 64 islands takes at most 16 KiB."""
    members = [Member(slot) for slot in range(64)]
    pieces = needed("mixed", first_record(members).settlement(0))
    held = tuple(HeldMessage(n, "mixed", False, pieces) for n in range(100, 104))
    report = Report(9, members[0], 63, frozenset(members), 100, held)
    assert len(to_json(report)) <= 1 << 14 and read(to_json(report)) == report
