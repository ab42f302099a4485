"""Records and reports as JSON, for the store. What cannot be read is a ValueError that names it.

A record names each member once, in "who" (sorted), and after that by its place there. A set of them
is a number in hexadecimal digits whose bits are those places: sets are sorted in every record.
Forwards of one message in one peer group stand together. So the record of 64 islands of 64 ranks
with four open messages, of which all pieces must be forwarded, stays below the bound of the store
(`stores.LARGEST`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated

from msgspec import Meta, Struct

from ..files import from_json, to_json, unreadable
from .protocol_types import Forward, Member, Piece, Record, Report, Settlement, What

MOST = 1024
"""Members that a record can name: lives of the islands of one run that are or were members at
once.
"""

Place = Annotated[int, Meta(ge=0)]
Places = Annotated[str, Meta(pattern="^[0-9a-f]+$", max_length=MOST // 4)]


class WrittenRecord(Struct):
    """A record as the store holds it.

    Attributes:
        settlements: message, contributors, attempt, those of them that gave theirs early.
        pieces: what, of whom, attempt. forwards: message, peer group, and for each a place among
            the pieces, the sender and the receivers.
    """

    epoch: int
    view: int
    who: Annotated[list[Member], Meta(max_length=MOST)]
    members: Places
    base: list[int]
    settlements: list[tuple[int, Places, int, Places]]
    pieces: list[tuple[What, Place, int]]
    forwards: list[tuple[int, int, list[tuple[Place, Place, Places]]]]
    stable: int
    history: str


def record_text(record: Record) -> str:
    """A record, without blanks."""
    named = {*record.members, *(m for s in record.settlements for m in (*s.contributors, *s.early))}
    who = sorted(named.union(*((f.sender, f.piece.of, *f.to) for f in record.forwards)))
    at, pieces = {m: i for i, m in enumerate(who)}, sorted({f.piece for f in record.forwards})
    piece_at = {p: i for i, p in enumerate(pieces)}

    def places(members: Iterable[Member]) -> str:
        return f"{sum(1 << at[m] for m in members):x}"

    written = WrittenRecord(
        record.epoch,
        record.view,
        who,
        places(record.members),
        list(record.base),
        [(s.n, places(s.contributors), s.attempt, places(s.early)) for s in record.settlements],
        [(p.what, at[p.of], p.attempt) for p in pieces],
        [
            (n, peer_group, [(piece_at[f.piece], at[f.sender], places(f.to)) for f in found])
            for (n, peer_group), found in groupby(record.forwards, lambda f: (f.n, f.peer_group))
        ],
        record.stable,
        record.history,
    )
    return to_json(written)


def read_record(text: str) -> Record:
    """The inverse of `record_text`.

    Raises:
        ValueError: it is none.
    """
    what = "a record in the store"
    found = from_json(text, WrittenRecord, what)
    try:
        return _read(found)
    except (ValueError, IndexError) as error:
        raise unreadable(text, what, error) from None


def _read(found: WrittenRecord) -> Record:
    who = found.who
    if who != sorted(set(who)):
        raise ValueError("its members are in no order")

    def several(places: str) -> tuple[Member, ...]:
        number = int(places, 16)
        if number >= 1 << len(who):
            raise ValueError(f"a set {places:.20} of {len(who)} members")
        return tuple(m for i, m in enumerate(who) if number >> i & 1)

    members = several(found.members)
    if not members or not len(found.base) == len(members) == len({m.slot for m in members}):
        raise ValueError("its members, or what they begin with")
    pieces = [Piece(what, who[of], attempt) for what, of, attempt in found.pieces]
    settlements = (
        Settlement(n, several(of), attempt, several(early))
        for n, of, attempt, early in found.settlements
    )
    forwards = (
        Forward(peer_group, n, pieces[piece], who[sender], several(to))
        for n, peer_group, rows in found.forwards
        for piece, sender, to in rows
    )
    return Record(
        found.epoch,
        found.view,
        members,
        tuple(found.base),
        tuple(settlements),
        tuple(forwards),
        found.stable,
        found.history,
    )


def report_text(report: Report) -> str:
    """A report, without blanks."""
    return to_json(report)


def read_report(text: str) -> Report:
    """The inverse of `report_text`.

    Raises:
        ValueError: it is none.
    """
    return from_json(text, Report, "a report in the store")
