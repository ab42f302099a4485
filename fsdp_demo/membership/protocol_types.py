"""What islands agree on when one is lost or joins: members, pieces of a message, reports, records,
and the text of the last two in the store. Plain values without sockets or clock.

An *island* holds one replica and has several *ranks*. Rank r of an island talks to rank r of each
other island: they are *peer group* r. A `PeerGroup` is one of them, seen from one of its ranks. A
*message* has a number n = 0, 1, 2, ..., the same on all islands. Everything islands learn from each
other is a message. A *record* is what a store holds under one *epoch* number. The first that is
written there stays (compare_set). A record that settles open messages opens a new *view*. A planned
join has an epoch of its own, but goes on in the view before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from ..files import from_json, to_json, unreadable

What = Literal["body", "share", "part", "early"]
"""What the bytes of a `Piece` are."""

Kind = Literal["gather", "mixed"]
"""gather: each island sends one body to all. mixed: a body, and vectors that are reduced in two
legs, in one message with one set (one-set).
"""


class Member(NamedTuple):
    """One life of one island: a slot of the run, and how often it was started (expelled-ends: who
    comes back is somebody else).
    """

    slot: int
    incarnation: int = 0


class Piece(NamedTuple):
    """Bytes of one message in one peer group.

    body: what `of` contributes. share: the part of `of`'s vector that the receiver owns (leg 1 of a
    reduce). part: the coded mean of the part that `of` owns (leg 2). Shares and parts belong to one
    attempt: the view in which they were cut (no-mixed-attempts). early: all that `of` contributes,
    its vectors uncut: it leaves, and owns no part (early-part).
    """

    what: What
    of: Member
    attempt: int = 0


class Ballot(NamedTuple):
    """A rank holds message n, as it is settled in this view (vote-with-view)."""

    n: int
    rank: int
    view: int


class Forward(NamedTuple):
    """In one peer group, `sender` sends a piece of message n to members that lack it."""

    peer_group: int
    n: int
    piece: Piece
    sender: Member
    to: tuple[Member, ...]


class Settlement(NamedTuple):
    """Whose contributions message n has, and the view whose parts make its mean. `early`: those of
    the contributors that gave theirs early, and left (early-part)."""

    n: int
    contributors: tuple[Member, ...]
    attempt: int
    early: tuple[Member, ...] = ()

    @property
    def owners(self) -> tuple[Member, ...]:
        """The contributors that exchange the message: each owns a part of the mean."""
        return tuple([m for m in self.contributors if m not in self.early])

    def of(self, among: tuple[Member, ...]) -> Settlement:
        """This settlement of a message among these only; empty: among all."""
        return self._replace(contributors=among) if among else self


@dataclass(frozen=True)
class OpenMessage:
    """One message that this rank has something of and has not freed. `shares`: whose shares of the
    present attempt have come. `among`: as in `Launched`.
    """

    n: int
    kind: Kind
    pieces: frozenset[Piece] = frozenset()
    shares: frozenset[Member] = frozenset()
    delivered: bool = False
    among: tuple[Member, ...] = ()


class HeldMessage(Struct, frozen=True, array_like=True):
    """One open message on one rank, in a report. `pieces` are bodies and parts, no shares."""

    n: int
    kind: Kind
    delivered: bool
    pieces: frozenset[Piece]


class Report(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one frozen rank tells the store, once in a view (freeze-first).

    Attributes:
        heard: members whose frames this rank receives in its peer group; itself is among them.
        landed: all messages below it are delivered on this rank.
        held: the messages of which the rank has anything and that it has not freed, in order. The
            kind of one of which it has only what came early is what the sender took it for.
        begun: false for a newcomer that has not launched its first message: it may still lack what
            comes before.
        base: of each member that has joined, as far as this rank knows (`Record.asked`).
    """

    view: int
    member: Member
    rank: int
    heard: frozenset[Member]
    landed: int
    held: tuple[HeldMessage, ...]
    begun: bool = True
    base: tuple[tuple[Member, int], ...] = ()


