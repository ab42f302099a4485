"""Connections of one rank under the membership protocol: to the same rank of each other island, and to the other ranks of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..status import SAVED, leave, tell_launcher
from .change import ChangeDesk
from .driver import Driver
from .epochs import Member, Record, first_record
from .link import Link
from .member_line import MemberLine
from .membership import entered
from .store_client import Asker
from .transport import Meeting

log = logging.getLogger("fsdp_demo")

DEAD = 10.0
"""Seconds of silence after which an island is lost (ISLAND_DEAD)."""

PATIENCE = 60.0
"""Seconds without progress after which an island that still beats is lost, at least; else ten times the slowest of the last messages."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands on the lines.

    Attributes:
        slot: of this island. rank, ranks: this line, and how many an island has. names: of the islands, by slot.
        share: ranks of an island that use its link at once. process: this rank, as its launcher counts.
    """

    slot: int
    rank: int
    ranks: int
    names: Mapping[int, str]
    share: int = 1
    process: int = 0


def member_line(
    meeting: Meeting, place: Place, open_store: Callable[[], Asker], link: Link | None, dead: float, min_continue: int = 1
) -> MemberLine:
    """Meet the other islands of a run that begins, all at once.

    Args:
        meeting: of the line: `rank` and `size` are slots; `prefix` is that of all lines.
        open_store: a connection of its own, below the keys of the meeting.

    Raises:
        ValueError, PeerLost: see `transport.Opener.open`.
    """
    from .curve import Keys
    from .hub import Hub
    from .zeromq import ZeroMQ

    hub = Hub(meeting.timeout, Keys(meeting.token, meeting.prefix) if meeting.token else None)
    try:
        members = [Member(slot) for slot in range(meeting.size)]
        at_line = replace(meeting, prefix=f"{meeting.prefix}/line/{place.rank}")
        transport = ZeroMQ(at_line, hub)
        notes, lanes = (_by_member(transport.open(k), members) for k in ("notes", 0))
        siblings: dict[int, Any] = {}
        if place.ranks > 1:
            own = [f"rank {r} of {place.names[place.slot]}" for r in range(place.ranks)]
            inside = replace(
                meeting, prefix=f"{meeting.prefix}/island/{place.slot}", rank=place.rank, size=place.ranks, names=tuple(own)
            )
            siblings = ZeroMQ(inside, hub).open("siblings").wires
        record = first_record(members)
        driver = Driver(
            hub,
            entered(members[place.slot], place.rank, place.ranks, record, min_continue=min_continue),
            notes,
            {m: [wire] for m, wire in lanes.items()},
            siblings,
            lambda tell: ChangeDesk(open_store, place.ranks, dead, tell),
            lambda slot: f"island {slot} ({place.names.get(slot, '?')})",
            dead,
            meeting.timeout,
            lambda rounds: patience(rounds, meeting.timeout),
            lambda record: expelled(place, record),
        )
    except BaseException:
        hub.close(0)
        raise
    line = MemberLine(driver, members[place.slot], place.names, meeting.timeout, link, place.share)
    try:
        line.widen(lambda k: _by_member(transport.open(k), members))
    except BaseException:
        line.release()
        raise
    return line


def _by_member(connections: Any, members: Sequence[Member]) -> dict[Member, Any]:
    return {members[slot]: wire for slot, wire in connections.wires.items()}


def patience(rounds: Sequence[float], meeting: float) -> float:
    """Seconds without progress after which an island is lost, from those that the last messages took.

    >>> patience([1.0, 2.0, 30.0], 600.0), patience([], 600.0)
    (300.0, 600.0)
    """
    return max(PATIENCE, 10.0 * max(rounds)) if len(rounds) >= 3 else max(meeting, PATIENCE)


def expelled(place: Place, record: Record) -> None:
    """The others went on without this island: end at once, and write nothing (K5). A supervisor starts it again, as a newcomer."""
    left = ", ".join(place.names.get(m.slot, str(m.slot)) for m in record.members)
    log.error("%s was expelled in epoch %d: %s went on without it; nothing is saved", place.names[place.slot], record.epoch, left)
    tell_launcher(place.process, SAVED)
    leave(SAVED)
