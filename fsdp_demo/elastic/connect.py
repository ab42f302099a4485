"""Connections of one rank under the membership protocol: to the same rank of each other island, and
to the other ranks of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import PeerLost, see
from ..membership.machine import entered
from ..membership.protocol_events import Event
from ..membership.protocol_types import Member, Record, first_record
from ..net.address import Keys
from ..net.link import Link
from ..peers.connection import PeerConnection
from ..peers.join_messages import listener_key
from ..peers.poller import Poller
from ..peers.zeromq import GroupConnections, Meeting, ZeroMQ, resolved
from ..status import SAVED, leave, tell_launcher
from ..store.client import Store
from . import descriptors
from .agreement import round_trip
from .chunks import streams
from .driver import Driver
from .failure_detector import FailureDetector
from .join_server import JoinServer
from .newcomer import Following, MemberSearch
from .peer_group import PeerGroup, PeerUser
from .store_session import StoreSession

log = logging.getLogger("fsdp_demo")


@dataclass(frozen=True)
class Limits:
    """When an island is lost, and when the others cannot go on.

    Attributes:
        dead: seconds of silence. stall: seconds that an island which still beats may stand, at
            least (0: as long as islands wait for each other at the start); else ten times the
            slowest of the last messages. least: islands that must be left.
        joins: whether islands may join later. If not, members are fixed, and the store is not asked
            any more.
    """

    dead: float = 10.0
    stall: float = 0.0
    least: int = 1
    joins: bool = True


@dataclass(frozen=True)
class PeerPosition:
    """Where a rank stands in the peer groups.

    Attributes:
        slot: of this island. rank, ranks: this peer group, and how many an island has. names: of
            the islands, by slot; one that joins adds its own.
        share: ranks of an island that use its link at once. process: this rank, as its launcher
            counts.
    """

    slot: int
    rank: int
    ranks: int
    names: dict[int, str]
    share: int = 1
    process: int = 0

    def label(self, slot: int) -> str:
        """How errors and logs name an island."""
        return f"island {slot} ({self.names.get(slot, f'island{slot}')})"


def starting_peers(
    meeting: Meeting,
    place: PeerPosition,
    open_store: Callable[[], Store],
    link: Link | None,
    limits: Limits,
    user: PeerUser | None = None,
) -> PeerGroup:
    """Meet the other islands that begin a run, or the other replicas of a mesh (`Meeting.ranks`),
    all at once. Raises as `zeromq.ZeroMQ.open`.

    Args:
        meeting: of the peer group: `rank` and `size` are slots; `prefix` is that of all peer
            groups.
        open_store: a connection of its own, below the keys of the meeting.
    """
    poller = new_poller(meeting, place)
    try:
        members = {slot: Member(slot) for slot in meeting.ranks}
        me = members[place.slot]
        at_peer_group = replace(meeting, prefix=f"{meeting.prefix}/peer_group/{place.rank}")
        transport = ZeroMQ(at_peer_group, poller)
        notes, connections = (by_member(transport.open(k), members) for k in ("notes", 0))
        siblings = _siblings(poller, meeting, place, me)
        peers = PeerGroup(me, place.names, meeting.ranks, meeting.timeout, link, place.share, user)
        start = Starter(poller, meeting, place, me, siblings, open_store, limits, peers)
        start.member(
            first_record(members.values()), notes, {m: [wire] for m, wire in connections.items()}
        )
    except BaseException:
        poller.close(0)
        raise
    try:
        widen(peers, lambda k: by_member(transport.open(k), members))
        start.open_listener()  # not before: a newcomer gets as many connections as the others
    except BaseException:
        peers.release()
        raise
    return peers


def widen(peers: PeerGroup, connect: Callable[[int], Mapping[Member, PeerConnection]]) -> None:
    """On a long link, add connections: `connect(k)` makes the connections k = 1, 2, ... by member,
    as many on all ranks (`chunks.streams`). Raises PeerLost: an island was lost.
    """
    if peers.size > 1:
        rtt = round_trip(peers)
        count = streams(rtt, peers.size - 1)
        peers.add_connections([connect(k) for k in range(1, count)])
        if count > 1:
            log.info("%.0f ms to the other islands: %d connections to each", 1e3 * rtt, count)


def newcomer_peers(
    meeting: Meeting,
    place: PeerPosition,
    life: int,
    open_store: Callable[[], Store],
    link: Link | None,
    limits: Limits,
    user: PeerUser | None = None,
) -> PeerGroup:
    """Join a run under way: the peer group of a newcomer, which follows its donor until it takes
    part.

    Args:
        meeting: as for `starting_peers`. life: how often the slot was started before.

    Raises:
        PeerLost: a member cannot be reached, or another island joins, for too long. ValueError: a
            member refuses this island for good.
    """
    poller = new_poller(meeting, place)
    me = Member(place.slot, life)
    labels = place.label
    try:
        siblings = _siblings(poller, meeting, place, me)
        search = MemberSearch(poller, meeting, me, place.rank, labels)
        peers = PeerGroup(me, place.names, [], meeting.timeout, link, place.share, user)
        start = Starter(poller, meeting, place, me, siblings, open_store, limits, peers)

        def follow(turn: int, seconds: float, since: Record | None, lost: Member | None) -> None:
            """Follow a donor; `lost` is the one before it, `since` the record it was found in."""
            reached, record = search.reach(seconds, turn, since)
            donor = reached[0]
            if donor.member == lost:
                raise PeerLost(f"{labels(donor.member.slot)} lives, and hands over nothing more")

            def become(record: Record) -> None:
                notes = {r.member: r.wires["notes"] for r in reached}
                start.member(record, notes, {r.member: r.connections for r in reached})
                start.open_listener()

            def another(again: bool) -> None:
                for r in reached:
                    r.close()
                patience = min(meeting.timeout, 3 * limits.dead)
                follow(turn + 1, patience, record, None if again else donor.member)

            following = Following(search, donor, become, another)
            peers.follow(following, [r.member.slot for r in reached])

        follow(0, meeting.timeout, None, None)
    except BaseException:
        poller.close(0)
        raise
    return peers


def new_poller(meeting: Meeting, place: PeerPosition) -> Poller:
    """The poller of this rank. Raises ValueError where it may not have so many connections,
    PeerLost where its address does not resolve.
    """
    descriptors.allow(meeting.size, place.ranks)
    if meeting.address:
        resolved(meeting.address, meeting.setting)
    return Poller(Keys(meeting.token, meeting.prefix) if meeting.token else None)


def _siblings(
    poller: Poller, meeting: Meeting, place: PeerPosition, me: Member
) -> dict[int, PeerConnection]:
    """Connections to the other ranks of this island that have a peer group, by peer group."""
    if place.ranks == 1:
        return {}
    own = tuple(f"rank {r} of {place.names[place.slot]}" for r in range(place.ranks))
    prefix = f"{meeting.prefix}/island/{me.slot}.{me.incarnation}"
    inside = replace(
        meeting, prefix=prefix, rank=place.rank, size=place.ranks, names=own, among=None
    )
    return ZeroMQ(inside, poller).open("siblings").wires


@dataclass
class Starter:
    """Makes the driver of one rank, once it is a member."""

    poller: Poller
    meeting: Meeting
    place: PeerPosition
    me: Member
    siblings: Mapping[int, PeerConnection]
    open_store: Callable[[], Store]
    limits: Limits
    peers: PeerGroup
    join_server: JoinServer | None = None

    def member(
        self,
        record: Record,
        notes: Mapping[Member, PeerConnection],
        connections: Mapping[Member, Sequence[PeerConnection]],
    ) -> None:
        """Make this rank a member in `record`, over these connections, with a driver."""
        meeting, place, dead = self.meeting, self.place, self.limits.dead
        notes = {m: wire for m, wire in notes.items() if m in record.members}
        connections = {m: wires for m, wires in connections.items() if m in record.members}
        machine = entered(self.me, place.rank, place.ranks, record, min_continue=self.limits.least)
        detector = FailureDetector(
            self.poller,
            notes,
            connections,
            self.siblings,
            dead,
            meeting.timeout,
            lambda rounds: patience(rounds, meeting.timeout, self.limits.stall),
        )
        driver = Driver(
            self.poller,
            machine,
            detector,
            lambda tell, failed: self._store_session(record, tell, failed),
            place.label,
            lambda record: expelled(place, record),
            self.peers.told_to_end,
            self.peers.longest_early,
            self._join_server if self.limits.joins else None,
        )
        self.join_server = driver.join_server
        self.peers.drive(driver, max((len(w) for w in connections.values()), default=1))

    def _join_server(self, driver: Driver) -> JoinServer:
        at = self.meeting
        return JoinServer(self.poller, at.prefix, at.address, driver, self.place.names)

    def _store_session(
        self, record: Record, tell: Callable[[Event], None], failed: Callable[[str], None]
    ) -> StoreSession:
        """The store session of this rank; an island's first rank writes the first record."""
        ranks, dead, timeout = self.place.ranks, self.limits.dead, self.meeting.timeout
        session = StoreSession(self.open_store, ranks, dead, timeout, tell, failed)
        if self.limits.joins and record.epoch == 0 and self.place.rank == 0:
            session.begin(record)
        return session

    def open_listener(self) -> None:
        """Others may ask at this member's listener, where it can be reached."""
        if self.join_server is not None and self.join_server.endpoint[1]:
            address = "{}:{}".format(*self.join_server.endpoint)
            self.open_store().set(listener_key(self.me, self.place.rank), address)


