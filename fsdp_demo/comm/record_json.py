"""Records and reports as JSON, for the store. What cannot be read is a ValueError that names it."""

from __future__ import annotations

import json
from typing import Any, get_args

from .epochs import Forward, Held, Kind, Member, Piece, Record, Report, Settlement


def record_text(record: Record) -> str:
    """A record, without blanks."""
    return _text(
        {
            "epoch": record.epoch,
            "view": record.view,
            "members": record.members,
            "base": record.base,
            "settlements": record.settlements,
            "forwards": record.forwards,
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
        record = Record(
            epoch=int(found["epoch"]),
            view=int(found["view"]),
            members=_members(found["members"]),
            base=tuple(int(n) for n in found["base"]),
            settlements=tuple(Settlement(int(n), _members(who), int(at), _members(early)) for n, who, at, early in found["settlements"]),
            forwards=tuple(
                Forward(int(line), int(n), _piece(piece), _member(sender), _members(to))
                for line, n, piece, sender, to in found["forwards"]
            ),
            stable=int(found["stable"]),
            history=str(found["history"]),
        )
        if len(record.base) != len(record.members) or not record.members or len({m.slot for m in record.members}) < len(record.members):
            raise ValueError("its members, or what they begin with")
        return record
    except _WRONG as error:
        raise ValueError(f"a record in the store cannot be read ({error!r:.80}): {text!r:.120}") from None


def report_text(report: Report) -> str:
    """A report, without blanks."""
    held = [[h.n, h.kind, h.delivered, sorted(h.pieces)] for h in report.held]
    heard = sorted(report.heard)
    return _text([report.view, report.member, report.rank, heard, report.landed, held, report.begun])


def read_report(text: str) -> Report:
    """The inverse of `report_text`.

    Raises:
        ValueError: it is none.
    """
    try:
        view, member, rank, heard, landed, held, begun = json.loads(text)
        known = tuple(Held(int(n), _kind(kind), bool(delivered), frozenset(map(_piece, pieces))) for n, kind, delivered, pieces in held)
        return Report(int(view), _member(member), int(rank), frozenset(_members(heard)), int(landed), known, bool(begun))
    except _WRONG as error:
        raise ValueError(f"a report in the store cannot be read ({error!r:.80}): {text!r:.120}") from None


_WRONG = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


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
