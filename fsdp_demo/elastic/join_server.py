"""A member's side of joining, on one rank: a listener that a newcomer asks, connections to it,
and what the donor sends it.

Each rank of each member listens at an address that stands in the store
(`join_messages.listener_key`). A newcomer tells there who it is and is given ports of its own: for
notes, for the snapshot and ticks, for messages, and for what it sends as a member. It is a
*joining island* until a record names it. There is one at a time; others are told to come later.
Its donor is the member with the lowest slot.

`JoinServer` runs in the network thread. `DonorFeed` is what the donor's training calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import zmq
from torch import Tensor

from ..errors import WireError
from ..files import unreadable
from ..membership.protocol_types import Member
from ..peers import bulk_stream
from ..peers.collectives import ReceivedMessage
from ..peers.connection import PeerConnection
from ..peers.header import WITHIN
from ..peers.join_messages import (
    DonorSnapshot,
    JoinAnswer,
    JoinConnections,
    LetIn,
    RankStatus,
    Refusal,
    Request,
    Tick,
    packed,
    to_bytes,
)
from ..peers.poller import Poller
from ..peers.zeromq import bound, resolved
from .chunks import most_streams
from .message_state import RoundMessage
from .network_loop import NetworkLoop
from .notes import Follow, Planned, Ready, read_note

log = logging.getLogger("fsdp_demo")

LEAST = 64 << 20
"""Bytes that may wait for a newcomer in any case; else as many as a snapshot has. A link that is
slower cannot be joined over."""

TO_CONNECT = 30.0
"""Seconds that an island which was let in has to connect."""


class JoiningIsland(JoinConnections):
    """A newcomer that is not a member yet. Arguments: its name; for others see `JoinConnections`.

    Attributes:
        asked: it wants a snapshot from this rank. brings: digests by name of what it has already,
            which need not be sent if it is the same here.
        following: it has been sent its snapshot. outdated: that is of before a reset. moved: it is
            a member. since: when it asked (`time.monotonic`). limit: notes that may wait for it.
    """

    listens = True

    def __init__(self, name: str, *args: Any):
        super().__init__(*args)
        self.name, self.since = name, time.monotonic()
        self.brings: dict[str, str] = {}
        self.asked = self.following = self.outdated = self.moved = False
        self.limit = LEAST // bulk_stream.LONGEST


def num_connections(others: Mapping[Member, Sequence[PeerConnection]]) -> int:
    """Connections for messages to one more peer, as many as to others if descriptors allow."""
    as_before = max((len(wires) for wires in others.values()), default=1)
    return min(as_before, most_streams(len(others) + 1))


class JoinServer:
    """The listener of one rank, and the island that joins there.

    Args:
        prefix: keys of the run. address: where others reach this rank, "" if nobody can: then there
            is no listener.
        loop: the membership of this rank. names: of the islands, by slot; a newcomer's is added.

    Attributes:
        joining_island: the newcomer that is there. first: this is the first peer group of the
            island, the only one that tells a newcomer of steps.
        endpoint: host and port of the listener; ("", 0) without one.
    """

    def __init__(
        self, poller: Poller, prefix: str, address: str, loop: NetworkLoop, names: dict[int, str]
    ):
        self._poller, self._prefix = poller, prefix
        self.loop, self._names = loop, names
        self._me, self._peer_group = loop.machine.me, loop.machine.rank
        self._label, self._host, self._trouble = f"island {self._me.slot}", "", ""
        self.first = self._peer_group == 0
        self._dead, self._looked = loop.detector.dead, time.monotonic()
        self.joining_island: JoiningIsland | None = None
        self.endpoint = ("", 0)
        self._listener: Any = None
        if address:
            self._host = resolved(address)
            self._listener = poller.other_socket(zmq.ROUTER)
            if poller.keys is not None:
                poller.keys.listen(self._listener)
            self.endpoint = (address, self._bind(self._listener))
            poller.run(lambda: poller.attend(self._listener, self._asked))

    def _bind(self, made: Any) -> int:
        """Let a socket listen on any port; that port."""
        return int(bound(made, self._host, self._label).rpartition(":")[2])

    @property
    def followed(self) -> bool:
        """Whether an island that is a member already still reads what its donor sends."""
        return self.joining_island is not None and self.joining_island.moved

    def put(
        self, island: JoiningIsland, wire: str, head: bulk_stream.ItemHead, parts: Sequence[Tensor]
    ) -> None:
        """Send an item (`peers/bulk_stream.py`) to a joining island that is still there."""
        if island is self.joining_island and not island.wires[wire].gone:
            bulk_stream.put(self._poller, island.wires[wire], head, parts)

    # ---- the listener --------------------------------------------------------------------------

    def _asked(self, _: int) -> None:
        with suppress(zmq.Again):
            parts = self._listener.recv_multipart(zmq.NOBLOCK)
            if len(parts) == 2:
                answer: JoinAnswer
                try:
                    answer = self._answer(parts[1])
                except Exception as error:  # no port, no descriptor: a newcomer asks again
                    answer = Refusal(why := f"it lets nobody in for now: {error!r:.200}")
                    if why != self._trouble:
                        log.warning("%s: %s", self._label, why)
                    self._trouble = why
                self._listener.send_multipart([parts[0], msgspec.json.encode(answer)], zmq.NOBLOCK)

    def _answer(self, data: bytes) -> JoinAnswer:
        try:
            found = msgspec.json.decode(data, type=Request)
        except (ValueError, RecursionError) as error:
            return Refusal(str(unreadable(data, "a request", error)), final=True)
        if found.ask == "status":
            return self._status()
        if found.run != self._prefix or found.peer_group != self._peer_group:
            return Refusal(
                f"this is peer group {self._peer_group} of run {self._prefix}, not peer group "
                f"{found.peer_group} of {found.run:.200}",
                final=True,
            )
        if self.joining_island is not None and self.joining_island.member.slot == found.slot:
            self.drop("it has started again")
        if self.joining_island is not None:
            return Refusal(f"{self.joining_island.name} joins at the moment")
        if self.loop.machine.state != "running":
            return Refusal("the members change at the moment")
        if found.slot in [m.slot for m in self.loop.machine.record.members]:
            return Refusal(f"island {found.slot} is a member: its end was not noticed yet")
        return self._let_in(Member(found.slot, found.incarnation), found.name[:200])

    def _status(self) -> RankStatus:
        """How this rank stands, for `fsdp-demo status`."""
        rank, island, now = self.loop.machine, self.joining_island, time.monotonic()
        notes = self.loop.detector.notes
        heard = {str(m.slot): round(now - wire.heard_at, 2) for m, wire in notes.items()}
        joining = island.name if island is not None and not island.moved else ""
        return RankStatus(rank.next, rank.landed, rank.state, heard, joining)

    def _let_in(self, who: Member, name: str) -> LetIn:
        count = num_connections(self.loop.detector.connections)
        here = self._poller, self._prefix, self._peer_group, self._me, who, count
        island = JoiningIsland(name, *here)
        try:
            ports = [self._bind(w.socket) for w in island.every]
        except BaseException:
            island.close()
            raise
        self.joining_island, self._names[who.slot], self._trouble = island, name, ""
        return LetIn(ports)

    # ---- the joining island --------------------------------------------------------------------

    def look(self) -> Member | None:
        """Read the notes of the joining island, and drop that island where it cannot go on. Returns
        the newcomer where it is a few messages behind and asks to take part.
        """
        island, now = self.joining_island, time.monotonic()
        stood, self._looked = now - self._looked, now
        if island is None:
            return None
        if stood > 1.0:  # it was this process that did not listen
            island.wires["notes"].heard_at = now
        if why := self._cannot_join(island, now):
            self.drop(why)
            return None
        ready, notes = False, island.wires["notes"].notes
        while notes and not island.moved:
            try:
                note = read_note(notes.popleft())
            except WireError:
                self.drop("it sends what cannot be read")
                return None
            if isinstance(note, Follow):
                island.brings, island.asked = note.brings, True
            ready |= isinstance(note, Ready) and island.following and not island.outdated
        return island.member if ready else None

    def _cannot_join(self, island: JoiningIsland, now: float) -> str:
        """Why an island does not join any more; empty while it may."""
        if island.gone:
            return island.gone
        if not island.met:
            late = now - island.since > TO_CONNECT
            return f"it was let in, and has not connected within {TO_CONNECT:g} s" if late else ""
        silent = now - island.wires["notes"].heard_at
        if silent > self._dead and not island.moved:
            return f"it has been silent for {silent:.0f} s (ISLAND_DEAD is {self._dead:g})"
        if island.following and sum(w.waiting for w in island.wires.values()) > island.limit:
            return "it reads more slowly than messages come: the link is too slow to join over"
        return ""

    def drop(self, why: str) -> None:
        """Forget the joining island, and close its connections; those of a member stay, but for the
        two on which it follows its donor.
        """
        island, self.joining_island = self.joining_island, None
        if island is None:
            return
        wires = island.every
        if island.moved:  # what is left is what it follows
            wires = [island.wires["ticks"], island.wires["messages"]]
        else:
            log.warning("%s does not join: %s", island.name, why)
        for wire in wires:
            wire.close(0)

    def move_in(self, member: Member) -> bool:
        """The joining island is a member from now on; False if it is not there. What it follows
        goes on until `over`.
        """
        island, rank, detector = self.joining_island, self.loop.machine, self.loop.detector
        if island is None or island.member != member:
            return False
        island.moved, notes, record = True, island.wires["notes"], rank.record
        detector.admit(member, notes, island.connections, time.monotonic())
        for wire in detector.of(member):
            wire.said = (record.epoch, rank.landed)
            wire.renew(record.view)
        detector.send(Planned(record.epoch), [notes])
        if self.first:
            base = record.base[record.members.index(member)]
            who = self.loop.labels(member.slot)
            log.info("epoch %d: %s joins, from message %d on", record.epoch, who, base)
        return True

    def over(self, member: Member) -> None:
        """Close the connections on which a new member has followed its donor to the end."""
        island = self.joining_island
        if island is not None and island.member == member:
            self.joining_island = None
            for k in ("ticks", "messages"):
                island.wires[k].close(60.0)

    def close(self) -> None:
        """Close the listener."""
        if self._listener is not None:
            self._poller.neglect(self._listener)
        self.drop("this island has ended")


class DonorFeed:
    """What the training of a donor hands to a joining island, in one peer group.

    `wanted`, `brings`, `follows`, `hand` and `tick` are called in the thread that trains and return
    at once, the others in the thread that exchanges: `launching` and `message` while it is
    `feeding`.

    Args:
        submit: runs a job in the thread that exchanges, after
            all that is under way. next_message: the number of the next message of the peer group.
    """

    def __init__(
        self,
        join_server: JoinServer,
        submit: Callable[[Callable[[], None]], Any],
        next_message: Callable[[], int],
    ):
        self._join_server, self._submit, self._next = join_server, submit, next_message
        self._for: JoiningIsland | None = None  # which got the last snapshot

    @property
    def wanted(self) -> bool:
        """Whether an island asks for a snapshot here and has not got one. Read once at the end of
        each step: a snapshot is taken when the feeds of all ranks of the island say so.
        """
        return (
            (island := self._join_server.joining_island) is not None
            and island.asked
            and island is not self._for
        )

    @property
    def brings(self) -> Mapping[str, str]:
        """What the newcomer's rank has said in its first `Following.head`, for a snapshot."""
        island = self._join_server.joining_island
        return {} if island is None else island.brings

    @property
    def follows(self) -> bool:
        """Whether an island has a snapshot and wants ticks. Asked on an island's first rank."""
        return self._join_server.first and self._served is not None

    @property
    def feeding(self) -> bool:
        """Whether the joining island, connected, has its snapshot: it is sent each message then."""
        # read once: the network thread may drop it meanwhile
        return (island := self._served) is not None and island.following

    @property
    def _served(self) -> JoiningIsland | None:
        """The joining island that got a snapshot, while it is connected; else None."""
        return self._for if self._for is self._join_server.joining_island else None

    def hand(self, snapshot: DonorSnapshot, under_way: Sequence[Future[ReceivedMessage]]) -> None:
        """Send a snapshot.

        Args:
            under_way: what the messages that the snapshot has in flight bring, oldest first: the
                first messages to follow. Those launched after this call come next.
        """
        island = self._for = self._join_server.joining_island
        if island is None:  # it has gone since it asked
            return
        parts = snapshot.pack()

        def begin() -> None:
            messages = [packed(future.result()) for future in under_way]
            head = bulk_stream.ItemHead("snapshot", next=self._next())
            self._put(island, "ticks", head, parts)
            for message in messages:
                self._put(island, "messages", bulk_stream.ItemHead("message"), message)
            every = [p for item in (parts, *messages) for p in item]
            most = max(LEAST, sum(p.numel() for p in every)) // bulk_stream.LONGEST
            island.limit = most + len(every) + len(messages) + 1024
            island.following = True

        self._submit(begin)

    def tick(self, tick: Tick | None) -> None:
        """Send a step that has ended. The first one after `hand` has the snapshot's step as its
        number. None: parameters were reset, so the snapshot is outdated.
        """
        island = self._for
        if island is not None and self._join_server.first:
            head = bulk_stream.ItemHead("reset" if tick is None else "tick")
            parts = [] if tick is None else [to_bytes(tick)]
            island.outdated |= tick is None
            self._submit(lambda: self._put(island, "ticks", head, parts))

    def launching(self, message: RoundMessage) -> None:
        """A message is sent here now: a newcomer may begin with it, if it is of a step."""
        island = self._served
        if island is not None and message.header.kind in WITHIN:
            self._put(island, "messages", bulk_stream.ItemHead("launch", message.n), [])

    def message(self, n: int, arrived: ReceivedMessage, coded: Sequence[Tensor] = ()) -> None:
        """A message has been delivered here; `coded`: see `packed`."""
        island = self._served
        if island is not None:
            head = bulk_stream.ItemHead("message", n)
            self._put(island, "messages", head, packed(arrived, coded))

    def _put(
        self, island: JoiningIsland, wire: str, head: bulk_stream.ItemHead, parts: Sequence[Tensor]
    ) -> None:
        self._join_server.loop.do(lambda: self._join_server.put(island, wire, head, parts))
