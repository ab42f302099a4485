"""The input (events) and output (actions) of the membership machine of one rank. The driver, which
has sockets and a store, makes events and carries out actions.

The driver keeps these promises:

* Bytes of one connection arrive in the order they were sent. Each view has connections of its own,
  which both ends open when they have adopted it. A frame of another view is not handed in.
* A record is handed in before the first frame or vote of its epoch, and records come in order
  (`Record.epoch` without a gap).
* A record is durable in the store before anybody is told of it (record-chain).
* `ConnectionLost` says: the connection closed, or silence for `dead` seconds (beats-of-training). A
  peer that stands for `patience` ends by itself when it is told (slow-waits). The store has no part
  in it (store-unasked).
"""

from __future__ import annotations

from msgspec import Struct

from .protocol_types import Ballot, Kind, Member, Piece, Record, Report


class Event(Struct, frozen=True):
    """Something that has happened: what `Rank.step` takes."""


class Action(Struct, frozen=True):
    """Something that the driver is to do: what `Rank.step` answers with."""


# ---- events ------------------------------------------------------------------------------------


class Launched(Event, frozen=True):
    """The training loop of this rank has made message n. Numbers come in order. A `question` is a
    message between two steps, in which a newcomer that has not begun takes no part: it begins with
    the first other message from its base on.

    among: its members, this one included, where they are not all: only where all must stay, so no
    change ever settles it. Each island launches each number, those of a set with the same one.
    """

    n: int
    kind: Kind
    question: bool = False
    among: tuple[Member, ...] = ()


class PieceReceived(Event, frozen=True):
    """A piece has come from a peer in this peer group, whole and checked: damaged ones are refused
    before.
    """

    view: int
    epoch: int
    sender: Member
    n: int
    kind: Kind
    piece: Piece
    landed: int = 0


class LandedHeard(Event, frozen=True):
    """A beat of a peer in this peer group: it has delivered all messages below `landed`."""

    view: int
    member: Member
    landed: int


class Voted(Event, frozen=True):
    """Another rank of this island has cast a ballot."""

    ballot: Ballot
    epoch: int


class ConnectionLost(Event, frozen=True):
    """A peer in this peer group is lost, or has said that it leaves."""

    member: Member


class FrozenHeard(Event, frozen=True):
    """A peer or another rank of this island has frozen this view. `lost`: the peers that the other
    rank of this island does not hear.
    """

    view: int
    lost: frozenset[Member] = frozenset()


class ReportsSeen(Event, frozen=True):
    """The reports of the view that the store has now. waited: `dead` seconds have passed since this
    rank reported.
    """

    reports: tuple[Report, ...]
    waited: bool = False


class RecordSeen(Event, frozen=True):
    """A record, read from the store or from a header that announces a planned join."""

    record: Record


class JoinPlanned(Event, frozen=True):
    """A newcomer has reached all members and is within a few messages of them. An event of the
    donor's machine only.
    """

    member: Member


class Leave(Event, frozen=True):
    """This island leaves. What it has launched has reached every peer group before (early-part)."""


# ---- actions -----------------------------------------------------------------------------------


class Send(Action, frozen=True):
    """Send a piece of message n to these members in this peer group. The driver cuts a share from
    the kept vector, and computes a part from the shares of the attempt `piece.attempt`. A new
    attempt repeats the reduce (reduce-again, coded-for-fewer).
    """

    view: int
    epoch: int
    n: int
    kind: Kind
    piece: Piece
    to: tuple[Member, ...]
    landed: int


class CastVote(Action, frozen=True):
    """Tell the other ranks of this island that this rank holds a message."""

    ballot: Ballot
    epoch: int


class Deliver(Action, frozen=True):
    """Message n is complete in every peer group of the island. Given once for each n, in any order
    (any-order), and never undone (delivered-stays). `pieces`: those that the result is made of.
    """

    n: int
    contributors: tuple[Member, ...]
    pieces: frozenset[Piece]


class Free(Action, frozen=True):
    """The bytes of message n are needed no more: all members have it (settle-all-open)."""

    n: int


class SealAllowed(Action, frozen=True):
    """All members have delivered every message below `below`. A checkpoint, a stop or a final model
    may stand on these (seal-stable).
    """

    below: int


class Freeze(Action, frozen=True):
    """Tell the peers in this peer group and the other ranks of this island: this view is frozen
    here."""

    view: int


class PostReport(Action, frozen=True):
    """Write the report to the store; then watch it for reports and records to hand in."""

    report: Report


class ProposeRecord(Action, frozen=True):
    """Write a record by compare_set under `record.epoch`, and hand in the one that stands there
    then. If that is a planned join, which keeps this rank frozen, hand in the reports again.
    """

    record: Record


class TooFew(Action, frozen=True):
    """These members could go on, but they are fewer than `min_continue`: wait for more reports.

    `lost`: a rank of this island has lost these peers, so no report can add one of them: tell the
    other ranks, and end. No member, and `waited`: only newcomers that have not begun are left,
    which lack all messages before their base, and no more reports are expected: end.
    """

    members: tuple[Member, ...]
    waited: bool = False
    lost: frozenset[Member] = frozenset()


class Adopted(Action, frozen=True):
    """A new view: open its connections. Frames of the views before it are dropped."""

    record: Record


class Expelled(Action, frozen=True):
    """The others went on without this island, as `record` says: save nothing, end, and come back as
    a newcomer (expelled-ends).
    """

    record: Record
