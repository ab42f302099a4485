"""Ways to get the membership protocol wrong. Each must be found by the explorer: seven by any
message that is launched at the start, one by a message that somebody launches late, one by a
mixed message before a gather, one by a join that the store confirms late, one by a join whose base
is a question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_demo.membership import settlement
from fsdp_demo.membership.machine import Rank
from fsdp_demo.membership.protocol_events import Action
from fsdp_demo.membership.protocol_types import (
    Ballot,
    Kind,
    OpenMessage,
    Piece,
    Record,
    Report,
    needed,
)


class NoFreeze(Rank):
    """freeze-first: who has reported goes on receiving."""

    def _receives(self, view: int) -> bool:
        return view == self.record.view


class PeerGroupDecides(Rank):
    """all-groups: a peer group that holds a message delivers it without the other peer groups."""

    def _agreed(self, n: int) -> bool:
        return Ballot(n, self.rank, self.record.view) in self.ballots


class NoForwarding(Rank):
    """any-holder-forwards, no-mixed-attempts: nobody sends what others lack."""

    def _forwards(self, record: Record) -> list[Action]:
        return []


class VoteWithoutEpoch(Rank):
    """vote-with-view: a vote is a vote, whatever settlement it was for."""

    def _counts(self, ballot: Ballot) -> bool:
        return True

    def _agreed(self, n: int) -> bool:
        voted = {b.rank for b in self.ballots if b.n == n}
        return Ballot(n, self.rank, self.record.view) in self.ballots and voted >= set(
            range(self.ranks)
        )


class OwnView(Rank):
    """one-record: who proposes settles by what its own island holds."""

    def _proposal(self, reports: settlement.Reports) -> Record:
        members = settlement.largest(reports, settlement.mutual(reports))
        own = reports[self.me]
        seen = {m: own if m == self.me else tuple(_empty(r) for r in reports[m]) for m in members}
        return settlement.settled(self.record, seen, members)


def _empty(report: Any) -> Any:
    return type(report)(report.view, report.member, report.rank, report.heard, report.landed, ())


class SealsAtOnce(Rank):
    """seal-stable: what is delivered here may be sealed and freed."""

    def _stable(self) -> int:
        return self.landed


class MixedMeans(Rank):
    """no-mixed-attempts: a part of a mean is a part of the mean, whatever vectors it was made
    of."""

    def _wanted(self, n: int, kind: Kind, piece: Piece) -> bool:
        return piece.what == "part" or super()._wanted(n, kind, piece)

    def _made_of(self, entry: OpenMessage) -> frozenset[Piece] | None:
        oldest = {(p.what, p.of): p for p in sorted(entry.pieces, reverse=True)}
        found = [
            oldest.get((p.what, p.of)) for p in needed(entry.kind, self.record.settlement(entry.n))
        ]
        return None if None in found else frozenset(p for p in found if p is not None)


class LeavesLateOut(Rank):
    """early-part: who has not sent message n when the members change is not in it, though it goes
    on."""

    def _proposal(self, reports: settlement.Reports) -> Record:
        record, own = super()._proposal(reports), []
        for settled in (
            record.settlement(n)
            for n in sorted({h.n for of in reports.values() for r in of for h in r.held})
        ):
            sent = {m for m, of in reports.items() if all(_has_sent(r, settled.n) for r in of)}
            stay = tuple(m for m in settled.contributors if m in sent or m not in record.members)
            own.append(settled._replace(contributors=stay))
        return replace(record, settlements=tuple(s for s in own if s != record.default(s.n)))


def _has_sent(report: Report, n: int) -> bool:
    return n < report.landed or any(
        h.n == n and Piece("body", report.member) in h.pieces for h in report.held
    )


class BeginsAgain(Rank):
    """settle-all-open: when one message is made again, so are all after it, whoever has them."""

    def _proposal(self, reports: settlement.Reports) -> Record:
        record = super()._proposal(reports)
        kinds = {
            h.n: h.kind
            for m in record.members
            for r in reports[m]
            for h in r.held
            if h.n >= record.stable
        }
        again = [
            n
            for n, kind in kinds.items()
            if kind != "gather" and record.settlement(n).attempt == record.view
        ]
        first = min(again, default=max(kinds, default=0))
        kept = tuple(s for s in record.settlements if s.n <= first)
        return replace(
            record, settlements=kept, forwards=tuple(f for f in record.forwards if f.n <= first)
        )


class WaitsForNoStore(Rank):
    """The donor trains on while the store is asked whether the join stands."""

    def _must_wait(self, n: int) -> bool:
        return self.state != "running"


class AsksNewcomers(Rank):
    """Who is a member and has not begun is asked what the others ask each other."""

    def _asked(self, n: int) -> Rank:
        return self


MUTANTS: dict[type[Rank], str] = {
    NoFreeze: "no freeze",
    PeerGroupDecides: "decide by peer group",
    NoForwarding: "no forwarding",
    VoteWithoutEpoch: "vote without epoch",
    OwnView: "set from the proposer's own view",
    SealsAtOnce: "seal before stable",
    MixedMeans: "mean of epochs mixed",
    LeavesLateOut: "who launches late is left out",
    BeginsAgain: "all behind a repeat is made anew",
    WaitsForNoStore: "a join is not waited for",
    AsksNewcomers: "newcomers are asked",
}
