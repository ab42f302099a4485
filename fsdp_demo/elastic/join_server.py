"""A member's side of joining, on one rank: a listener that a newcomer asks, connections to it,
and what the donor sends it.

Each rank of each member listens at its listener (its address stands in the store,
`door/<slot>.<incarnation>.<peer group>`). A newcomer tells there who it is and is given ports of
its own: for short words, for ticks and the snapshot, for messages, and for what it sends as a
member. It is a joining island until a record names it. One joining island at a time; others are
told to come later. The lowest slot is its donor.

All of it runs in the network thread. What the donor's training hands out comes over
`donor_feed.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from msgspec import Struct
from torch import Tensor

from ..errors import UNREADABLE
from ..files import from_json, to_json
from ..membership.protocol_types import Member
from ..peers import bulk_stream
from ..peers.connection import PeerConnection
from ..peers.poller import Poller
from ..peers.zeromq import bound, bracketed

log = logging.getLogger("fsdp_demo")

LEAST = 64 << 20
"""Bytes that may wait for a newcomer in any case; else as many as a snapshot has. A link that is
slower cannot be joined over."""

TO_CONNECT = 30.0
"""Seconds that somebody who was let in has to connect."""

WIRES = ("notes", "ticks", "messages")
"""Connections of a joining island, but for those for messages."""


def _word(note: bytes) -> list[Any]:
    """What a joining island says: ["follow", digests by name of what it brings] or ["ready"].
    Raises one of `UNREADABLE` for what cannot be read.
    """
    word = list(json.loads(note))
    if word[0] == "follow":
        word[1] = {str(name): str(mark) for name, mark in word[1].items()}
    return word


class Request(Struct):
    """What is said at a listener: `ask` is "status", or somebody (slot, life, name) wants to come
    into peer group `line` of a run.
    """

    ask: str = ""
    run: str = ""
    line: int = -1
    slot: int = -1
    life: int = 0
    name: str = ""


@dataclass
class JoiningIsland:
    """A newcomer that is not a member yet.

    Attributes:
        asked: it wants a snapshot from this rank. brings: see `JoinFeed`. following: it has it.
            moved: it is a member. since: when it asked. limit: notes that may wait for it.
    """

    member: Member
    name: str
    wires: dict[str, PeerConnection]
    connections: list[PeerConnection]
    asked: bool = False
    brings: dict[str, str] = field(default_factory=dict)
    following: bool = False
    moved: bool = False
    since: float = field(default_factory=time.monotonic)
    limit: int = LEAST // bulk_stream.LONGEST

    @property
    def every(self) -> list[PeerConnection]:
        """All its connections."""
        return [*self.wires.values(), *self.connections]


def greeting(prefix: str, peer_group: int, k: str, sender: Member, receiver: Member) -> bytes:
    """What `sender` says first on connection `k` to `receiver`."""
    text = f"{prefix} {peer_group} {k} {tuple(sender)} {tuple(receiver)}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def connection_names(count: int) -> list[str]:
    """The names of all connections to a joining island."""
    # both ends greet with them: other names would be another wire format, like the keys "line" and
    # "lanes" of a request and its answer
    return [*WIRES, *(f"lane{k}" for k in range(count))]


class JoinServer:
    """The listener of one rank, and who has come in.

    Args:
        hub: of all connections. prefix: keys of the run. me, peer_group: this rank. address: where
            others reach it, "" if nobody can.
        num_connections: asked for the number of connections for messages.
        refused: asked whether a newcomer may come in now; the reason, "" if it may. status: how
            this rank stands, for `rendezvous/run_status.py`.
        names: of the islands, by slot; a newcomer's is added.
        dead: seconds of silence after which a newcomer is not waited for, so that another may come.

    Attributes:
        joining island: who is there.
        endpoint: host and port of the listener; ("", 0) without one.
    """

    def __init__(
        self,
        poller: Poller,
        prefix: str,
        me: Member,
        peer_group: int,
        address: str,
        num_connections: Callable[[], int],
        refused: Callable[[Member], str],
        status: Callable[[], dict[str, Any]] = dict,
        names: dict[int, str] | None = None,
        dead: float = math.inf,
    ):
        self._poller = poller
        self._prefix = prefix
        self._me = me
        self._peer_group = peer_group
        self._address = address
        self._num_connections = num_connections
        self._refused = refused
        self._status = status
        self._names = {} if names is None else names
        self._dead, self._looked = dead, time.monotonic()
        self.joining_island: JoiningIsland | None = None
        self.endpoint = ("", 0)
        self._listener: Any = None
        if address:
            self._listener = poller.other_socket(zmq.ROUTER)
            if poller.keys is not None:
                poller.keys.listen(self._listener)
            where = bound(self._listener, address, f"island {me.slot}")
            self.endpoint = (address, int(where.rpartition(":")[2]))
            poller.run(lambda: poller.attend(self._listener, self._asked))

    @property
    def first(self) -> bool:
        """Whether this is the island's first peer group: a newcomer hears of steps on that
        alone."""
        return self._peer_group == 0

    def put(
        self,
        joining_island: JoiningIsland | None,
        wire: str,
        head: bulk_stream.ItemHead,
        parts: Sequence[Tensor],
    ) -> None:
        """Send an item (`peers/bulk_stream.py`) to a joining island that is still there."""
        if (
            joining_island is not None
            and joining_island is self.joining_island
            and not joining_island.wires[wire].gone
        ):
            bulk_stream.put(self._poller, joining_island.wires[wire], head, parts)

    # ---- the listener
    # ------------------------------------------------------------------------------

    def _asked(self, _: int) -> None:
        with suppress(zmq.Again):
            parts = self._listener.recv_multipart(zmq.NOBLOCK)
            if len(parts) == 2:
                self._listener.send_multipart(
                    [parts[0], json.dumps(self._answer(parts[1])).encode()], zmq.NOBLOCK
                )

    def _answer(self, data: bytes) -> dict[str, Any]:
        try:
            found = from_json(data, Request, "a request")
        except ValueError as error:
            return {"refused": str(error)}
        if found.ask == "status":
            return self._status()
        if found.run != self._prefix or found.line != self._peer_group:
            return {
                "refused": f"this is peer group {self._peer_group} of run {self._prefix}, not peer "
                f"group {found.line} of {found.run:.200}"
            }
        who = Member(found.slot, found.life)
        if self.joining_island is not None and self.joining_island.member.slot == who.slot:
            self.drop("it has started again")
        if self.joining_island is not None:
            return {"later": f"{self.joining_island.name} joins at the moment"}
        if why := self._refused(who):
            return {"later": why}
        return self._let_in(who, found.name[:200])

    def _let_in(self, who: Member, name: str) -> dict[str, Any]:
        wires, ports = {}, []
        for k in connection_names(self._num_connections()):
            wire = self._poller.add(0, True)
            ports.append(
                int(bound(wire.socket, self._address, f"island {self._me.slot}").rpartition(":")[2])
            )
            wire.greet(
                greeting(self._prefix, self._peer_group, k, self._me, who),
                greeting(self._prefix, self._peer_group, k, who, self._me),
            )
            wires[k] = wire
        connections = [wires.pop(k) for k in list(wires) if k not in WIRES]
        self.joining_island = JoiningIsland(who, name, wires, connections)
        self._names[who.slot] = name
        return {"ports": ports, "lanes": len(connections)}

    # ---- the joining island
    # -----------------------------------------------------------------------------

    def look(self) -> list[list[Any]]:
        """What the joining island says; it is dropped if its connection is gone, or it reads too
        slowly."""
        joining_island, words, now = self.joining_island, [], time.monotonic()
        stood, self._looked = now - self._looked, now
        if joining_island is None:
            return []
        if why := next((w.gone for w in joining_island.every if w.gone), ""):
            self.drop(why)
            return []
        if now - joining_island.since > TO_CONNECT and not all(w.met for w in joining_island.every):
            self.drop(f"it was let in, and has not connected within {TO_CONNECT:g} s")
            return []
        if stood > 1.0:  # it was this process that did not listen
            joining_island.wires["notes"].heard_at = now
        silent = now - joining_island.wires["notes"].heard_at
        if (
            silent > self._dead
            and not joining_island.moved
            and all(w.met for w in joining_island.every)
        ):
            self.drop(f"it has been silent for {silent:.0f} s (ISLAND_DEAD is {self._dead:g})")
            return []
        if (
            joining_island.following
            and sum(w.waiting for w in joining_island.wires.values()) > joining_island.limit
        ):
            self.drop("it reads more slowly than messages come: the link is too slow to join over")
            return []
        notes = joining_island.wires["notes"].notes
        while notes and not joining_island.moved:
            try:
                words.append(_word(notes.popleft()))
            except UNREADABLE:
                self.drop("it sends what cannot be read")
                return []
        return words

    def drop(self, why: str) -> None:
        """The joining island is not waited for any more."""
        joining_island, self.joining_island = self.joining_island, None
        if joining_island is not None:
            if not joining_island.moved:
                log.warning("%s does not join: %s", joining_island.name, why)
            for wire in (
                joining_island.every
                if not joining_island.moved
                else [joining_island.wires["ticks"], joining_island.wires["messages"]]
            ):
                wire.close(0)

    def move_in(self, member: Member) -> tuple[PeerConnection, list[PeerConnection]] | None:
        """The joining island is a member from now on: its connection for words, and those for
        messages. What it follows goes on until `over`.
        """
        joining_island = self.joining_island
        if joining_island is None or joining_island.member != member:
            return None
        joining_island.moved = True
        return joining_island.wires["notes"], joining_island.connections

    def over(self, member: Member) -> None:
        """The newcomer needs nothing more of what it follows."""
        joining_island = self.joining_island
        if joining_island is not None and joining_island.member == member:
            self.joining_island = None
            for k in ("ticks", "messages"):
                joining_island.wires[k].close(60.0)

    def close(self) -> None:
        """Close the listener."""
        if self._listener is not None:
            self._poller.neglect(self._listener)
        self.drop("this island has ended") if self.joining_island is not None else None


def ask_join_server(
    context: Any, keys: Any, host: str, port: int, request: Request, seconds: float
) -> dict[str, Any] | None:
    """Ask at a listener: its answer, None if nobody answers within so many seconds."""
    made = context.socket(zmq.DEALER)
    try:
        made.linger, made.ipv6, made.maxmsgsize = 0, ":" in host, 1 << 16
        if keys is not None:
            keys.connect(made)
        made.connect(
            f"tcp://{bracketed(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))}:{port}"  # noqa: E501
        )
        made.send(to_json(request).encode())
        if not made.poll(1e3 * seconds):
            return None
        found = json.loads(made.recv())
        return found if isinstance(found, dict) else None
    except (zmq.ZMQError, ValueError, OSError):
        return None
    finally:
        made.close(0)
