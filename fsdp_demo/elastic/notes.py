"""The notes that two ranks send each other beside messages: what each says, and its bytes.

A note is a JSON list of its tag and its fields, at most 64 KiB in a frame of its own. One that has
another form than its struct cannot be read, and its sender is to blame.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta, Struct

from ..errors import WireError
from ..files import unreadable
from ..membership.protocol_types import MOST, Kind
from ..peers.connection import PeerConnection, QueuedPiece
from ..peers.poller import Poller

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NotYet = Annotated[int, Meta(ge=-1, le=2**63 - 1)]  # -1: it is not known yet
Numbers = Annotated[tuple[Number, ...], Meta(max_length=MOST)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Reason = Annotated[str, Meta(max_length=1024)]


class Note(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank tells another. `Vote` and `Passes` go to ranks of the same island, all others
    to peers; `ToldToEnd` and `Frozen` go to both.
    """


class Vote(Note, frozen=True, tag="vote"):
    """A ballot (`protocol_types.Ballot`), and the epoch in which it was cast."""

    n: Number
    rank: Number
    view: Number
    epoch: Number


class ToldToEnd(Note, frozen=True, tag="stops"):
    """The sender is told to end. end: the first message that it never sends. together: so are all
    islands, as it has heard. applied_at: its steps when it last applied a message.
    """

    end: NotYet
    together: bool
    applied_at: NotYet


class Frozen(Note, frozen=True, tag="frozen"):
    """The sender has frozen this view, in which it has lost the islands at these slots."""

    view: Number
    lost: Numbers


class Waits(Note, frozen=True, tag="waits"):
    """The sender has launched message n, its contribution to the exchange of that step."""

    n: Number
    step: Number


class Passes(Note, frozen=True, tag="passes"):
    """This island is late for the exchange of that step, and passes."""

    step: Number


class Beat(Note, frozen=True, tag="beat"):
    """The sender lives; `next` is its next message. The frame says what it has delivered."""

    next: Number


class BeatWanted(Note, frozen=True, tag="landed?"):
    """The receiver is to answer with a beat at once."""


class Sign(Note, frozen=True, tag="sign"):
    """This idle connection still carries bytes; or the newcomer at its end lives."""


class Stands(Note, frozen=True, tag="stands"):
    """The sender has waited so many seconds for the receiver's message n."""

    n: Number
    seconds: Seconds


class Refused(Note, frozen=True, tag="refused"):
    """The sender counts the receiver as lost for what it has sent."""

    why: Reason


class EarlyOffered(Note, frozen=True, tag="early"):
    """The sender leaves, and sends its part of message n ahead of its time."""

    n: Number
    kind: Kind


class EarlyKept(Note, frozen=True, tag="kept"):
    """What the receiver has offered of message n is here."""

    n: Number


class Ends(Note, frozen=True, tag="ends"):
    """The sender goes on no more: its run is finished, all its ranks stop in order, or it leaves
    for another reason.
    """

    how: Literal["finished", "stopped", "left"]


class Follow(Note, frozen=True, tag="follow"):
    """A newcomer asks its donor for a snapshot; `brings`: see `DonorFeed.brings`."""

    brings: dict[str, str]


class Ready(Note, frozen=True, tag="ready"):
    """A newcomer is near, and asks to take part."""


class Planned(Note, frozen=True, tag="planned"):
    """The record of this epoch names the newcomer."""

    epoch: Number


class Joined(Note, frozen=True, tag="joined"):
    """A newcomer takes part from now on, and follows no more."""


_READER = msgspec.json.Decoder[Any](reduce(operator.or_, Note.__subclasses__()))


def read_note(data: bytes) -> Note:
    """The note in `data`. Raises WireError: there is none of these."""
    try:
        return _READER.decode(data)
    except (ValueError, RecursionError) as error:  # those of msgspec are ValueErrors
        raise unreadable(data, "a note", error, WireError) from None


def send_note(poller: Poller, note: Note, wires: Iterable[PeerConnection]) -> None:
    """Send a note over each of these connections."""
    data = bytearray(msgspec.json.encode(note))
    for wire in wires:
        with poller.lock:
            wire.post_note(QueuedPiece(poller, torch.frombuffer(data, dtype=torch.uint8)))
        poller.nudge(wire)
