"""Records and reports as JSON, for the store. What cannot be read is a ValueError that names it.

A record names each member once, in "who" (sorted), and after that by its place there. A set of them
is a number in hexadecimal digits whose bits are those places: sets are sorted in every record.
Forwards of one message in one peer group stand together. So the record of 64 islands of 64 ranks
with four open messages, of which all pieces must be forwarded, stays below the bound of the store
(`stores.LARGEST`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, get_args

from ..errors import UNREADABLE
from .epochs import Forward, Held, Kind, Member, Piece, Record, Report, Settlement

MOST = 1024
"""Members that a record can name: lives of the islands of one run that are or were members at
once.
"""


def record_text(record: Record) -> str:
    """A record, without blanks."""
    named = {*record.members, *(m for s in record.settlements for m in (*s.contributors, *s.early))}
    who = sorted(named.union(*((f.sender, f.piece.of, *f.to) for f in record.forwards)))
    at, pieces = {m: i for i, m in enumerate(who)}, sorted({f.piece for f in record.forwards})
    piece_at = {p: i for i, p in enumerate(pieces)}
    return _text(
        {
            "epoch": record.epoch,
            "view": record.view,
            "who": who,
            "members": _bits(record.members, at),
            "base": record.base,
            "settlements": [
                [s.n, _bits(s.contributors, at), s.attempt, _bits(s.early, at)]
                for s in record.settlements
            ],
            "pieces": [[p.what, at[p.of], p.attempt] for p in pieces],
            "forwards": [
                [n, peer_group, [[piece_at[f.piece], at[f.sender], _bits(f.to, at)] for f in found]]
                for (n, peer_group), found in groupby(
                    record.forwards, lambda f: (f.n, f.peer_group)
                )
            ],
            "stable": record.stable,
            "history": record.history,
        }
    )


def read_record(text: str) -> Record:
    """The inverse of `record_text`.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text)
        who = _members(found["who"])
        if len(who) > MOST or list(who) != sorted(set(who)):
            raise ValueError(f"{len(who)} members that are too many, or in no order")
        pieces = [_piece([what, _one(of, who), attempt]) for what, of, attempt in found["pieces"]]
        record = Record(
            epoch=int(found["epoch"]),
            view=int(found["view"]),
            members=_several(found["members"], who),
            base=tuple(int(n) for n in found["base"]),
            settlements=tuple(
                Settlement(int(n), _several(of, who), int(attempt), _several(early, who))
                for n, of, attempt, early in found["settlements"]
            ),
            forwards=tuple(
                Forward(
                    int(peer_group),
                    int(n),
                    _one(piece, pieces),
                    _one(sender, who),
                    _several(to, who),
                )
                for n, peer_group, rows in found["forwards"]
                for piece, sender, to in rows
            ),
            stable=int(found["stable"]),
            history=str(found["history"]),
        )
        if (
            len(record.base) != len(record.members)
            or not record.members
            or len({m.slot for m in record.members}) < len(record.members)
        ):
            raise ValueError("its members, or what they begin with")
        return record
    except UNREADABLE as error:
        raise ValueError(
            f"a record in the store cannot be read ({error!r:.80}): {text!r:.120}"
        ) from None


def report_text(report: Report) -> str:
    """A report, without blanks."""
    held = [[h.n, h.kind, h.delivered, sorted(h.pieces)] for h in report.held]
    heard = sorted(report.heard)
    return _text(
        [report.view, report.member, report.rank, heard, report.landed, held, report.begun]
    )


def read_report(text: str) -> Report:
    """The inverse of `report_text`.

    Raises:
        ValueError: it is none.
    """
    try:
        view, member, rank, heard, landed, held, begun = json.loads(text)
        known = tuple(
            Held(int(n), _kind(kind), bool(delivered), frozenset(map(_piece, pieces)))
            for n, kind, delivered, pieces in held
        )
        return Report(
            int(view),
            _member(member),
            int(rank),
            frozenset(_members(heard)),
            int(landed),
            known,
            bool(begun),
        )
    except UNREADABLE as error:
        raise ValueError(
            f"a report in the store cannot be read ({error!r:.80}): {text!r:.120}"
        ) from None


def _bits(members: Iterable[Member], at: dict[Member, int]) -> str:
    return f"{sum(1 << at[m] for m in members):x}"


def _several(bits: Any, who: Sequence[Member]) -> tuple[Member, ...]:
    if type(bits) is not str or len(bits) > MOST:
        raise ValueError(f"a set {bits!r:.20}")
    number = int(bits, 16)
    if not 0 <= number < 1 << len(who):
        raise ValueError(f"a set {bits!r:.20} of {len(who)} members")
    return tuple(m for i, m in enumerate(who) if number >> i & 1)


def _one(place: Any, among: Sequence[Any]) -> Any:
    if type(place) is not int or place < 0:
        raise ValueError(f"a place {place!r:.20}")
    return among[place]


def _member(found: Any) -> Member:
    slot, incarnation = found
    return Member(int(slot), int(incarnation))


def _members(found: Any) -> tuple[Member, ...]:
    return tuple(map(_member, found))


def _piece(found: Any) -> Piece:
    what, of, attempt = found
    if what not in ("body", "share", "part", "early"):
        raise ValueError(f"a piece {what!r:.20}")
    return Piece(what, _member(of), int(attempt))


def _kind(found: Any) -> Kind:
    if found not in get_args(Kind):
        raise ValueError(f"a message of kind {found!r:.20}")
    kind: Kind = found
    return kind


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
