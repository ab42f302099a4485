"""Records and reports as JSON, for the store. What cannot be read is a ValueError that names it."""

from __future__ import annotations

import json
from typing import Any

from .epochs import Forward, Held, Member, Piece, Record, Report, Settlement


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
        return Record(
            epoch=int(found["epoch"]),
            view=int(found["view"]),
            members=_members(found["members"]),
            base=tuple(int(n) for n in found["base"]),
            settlements=tuple(Settlement(int(n), _members(who), int(attempt)) for n, who, attempt in found["settlements"]),
            forwards=tuple(
                Forward(int(line), int(n), _piece(piece), Member(*sender), _members(to))
                for line, n, piece, sender, to in found["forwards"]
            ),
            stable=int(found["stable"]),
            history=str(found["history"]),
        )
    except (ValueError, KeyError, TypeError) as error:
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
        known = tuple(Held(int(n), kind, bool(delivered), frozenset(map(_piece, pieces))) for n, kind, delivered, pieces in held)
        return Report(int(view), Member(*member), int(rank), frozenset(_members(heard)), int(landed), known, bool(begun))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"a report in the store cannot be read ({error!r:.80}): {text!r:.120}") from None


def _members(found: Any) -> tuple[Member, ...]:
    return tuple(Member(int(slot), int(incarnation)) for slot, incarnation in found)


def _piece(found: Any) -> Piece:
    what, of, attempt = found
    return Piece(what, Member(*of), int(attempt))


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
