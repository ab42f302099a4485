"""Seven ways to get the membership protocol wrong. Each must be found by the explorer."""

from __future__ import annotations

from typing import Any

from fsdp_demo.comm import settlement
from fsdp_demo.comm.epochs import Ballot, Kind, Open, Piece, Record, needed
from fsdp_demo.comm.membership import Rank
from fsdp_demo.comm.moves import Action


class NoFreeze(Rank):
    """K1: who has reported goes on receiving."""

    def _receives(self, view: int) -> bool:
        return view == self.record.view


class LineDecides(Rank):
    """K3: a line that holds a message delivers it without the other lines."""

    def _agreed(self, n: int) -> bool:
        return Ballot(n, self.rank, self.record.view) in self.ballots


class NoForwarding(Rank):
    """K4, K7: nobody sends what others lack."""

    def _forwards(self, record: Record) -> list[Action]:
        return []


class VoteWithoutEpoch(Rank):
    """K24: a vote is a vote, whatever settlement it was for."""

    def _counts(self, ballot: Ballot) -> bool:
        return True

    def _agreed(self, n: int) -> bool:
        voted = {b.rank for b in self.ballots if b.n == n}
        return Ballot(n, self.rank, self.record.view) in self.ballots and voted >= set(range(self.ranks))


class OwnView(Rank):
    """K2: who proposes settles by what its own island holds."""

    def _proposal(self, reports: settlement.Reports) -> Record:
        members = settlement.largest(reports, settlement.mutual(reports))
        own = reports[self.me]
        seen = {m: own if m == self.me else tuple(_empty(r) for r in reports[m]) for m in members}
        return settlement.settled(self.record, seen, members)


def _empty(report: Any) -> Any:
    return type(report)(report.view, report.member, report.rank, report.heard, report.landed, ())


class SealsAtOnce(Rank):
    """K9: what is delivered here may be sealed and freed."""

    def _stable(self) -> int:
        return self.landed


class MixedMeans(Rank):
    """K7: a part of a mean is a part of the mean, whatever vectors it was made of."""

    def _wanted(self, n: int, kind: Kind, piece: Piece) -> bool:
        return piece.what == "part" or super()._wanted(n, kind, piece)

    def _made_of(self, entry: Open) -> frozenset[Piece] | None:
        oldest = {(p.what, p.of): p for p in sorted(entry.pieces, reverse=True)}
        found = [oldest.get((p.what, p.of)) for p in needed(entry.kind, self.record.settlement(entry.n))]
        return None if None in found else frozenset(p for p in found if p is not None)


MUTANTS: dict[type[Rank], str] = {
    NoFreeze: "no freeze",
    LineDecides: "decide by line",
    NoForwarding: "no forwarding",
    VoteWithoutEpoch: "vote without epoch",
    OwnView: "set from the proposer's own view",
    SealsAtOnce: "seal before stable",
    MixedMeans: "mean of epochs mixed",
}
