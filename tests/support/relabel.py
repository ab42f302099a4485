"""The same state of the membership protocol with other names: islands and peer groups in another
order, epochs counted from elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from fsdp_demo.membership.machine import Rank
from fsdp_demo.membership.protocol_events import PieceReceived, Voted
from fsdp_demo.membership.protocol_types import (
    Ballot,
    Member,
    OpenMessage,
    Piece,
    Record,
    Settlement,
)


class Relabel:
    """`islands[slot]` and `peer_groups[rank]` are the new names; `shift` is added to epochs, views
    and attempts. Digests become empty.
    """

    def __init__(self, islands: tuple[int, ...], peer_groups: tuple[int, ...], shift: int):
        self.islands, self.peer_groups, self.shift = islands, peer_groups, shift
        self._do = {
            Member: lambda m: Member(islands[m.slot], m.incarnation),
            Piece: lambda p: Piece(
                p.what, self(p.of), p.attempt + shift if p.what != "body" else 0
            ),
            Ballot: lambda b: Ballot(b.n, peer_groups[b.rank], b.view + shift),
            Settlement: lambda s: Settlement(
                s.n, tuple(sorted(map(self, s.contributors))), s.attempt + shift
            ),
            Record: self._record,
            OpenMessage: lambda o: replace(o, pieces=self(o.pieces), shares=self(o.shares)),
            Rank: self._rank,
            PieceReceived: lambda r: structs.replace(
                r,
                view=r.view + shift,
                epoch=r.epoch + shift,
                sender=self(r.sender),
                piece=self(r.piece),
            ),
            Voted: lambda v: Voted(self(v.ballot), v.epoch + shift),
            frozenset: lambda s: frozenset(map(self, s)),
            tuple: lambda t: tuple(map(self, t)),
        }

    def __call__(self, value: Any) -> Any:
        do = self._do.get(type(value)) or (self._rank if isinstance(value, Rank) else None)
        return do(value) if do else value

    def _record(self, r: Record) -> Record:
        order = sorted(zip(map(self, r.members), r.base, strict=True))
        members, base = tuple(m for m, _ in order), tuple(b for _, b in order)
        settlements = tuple(map(self, r.settlements))
        return Record(
            r.epoch + self.shift, r.view + self.shift, members, base, settlements, (), r.stable, ""
        )

    def _rank(self, r: Rank) -> Rank:
        heard = tuple(h for _, h in sorted(zip(map(self, r.record.members), r.heard, strict=True)))
        return replace(
            r,
            me=self(r.me),
            rank=self.peer_groups[r.rank],
            record=self(r.record),
            lost=self(r.lost),
            heard=heard,
            open=self(r.open),
            ballots=self(r.ballots),
        )


def outcome(got: Any, name: Relabel) -> Any:
    """What was delivered (contributors, pieces), or None."""
    return None if got is None else (tuple(sorted(name(got[0]))), name(got[1]))