@dataclass(frozen=True)
class Record:
    """Members and the settlement of all open messages, decided in one place (one-record).

    Attributes:
        epoch: number of the record. Records are read in order, without a gap.
        view: epoch of the newest record that settled messages. Frames, ballots and reports carry
            it.
        members: sorted by slot.
        base: for each member the first message that it takes part in; a question moves it
            (`asked`).
        settlements: of open messages, where they differ from `default`.
        forwards: who sends what to whom, so that all members can deliver what is settled.
        stable: every rank of every member had delivered all messages below it.
        history: digest of the records before this one (record-chain).
    """

    epoch: int
    view: int
    members: tuple[Member, ...]
    base: tuple[int, ...]
    settlements: tuple[Settlement, ...] = ()
    forwards: tuple[Forward, ...] = ()
    stable: int = 0
    history: str = ""

    def contributors(self, n: int) -> tuple[Member, ...]:
        """The members that take part in message n."""
        return tuple([m for m, base in zip(self.members, self.base, strict=True) if base <= n])

    def default(self, n: int) -> Settlement:
        """The settlement of message n, if the record has none: all its members, in this view."""
        return Settlement(n, self.contributors(n), self.view)

    def settlement(self, n: int) -> Settlement:
        """How message n is settled in this record."""
        found = next((s for s in self.settlements if s.n == n), None)
        if found is None:
            return self.default(n)
        late = set(self.members).difference(self.contributors(n))
        return found._replace(contributors=tuple(m for m in found.contributors if m not in late))

    def asked(self, n: int) -> Record:
        """This record after question n: the base of a newcomer whose base was n is n + 1. All
        members launch the same messages, so all make the same change.
        """
        return self.begun_at(b + 1 if 0 < b == n else b for b in self.base)

    def begun_at(self, base: Iterable[int]) -> Record:
        """This record with each member's base raised to the one given, where that is later."""
        return replace(self, base=tuple(map(max, self.base, base)))

    def bare(self) -> Record:
        """This record without what is needed only when it is adopted."""
        return replace(self, forwards=(), stable=0)

    def digest(self) -> str:
        """Digest of this record and all before it: 16 hexadecimal digits."""
        return _digest(self.history, self.epoch, self.view, self.members, self.settlements)

    def following(self, **changes: object) -> Record:
        """The next record: the same but for `changes`."""
        return replace(self.bare(), epoch=self.epoch + 1, history=self.digest(), **changes)  # type: ignore[arg-type]


def first_record(members: Iterable[Member]) -> Record:
    """Record 0: these members, all from message 0 on.

    Raises:
        ValueError: no member, or one slot twice.
    """
    found = tuple(sorted(members))
    if not found or len({m.slot for m in found}) < len(found):
        raise ValueError(
            f"the members are {found}: needed are one or more, each with a slot of its own"
        )
    return Record(0, 0, found, (0,) * len(found))


def needed(kind: Kind, settlement: Settlement) -> frozenset[Piece]:
    """The pieces that a rank must have to deliver a message as it is settled."""
    owners = settlement.owners
    bodies = [Piece("body", m) for m in owners]
    parts = [Piece("part", m, settlement.attempt) for m in owners] if kind == "mixed" else []
    return frozenset(bodies + parts + [Piece("early", m) for m in settlement.early])


def extended(history: str, n: int, contributors: Iterable[Member]) -> str:
    """The digest of what was delivered, message by message: for the manifest of a checkpoint
    (seal-stable).

    Two checkpoints of one step are of one state only if this is equal, too. Feed `Deliver` actions
    in the order of n, without a gap. The epoch is not in it: members may deliver the same in
    different epochs.
    """
    return _digest(history, n, tuple(sorted(contributors)))


def _digest(*values: object) -> str:
    plain = repr(values).replace("Member", "").replace("Settlement", "")
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


# ---- records as JSON ---------------------------------------------------------------------------

MOST = 1024
"""Members that a record can name: lives of the islands of one run that are or were members at
once.
"""

Place = Annotated[int, Meta(ge=0)]
Places = Annotated[str, Meta(pattern="^[0-9a-f]+$", max_length=MOST // 4)]


class WrittenRecord(Struct):
    """A record as the store holds it, in JSON.

    It names each member once, in `who` (sorted), and after that by its place there. A set of them
    is a number in hexadecimal digits whose bits are those places: sets are sorted in every record.
    Forwards of one message in one peer group stand together. So the record of 64 islands of 64
    ranks with four open messages, of which all pieces must be forwarded, stays below the bound of
    the store (`store.connection.LARGEST`).

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
