"""From the reports of a frozen view to the next record: who stays, and for each open message a set,
a mean, or "again".

Pure functions of the reports. Any rank may compute the record; the first one in the store counts
(one-record).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .protocol_types import (
    Forward,
    HeldMessage,
    Kind,
    Member,
    Piece,
    Record,
    Report,
    Settlement,
    needed,
)

Reports = Mapping[Member, tuple[Report, ...]]
"""For each island that has reported, the reports of all its ranks, by rank."""


def complete(record: Record, reports: Iterable[Report], ranks: int) -> Reports:
    """The members all of whose ranks have reported on this view."""
    found: dict[Member, dict[int, Report]] = defaultdict(dict)
    for report in reports:
        if report.view == record.view and report.member in record.members:
            found[report.member].setdefault(report.rank, report)
    return {
        m: tuple(r for _, r in sorted(by_rank.items()))
        for m, by_rank in sorted(found.items())
        if len(by_rank) == ranks
    }


def expected(record: Record, reports: Iterable[Report]) -> frozenset[Member]:
    """Members whose report may still come: another one hears them, or a rank of theirs reported."""
    own = [r for r in reports if r.view == record.view]
    return frozenset(m for m in record.members if any(r.member == m or m in r.heard for r in own))


def mutual(reports: Reports) -> frozenset[frozenset[Member]]:
    """Pairs that hear each other both ways in every peer group (heard-both-ways)."""
    hears = {m: frozenset.intersection(*(r.heard for r in own)) for m, own in reports.items()}
    return frozenset(
        frozenset((a, b))
        for a in hears
        for b in hears[a]
        if b in hears and a in hears[b] and a != b
    )


def largest(
    members: Iterable[Member],
    pairs: frozenset[frozenset[Member]],
    begun: frozenset[Member] | None = None,
) -> tuple[Member, ...]:
    """The largest set of members that all hear each other; of several the one with the lowest slots
    (heard-both-ways, largest-set).

    One of `begun` (None: of all) must be in it: newcomers alone do not have what came before them.
    Empty if there is no such set. Whoever is apart from one other island at most can stay; only
    among islands that are each apart from two or more all cases are tried.
    """
    every = frozenset(members)
    apart = {
        m: frozenset(o for o in every if o != m and frozenset((m, o)) not in pairs) for m in every
    }

    @functools.cache
    def most(among: frozenset[Member]) -> int:
        """How many of these hear each other."""
        count = 0
        while among:
            order = sorted((len(apart[m] & among), m) for m in among)
            (degree, first), (_, worst) = order[0], order[-1]
            if degree > 1:
                stays = 1 + most(among - apart[worst] - {worst})
                return count + max(stays, most(among - {worst}))
            count, among = count + 1, among - apart[first] - {first}
        return count

    def lowest(*stay: Member) -> list[Member]:
        """As many as can stay with these, of the lowest slots."""
        found, among = list(stay), every.difference(stay, *(apart[m] for m in stay))
        for m in sorted(among):
            left = among - apart[m] - {m}
            if m in among and (left == among - {m} or 1 + most(left) == most(among)):
                found, among = [*found, m], left
        return sorted(found)

    best = lowest()
    if begun is not None and begun.isdisjoint(best):
        best = min(map(lowest, begun & every), key=lambda s: (-len(s), s), default=[])
    return tuple(best)


def propose(record: Record, reports: Reports) -> Record:
    """The record that follows `record`, from the reports of the view. Only what the new members
    have reported counts (any-holder-forwards).
    """
    begun = frozenset(m for m, own in reports.items() if all(r.begun for r in own))
    members = largest(reports, mutual(reports), begun)
    return settled(record, reports, members)


def settled(record: Record, reports: Reports, members: tuple[Member, ...]) -> Record:
    """The next record for exactly these members, each of which has reported."""
    for report in (r for m in members for r in reports[m]):
        moved = dict(report.base)
        record = record.begun_at(moved.get(m, 0) for m in record.members)
    base = dict(zip(record.members, record.base, strict=True))
    epoch = record.epoch + 1
    # an island that joins has what comes before its base
    stable = min((max(r.landed, base[m]) for m in members for r in reports[m]), default=0)
    following = record.following(
        view=epoch,
        members=members,
        base=tuple(base[m] for m in members),
        settlements=(),
        stable=stable,
    )
    settlements, forwards = [], []
    for n, kind in _kinds(h for m in members for r in reports[m] for h in r.held if h.n >= stable):
        held = {
            (r.rank, m): _held(r, n, kind) for m in following.contributors(n) for r in reports[m]
        }
        settlement = _settle(kind, record.settlement(n), following.default(n), held)
        if settlement != following.default(n):
            settlements.append(settlement)
        forwards += _forwards(kind, settlement, following.contributors(n), held, epoch)
    return replace(following, settlements=tuple(settlements), forwards=tuple(forwards))


def _kinds(held: Iterable[HeldMessage]) -> list[tuple[int, Kind]]:
    """The open messages, and of which kind they are. A rank that has launched one knows it; one
    that has only what came early of it takes it for what its sender did.
    """
    launched, guessed = dict[int, Kind](), dict[int, Kind]()
    for h in sorted(held, key=lambda h: (h.n, h.kind)):
        only_early = bool(h.pieces) and all(p.what == "early" for p in h.pieces)
        (guessed if only_early and not h.delivered else launched)[h.n] = h.kind
    return sorted({**guessed, **launched}.items())


def _held(report: Report, n: int, kind: Kind) -> HeldMessage:
    found = next((h for h in report.held if h.n == n), None)
    return found or HeldMessage(n, kind, n < report.landed, frozenset())


def _settle(
    kind: Kind, old: Settlement, fresh: Settlement, held: Mapping[tuple[int, Member], HeldMessage]
) -> Settlement:
    """How one message goes on. A later settlement never has more contributors than an earlier one.

    Delivered by a member: as it was; all ranks of that member hold it, even where one has freed it.
    gather: the members, and of those lost whoever's body some member holds in every peer group.
    mixed: as it was, if the members together have all of it in every peer group (no-mixed-attempts,
    one-set); else again, among the members (reduce-again). all: with what was given early, if some
    member holds it in every peer group (early-part).
    """
    pieces: dict[int, set[Piece]] = defaultdict(set)  # that some member holds, by peer group
    for (peer_group, _), h in held.items():
        pieces[peer_group] |= h.pieces
    delivered = any(h.delivered for h in held.values())
    # A mean that is whole must stay: a member may have applied it, or be about to. A gather has no
    # mean. Its bodies do not depend on who else takes part, so it never has to be made again.
    if kind == "gather" and delivered:
        return fresh._replace(contributors=old.contributors, early=old.early)
    if delivered or (kind == "mixed" and all(needed(kind, old) <= p for p in pieces.values())):
        return old
    gone = [m for m in old.contributors if m not in fresh.contributors]
    early = {m for m in gone if all(Piece("early", m) in p for p in pieces.values())}
    # The body of a lost island is whole where one piece is here. Its shares are not: only their
    # owners have them, and another number of owners cuts others. So a reduce goes on without it.
    bodies = set()
    if kind == "gather":
        bodies = {m for m in gone if all(Piece("body", m) in p for p in pieces.values())}
        bodies.difference_update(old.early)
    stay = tuple(m for m in old.contributors if m in fresh.contributors or m in early | bodies)
    return fresh._replace(contributors=stay, early=tuple(m for m in stay if m in early - bodies))


def _forwards(
    kind: Kind,
    settlement: Settlement,
    members: tuple[Member, ...],
    held: Mapping[tuple[int, Member], HeldMessage],
    epoch: int,
) -> list[Forward]:
    """What must be sent so that each member can deliver: by the one it is of, else by the lowest
    slot that holds it. Parts of an attempt that begins now are not forwarded: they come from the
    repeat. Nor is the body of a member that has not launched yet."""
    wanted = {p for p in needed(kind, settlement) if not (p.what == "part" and p.attempt == epoch)}
    found = []
    for peer_group in sorted({peer_group for peer_group, _ in held}):
        at = {m: held[peer_group, m] for m in members}
        for piece in sorted(wanted):
            holders = [m for m in members if piece in at[m].pieces]
            to = tuple(m for m in members if not at[m].delivered and piece not in at[m].pieces)
            if holders and to:
                sender = piece.of if piece.of in holders else holders[0]
                found.append(Forward(peer_group, settlement.n, piece, sender, to))
    return found
