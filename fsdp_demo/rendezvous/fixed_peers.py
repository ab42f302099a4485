"""Peer groups whose members are the same from start to end: those of a mesh (replicas inside one
torch.distributed world), and that of a single replica.

The ranks of a mesh connect as those of islands do (`peers/zeromq.py`), and meet over a store of
torch. All must stay: the loss of one ends the run on all others, and nothing is settled.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b

from ..elastic.connect import PeerPosition, by_member, new_poller, widen
from ..elastic.driver import Driver
from ..elastic.failure_detector import FailureDetector
from ..elastic.message_state import RoundMessage
from ..elastic.peer_group import PeerGroup
from ..elastic.store_session import StoreSession
from ..errors import PeerLost, WireError, see
from ..membership.machine import entered
from ..membership.protocol_types import Member, Record, Settlement, first_record
from ..net.address import interface_addresses
from ..net.link import Link
from ..peers.zeromq import Meeting, ZeroMQ
from .position import Replica

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the interface over which ranks of a mesh reach each other, as for torch's gloo."""


class LonePeerGroup(PeerGroup):
    """The peer group of a single replica: nothing is sent."""

    elastic = False

    def __init__(self, name: str, timeout: float):
        super().__init__(Member(0), {0: name}, [0], timeout)

    def _taken_part(self, message: RoundMessage) -> Settlement:
        self._next += 1
        settled = Settlement(message.n, (self._me,), 0)
        if message.vectors:
            message.average(settled)
        return settled

    def _account(self, sent: int, received: int, reduced: bool, setup: bool) -> None:
        """Count nothing: nothing was sent."""


class MeshPeerGroup(PeerGroup):
    """The ranks that hold the same shard on every replica of a mesh."""

    elastic = False

    def expel(self, why: str) -> None:
        """End the attempt: in a mesh nobody goes on without this replica.

        Raises:
            PeerLost: always.
        """
        raise PeerLost(why)

    def leave(self, stopped: bool = False) -> None:
        """Tell nothing: nobody goes on without this replica."""

    def _finished(self, message: RoundMessage) -> Settlement:
        try:
            return super()._finished(message)
        except PeerLost:
            # A peer that sends damaged data may be gone before its last piece is checked.
            if message.damage is not None:
                raise message.damage from None
            raise

    def wait_stable(self, seconds: float) -> bool:
        """Wait for nobody: what is saved is saved by all, or counts for nothing."""
        return True

    def release(self) -> None:
        """Close the connections, when what was sent has left."""
        self.ending = True
        super().release()


class MeshDriver(Driver):
    """The membership of one rank where all must stay: the first that is lost ends the run."""

    def _lose(self, found: Mapping[Member, str]) -> None:
        """End with an error. Only those that wait for a member miss one that has said its end."""
        for member, why in found.items():
            who, dead = self.labels(member.slot), self.detector.dead
            self.fail(f"{who} is gone or was silent for {dead:g} s: {why}{see('island-lost')}")
            return

    def refuse(self, member: Member, error: WireError) -> None:
        """Damage is the error of the message that is waited for, and both ends hear of it."""
        if self.stopping.last is not None:
            self.stopping.last.damage = error
        super().refuse(member, error)

    def refused(self, member: Member, why: str) -> None:
        """The member that has refused a piece ends, so this rank does."""
        self._lose({member: why})

    def _watch(self, now: float) -> None:
        """Count a member as lost, too, that sends heartbeats and does not come to a message."""
        n, seconds, behind = self.detector.behind(now)
        if behind and seconds > self.detector.dead:
            self._lose({behind[0]: f"it is alive, but has not come to message {n}"})


class NoStoreSession(StoreSession):
    """The session of members that never change: no store is asked, and there is no thread."""

    def __init__(self) -> None:
        self.epoch = 0

    def begin(self, record: Record) -> None:
        """Tell nothing: all ranks know the first record."""

    def close(self) -> None:
        """Close nothing: there is no thread."""


def meeting_place(ranks: Iterable[int]) -> str:
    """The prefix of a peer group's keys in the store of the world, made from its ranks there."""
    return blake2b(str(sorted(ranks)).encode(), digest_size=8).hexdigest()


def address() -> str:
    """The address of this rank, as torch's gloo chooses it: that of the interface
    GLOO_SOCKET_IFNAME (the first of several), else that of the host's name, else loopback.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    if names := os.environ.get(INTERFACE, ""):
        return _address_of(names.split(",")[0].strip())
    with suppress(OSError):
        for family, kind, _, _, found in socket.getaddrinfo(
            socket.gethostname(), 0, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(found)  # an address of this machine; nobody can connect there
                return str(found[0])
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    for _, found in interface_addresses([interface]):
        place = ipaddress.ip_address(found)
        if place.version == 4 or not (place.is_link_local or place.is_loopback):
            return found
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(
        f"{INTERFACE}={interface}: this machine has no such interface with an address; it has "
        f"{known}"
    )


def mesh_peers(topology: Replica, link: Link | None) -> PeerGroup:
    """Meet the other ranks of the peer group, all at once.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME names no interface. PeerLost: see `zeromq.ZeroMQ.open`.
    """
    names = {i: f"island{i}" for i in range(topology.islands)}
    place = PeerPosition(topology.island, 0, 1, names, topology.world)
    store = topology.open_store().under(f"fsdp_demo/peers/{topology.meets_at}")
    # how often this rank has met the others: all of them attach in one order
    times = f"times/{topology.island}"
    store.set(times, turn := str(int(store.get(times) or 0) + 1))
    meeting = Meeting(
        store,
        turn,
        topology.island,
        topology.islands,
        tuple(names.values()),
        address(),
        topology.timeout,
        store.compare_set(f"{turn}/token", "", secrets.token_hex(16)),
        setting=INTERFACE,
    )
    return met(meeting, place, link)


def met(meeting: Meeting, place: PeerPosition, link: Link | None = None) -> PeerGroup:
    """The peer group, once all members have come. Errors: see `mesh_peers`."""
    poller, members = new_poller(meeting, place), {slot: Member(slot) for slot in meeting.ranks}
    me = members[place.slot]
    try:
        transport = ZeroMQ(meeting, poller)
        notes, connections = (by_member(transport.open(k), members) for k in ("notes", 0))
        detector = FailureDetector(
            poller,
            notes,
            {m: [wire] for m, wire in connections.items()},
            {},
            meeting.timeout,
            meeting.timeout,
            lambda rounds: meeting.timeout,
        )
        machine = entered(me, 0, 1, first_record(members.values()), min_continue=meeting.size)
        peers = MeshPeerGroup(me, place.names, meeting.ranks, meeting.timeout, link, place.share)
        peers.drive(
            MeshDriver(
                poller,
                machine,
                detector,
                lambda tell, failed: NoStoreSession(),
                place.label,
                lambda record: None,
            )
        )
    except BaseException:
        poller.close(0)
        raise
    try:
        widen(peers, lambda k: by_member(transport.open(k), members))
    except BaseException:
        peers.release()
        raise
    return peers
