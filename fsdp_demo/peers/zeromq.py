"""The connections between islands: how the ranks of a peer group find each other and meet.

ZeroMQ is used instead of gloo, since a dying peer takes no other connection with it, a message that
is too long is refused before memory is allocated for it, of two ranks only one has to be reachable,
and with ISLAND_TOKEN both sides authenticate and all bytes are encrypted (CURVE). Pieces are sent
from the memory of tensors and received into tensors that wait for them.

On the wire a piece of n bytes costs n + 47 bytes (38 for the frame, 9 before the piece, 2 where it
has less than 256 bytes), with keys 66 more; a quiet connection a few bytes every 15 s
(`tcp.keep_alive`). The `Meter` counts the n.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import zmq
from torch import Tensor

from ..errors import PeerLost, counted, see
from ..files import to_json
from ..net.address import Keys, join_address
from ..store.client import Store
from .connection import PeerConnection, QueuedPiece
from .poller import Poller

log = logging.getLogger("fsdp_demo")

LOOK = 0.02  # seconds between two looks whether the others have greeted
ASK = 1.0  # seconds between two questions whether they can still come


@dataclass(frozen=True)
class Meeting:
    """How a rank finds the others of its peer group.

    Attributes:
        store: where addresses are told, with a deadline for each question; `prefix` stands before
            the keys of this peer group.
        rank, size: this one, and how many there are. names: how errors call them.
        address: where the others reach this rank; "" if nobody can: then the others must be
            reachable.
        timeout: seconds to wait for the others, and of silence after which one counts as lost.
        token: the run's secret, "" for none.
        among: the ranks that meet, where they are not all of them. setting: the variable that gives
            `address`, for errors.
        goes_on: called once a second, with the names of those that are waited for; raises PeerLost
            where they cannot come any more.
    """

    store: Store
    prefix: str
    rank: int
    size: int
    names: tuple[str, ...]
    address: str
    timeout: float
    token: str = ""
    among: tuple[int, ...] | None = None
    setting: str = "ISLAND_ADDRESS"
    goes_on: Callable[[str], None] = lambda waited_for: None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that meet."""
        return tuple(range(self.size)) if self.among is None else self.among

    @property
    def others(self) -> list[int]:
        """The ranks that meet, without this one."""
        return [j for j in self.ranks if j != self.rank]

    def label(self, *ranks: int) -> str:
        """How errors name the islands of these ranks."""
        return ", ".join(f"island {j} ({self.names[j]})" for j in ranks)


class Listens(TypedDict):
    """The note of where a rank listens: a port for each other rank. key: its keys' mark."""

    host: str
    ports: dict[str, int]
    key: str


class GroupConnections:
    """One connection to each of the other ranks. Closing one of a peer group's `GroupConnections`
    closes all of them.

    One peer that dies, or whose pieces are refused, leaves the connections to the others as they
    are. Pieces of a short message overtake those of a long one that wait to be sent on the same
    connection.
    """

    def __init__(self, poller: Poller, wires: dict[int, PeerConnection]):
        self._poller, self.wires = poller, wires

    def send(self, tensor: Tensor, rank: int, number: int) -> QueuedPiece:
        """Send a tensor (uint8, on the CPU, contiguous, at most `pieces.LARGEST` bytes) to `rank`
        as the next piece of message `number`. Its memory must stay as it is."""
        piece, wire = QueuedPiece(self._poller, tensor), self.wires[rank]
        with self._poller.lock:
            wire.post_send(piece, number)
        self._poller.nudge(wire)
        return piece

    def recv(self, tensor: Tensor, rank: int, number: int) -> QueuedPiece:
        """Receive the next piece of message `number` from `rank`, at most the tensor's size."""
        piece, wire = QueuedPiece(self._poller, tensor), self.wires[rank]
        self._poller.post_recv(wire, piece, number)
        return piece

    def close(self) -> None:
        """Close the connections when sent pieces have left; waits end."""
        self._poller.close()