def by_member(
    connections: GroupConnections, members: Mapping[int, Member]
) -> dict[Member, PeerConnection]:
    """Connections by member, from those by slot."""
    return {members[slot]: wire for slot, wire in connections.wires.items()}


def patience(rounds: Sequence[float], meeting: float, stall: float) -> float:
    """Seconds that an island may stand while the others wait for it, from those that the last
    messages took; `stall` at least, and `meeting` where that is 0.

    >>> patience([1.0, 2.0, 30.0], 600.0, 60.0), patience([], 600.0, 60.0)
    (300.0, 600.0)
    >>> patience([1.0, 2.0, 30.0], 600.0, 0.0)
    600.0
    """
    return max(stall or meeting, 10.0 * max(rounds) if len(rounds) >= 3 else meeting)


def expelled(place: PeerPosition, record: Record) -> None:
    """The others went on without this island: end at once, and write nothing (expelled-ends). A
    supervisor starts it again, as a newcomer.
    """
    left = ", ".join(place.names.get(m.slot, str(m.slot)) for m in record.members)
    what = "%s ends in epoch %d (of %s) and saves nothing: the others go on without it" + see(
        "expelled"
    )
    log.error(what, place.names[place.slot], record.epoch, left)
    tell_launcher(place.process, SAVED)
    leave(SAVED)