class ZeroMQ:
    """Connects the ranks of a peer group. Of two ranks the lower one listens, or the other if that
    has no address.

    Every call of `open` binds one port for each peer, tells them in the store, connects to those
    that listen, and closes the ports that it does not need. A port serves one connection; a second
    one is sent away.
    """

    def __init__(self, meeting: Meeting, poller: Poller | None = None):
        self._meeting = meeting
        self._poller = poller or Poller(
            Keys(meeting.token, meeting.prefix) if meeting.token else None
        )
        self._keys, self._asked = self._poller.keys, 0.0

    def open(self, k: int | str) -> GroupConnections:
        """Connections number k = 0, 1, ... to the other ranks, all of which make the same call.
        Raises ValueError: the islands do not fit together. PeerLost: somebody did not come in time.
        """
        try:
            return GroupConnections(self._poller, self._open(k))
        except BaseException:
            self._poller.close(0)
            raise

    def _open(self, k: int | str) -> dict[int, PeerConnection]:
        m, self._asked = self._meeting, time.monotonic()
        bound, end = {}, self._asked + m.timeout
        if m.address:  # the resolver may be slow: it is not asked in the network thread
            host = resolved(m.address, m.setting)
            bound = self._poller.run(lambda: self._bound(host))
        ports = {str(j): int(where.rpartition(":")[2]) for j, (_, where) in bound.items()}
        mark = self._keys.mark if self._keys else ""
        notes = self._notes(k, {"host": m.address, "ports": ports, "key": mark})
        wires = self._poller.run(lambda: self._wired(k, notes, bound))
        self._meet(wires, end)
        return wires

    def _bound(self, host: str) -> dict[int, tuple[PeerConnection, str]]:
        """For each other rank a listening connection, and its endpoint."""
        m, found = self._meeting, dict[int, tuple[PeerConnection, str]]()
        for j in m.others:
            wire = self._poller.add(True)
            found[j] = wire, bound(wire.socket, host, m.names[m.rank], m.setting)
        return found

    def _wired(
        self, k: int | str, notes: dict[int, Listens], bound: dict[int, tuple[PeerConnection, str]]
    ) -> dict[int, PeerConnection]:
        """The connection to each other rank: its listening one, or a new one that dials."""
        m, wires = self._meeting, dict[int, PeerConnection]()
        for j, note in notes.items():
            if not (m.address or note["host"]):
                both = f"{m.names[m.rank]} nor {m.label(j)}"
                raise ValueError(
                    f"neither {both} can be reached: one of two islands needs an address "
                    "(ISLAND_ADDRESS)"
                )
            if m.address and (m.rank < j or not note["host"]):
                wires[j] = bound[j][0]
            else:
                if j in bound:
                    bound[j][0].close(0)
                wires[j] = self._connect(note, j)
            wires[j].greet(self._greeting(k, m.rank, j), self._greeting(k, j, m.rank))
        return wires

    def _connect(self, note: Listens, j: int) -> PeerConnection:
        port = note["ports"].get(str(self._meeting.rank), 0)
        if not 0 < port < 65536:
            raise ValueError(
                f"{self._meeting.label(j)} names no port for this rank: use one release everywhere"
            )
        wire = self._poller.add(False)
        wire.dial(f"tcp://{join_address(note['host'], port)}")
        return wire

    def _greeting(self, k: int | str, sender: int, receiver: int) -> bytes:
        text = f"{self._meeting.prefix} {k} {sender} {receiver}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def _notes(self, k: int | str, mine: Listens) -> dict[int, Listens]:
        """Publish where this rank listens, and wait for the same note of the others."""
        m = self._meeting
        at = m.store.under(f"{m.prefix}/{k}")

        def look(notes: dict[int, Listens], missing: list[int]) -> list[int]:
            for j, note in notes.items():
                if note["key"] != mine["key"]:
                    raise ValueError(_tokens(m.label(j), note["key"], mine["key"]))
            if missing:
                self._ask(missing)
            return missing

        at.set(f"at/{m.rank}", to_json(mine))
        return at.gather(
            "at",
            m.others,
            Listens,
            m.timeout,
            f"the addresses of {counted(len(m.others), 'island')}",
            label=lambda j, note: f"{j} ({m.names[j]})",
            look=look,
        )

    def _ask(self, missing: list[int]) -> None:
        """Raise PeerLost where who is missing cannot come any more."""
        if (now := time.monotonic()) >= self._asked + ASK:
            self._asked = now
            self._meeting.goes_on(self._meeting.label(*missing))

    def _meet(self, wires: dict[int, PeerConnection], end: float) -> None:
        """Wait until all peers have greeted."""
        m = self._meeting
        while missing := [j for j, wire in wires.items() if not wire.met]:
            for j in missing:
                if wires[j].gone:
                    raise PeerLost(f"{m.label(j)} could not be connected: {wires[j].gone}")
            self._poller.dial_again(wires.values())
            if time.monotonic() > end:
                why = next((f" ({wires[j].trouble})" for j in missing if wires[j].trouble), "")
                raise PeerLost(
                    f"{m.label(*missing)} could not be connected within {m.timeout:g} s{why}: see "
                    f"{m.setting} there and what lies between"
                )
            self._ask(missing)
            self._poller.wait_until(lambda: all(wire.met for wire in wires.values()), LOOK)


@functools.cache
def resolved(address: str, setting: str = "ISLAND_ADDRESS") -> str:
    """The IP address of this rank's host name, which `setting` gives; asked once in a process, and
    never in the network thread, whose heartbeats would stop. Raises PeerLost: it has none.
    """
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise PeerLost(f"this rank cannot listen on {address} ({setting}): {error}") from None


def bound(made: Any, host: str, name: str, setting: str = "ISLAND_ADDRESS") -> str:
    """Bind a socket to any port of an IP address; the endpoint. Raises PeerLost: it cannot."""
    made.ipv6 = ":" in host
    try:
        made.bind(f"tcp://{join_address(host, 0)}")
    except zmq.ZMQError as error:
        raise PeerLost(f"{name} cannot listen on {host} ({setting}): {error}") from None
    return str(made.last_endpoint.decode().rstrip("\0"))


def _tokens(who: str, theirs: str, ours: str) -> str:
    """The error of two islands with unlike keys."""
    if theirs and ours:
        return f"{who} has another ISLAND_TOKEN: set the same on all islands{see('token')}"
    where = f"{'here' if ours else 'there'} and not {'at' if ours else 'here, at'} {who}"
    return f"ISLAND_TOKEN is set {where}: set the same on all islands{see('token')}"
