"""Moving bytes between the ranks that hold the same shard on every island.

A `PeerGroup` is that set of ranks. It knows one move, everybody sends to everybody directly (one
round trip, where a ring takes R - 1), in pieces, so that the timeout measures silence and not size.
A ring was measured against it and is not used: among 8 islands it takes 6 times as long for what is
short, and is at most 5 % faster for what is long. Two ways to exchange are built on it:
`PeerGroup.gather`, where every payload reaches every rank (sparse codes; decoded and added in rank
order by the channel), and `collectives.reduce`. Both run in the thread of `worker.py`.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..errors import PeerLost, WireError, see
from .collectives import ReceivedMessage, reduce
from .header import ENDING, HEADER, SETUP, Header, check_body, fill, open_head, room
from .joining import Desk, Following
from .link import Link
from .meter import Meter

log = logging.getLogger("fsdp_demo")

Vectors = Sequence[tuple[Tensor, str]]
Weigh = Callable[[Sequence[Header]], Sequence[Sequence[float]]]

PIECE = 1 << 20  # bytes per send; the timeout counts from piece to piece, connections take turns
STREAMS = 8
"""Connections to one peer at most. Between islands, pieces are dealt to several of them on a long
link, since one TCP window (4 MiB where nobody has raised it) does not fill it."""
STREAM_RTT = 0.0125
"""Seconds of round trip for which one connection is enough: it has 1.6 MB in flight then, at 1
Gbit/s. Measured at that rate: at 20 ms more of them gain nothing, at 100 ms eight take 32 MB over
in 0.6 of the time of one."""
BUDGET = 32
"""Connections to all peers together. They share the island's line: 50 MB are in flight at 1.6 MB
each, which is 10 Gbit/s at 40 ms. Each takes time in every step, and five descriptors."""
TAGS = 1 << 24
"""Tags of one peer group, where several share a process group: one per message."""
# payload bytes of a full Ethernet frame: what a paced link carries of its nominal rate
TCP_SHARE = 1448 / 1514


class PeerGroup:
    """The ranks that hold the same shard on every island, one per island.

    Args:
        group: what moves pieces: a process group with `send` and `recv` over CPU tensors (gloo), or
            `zeromq.Connections`; None for a single replica.
        rank, size: this island and the number of islands in the group.
        names: the islands' names, for errors.
        timeout: seconds of silence after which a peer counts as lost.
        link: pace of a rehearsal, or None; `share` ranks of this island use it at once.

    Attributes:
        elastic: islands may come and go (`elastic_peers.py`). begun: islands have come together.
        digest: of the configuration, once it is agreed. ending: what is sent from now on belongs to
            `finish()`.
        unsettled: not all islands have what this one has, and will not: nothing may be saved.
        desk, following: where islands may join a run under way, this one as a donor or as a
            newcomer (`joining.py`).
    """

    elastic = False
    unsettled = False

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        names: Sequence[str],
        timeout: float,
        link: Link | None = None,
        share: int = 1,
    ):
        self.group, self.rank, self.size, self.names = group, rank, size, list(names)
        self.timeout, self.link, self.share = timeout, link, share
        self.meter = Meter()
        self.digest, self.ending = 0, False
        self.alike = self.something = self.begun = False
        self.desk: Desk | None = None
        self.following: Following | None = None
        self._tag = self._first_tag = 0
        _take_tags(self)
        self._works: list[tuple[int, bool, Any]] = []  # of the message under way

    def header(self, kind: int, step: int = 0, **fields: Any) -> Header:
        """The header of a message of this rank, but for its number."""
        return Header(
            self.digest,
            step,
            kind=kind,
            **{**fields, "flags": fields.get("flags", 0) | ENDING * self.ending},
        )

    def swap(
        self, header: Header, outgoing: Sequence[Tensor], sizes: Sequence[int], setup: bool = False
    ) -> tuple[list[Header], list[Tensor]]:
        """Send outgoing[j] to rank j and return what each rank j sent here; one's own is handed
        back.

        Args:
            header: of what is sent; the same kind, step and digest must come from everybody.
            outgoing: messages with room for a header (`header.room`), which is written here; on the
                CPU, contiguous. One may go to several.
            sizes: bytes of the bodies that are expected.

        Returns:
            Headers and bodies, in rank order.

        Raises:
            PeerLost: which island, and after what. Mismatch: an island does something else.
                WireError: a message is damaged.
        """
        self._tag += 1
        mine = replace(header, number=self._tag)
        for message in {id(t): t for j, t in enumerate(outgoing) if j != self.rank}.values():
            fill(message, mine)
        # Room for whole pieces: gloo aborts the process if a peer that is out of step sends more
        # than there is room for.
        pieces = [
            -(-(HEADER.size + n) // PIECE) if j != self.rank else 0 for j, n in enumerate(sizes)
        ]
        rooms = [torch.empty(n * PIECE, dtype=torch.uint8, device="cpu") for n in pieces]
        # gloo accepts a shorter message: what an earlier one left must not complete it
        for space, n in zip(rooms, sizes, strict=True):
            space[: HEADER.size].zero_()
            space[max(HEADER.size + n - 32, HEADER.size) : HEADER.size + n].fill_(0xA5)
        headers, crcs = [mine] * self.size, [0] * self.size
        self._works = works = self._post(outgoing, rooms)
        try:
            for j, first, work in works:
                self._wait(j, work)
                if first:
                    headers[j], crcs[j] = open_head(rooms[j], mine, sizes[j], self.label(j))
        except WireError:
            self._let_go(works)
            raise
        finally:
            self._works = []
        incoming = [r[HEADER.size : HEADER.size + n] for r, n in zip(rooms, sizes, strict=True)]
        incoming[self.rank] = outgoing[self.rank][HEADER.size :]
        for j in range(self.size):
            if j != self.rank:
                check_body(incoming[j], crcs[j], headers[j], self.label(j))
        sent = sum(t.numel() for j, t in enumerate(outgoing) if j != self.rank)
        received = sum(HEADER.size + n for j, n in enumerate(sizes) if j != self.rank)
        self._count(sent, received, setup)
        return headers, incoming

    def _wait(self, j: int, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout))
        except WireError:
            raise
        except RuntimeError as error:
            raise self._lost(j, error) from error

    def _let_go(self, works: list[tuple[int, bool, Any]]) -> None:
        """A peer does something else: give it a second to hear from us what we do, so that it can
        say so, too.
        """
        until = time.monotonic() + 1.0
        for _, first, work in works:
            if not first and not work.is_completed() and (left := until - time.monotonic()) > 0:
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=left))

    def _post(
        self, outgoing: Sequence[Tensor], rooms: Sequence[Tensor]
    ) -> list[tuple[int, bool, Any]]:
        """Hand all pieces to the group; (peer, whether it is the first that comes from there, work)
        of each, first pieces first.

        All receives are posted first. If the receiver has not posted its buffer, gloo needs one
        more round trip per send: 8 MB at 100 Mbit/s and 100 ms took 1.2 to 1.7 seconds the other
        way round. They take 0.78 this way, which is what rate and round trip allow."""
        group, others = self.group, [j for j in range(self.size) if j != self.rank]
        works, j, tag = [], self.rank, self._first_tag + self._tag
        try:
            for j in others:
                works += [
                    (j, i == 0, group.recv([part], j, tag))
                    for i, part in enumerate(rooms[j].split(PIECE))
                ]
            for j in others:
                works += [
                    (j, False, group.send([part], j, tag)) for part in outgoing[j].split(PIECE)
                ]
        except RuntimeError as error:
            raise self._lost(j, error) from error
        return sorted(works, key=lambda entry: not entry[1])

    def _count(self, sent: int, received: int, setup: bool) -> None:
        if self.size == 1:
            return
        if setup:
            self.meter.setup_bytes += sent
            return
        self.meter.count(sent, received)
        if self.link is not None:  # both directions at once, shared by the island's ranks
            rate = self.link.bits_per_second
            wire = 8 * max(sent, received) * self.share / (rate * TCP_SHARE) if rate else 0.0
            time.sleep(self.link.rtt + wire)

    def _lost(self, j: int, error: RuntimeError) -> PeerLost:
        reason = str(error).splitlines()[0][:160]
        return PeerLost(
            f"{self.label(j)} is gone or was silent for {self.timeout:g} s: "
            f"{reason}{see('island-lost')}"
        )

    def all_gather(
        self, data: Tensor, kind: int = SETUP, step: int = 0, setup: bool = True
    ) -> list[Tensor]:
        """`data` (uint8, equal length everywhere) of every rank, in rank order."""
        return self.gather(self.header(kind, step), data, setup)[1]

    def gather(
        self, header: Header, data: Tensor, setup: bool = False
    ) -> tuple[list[Header], list[Tensor]]:
        """`all_gather` with the headers."""
        message = room(data.numel())
        message[HEADER.size :] = data
        return self.swap(header, [message] * self.size, [data.numel()] * self.size, setup)

    def gather_any(self, header: Header, data: Tensor, longest: int) -> list[Tensor]:
        """`data` (uint8 [n], n > 0, of any length) of every rank, in rank order. Two messages:
        lengths, then what is so long.

        Raises:
            WireError: a rank claims more than `longest` bytes, or none. Nothing is made room for
                before.
        """
        lengths = self.all_gather(
            torch.tensor([data.numel()], dtype=torch.int64, device="cpu").view(torch.uint8),
            header.kind,
            header.step,
        )
        sizes = [int(t.view(torch.int64)) for t in lengths]
        for j, size in enumerate(sizes):
            if not 0 < size <= longest:
                raise WireError(
                    f"{self.label(j)} claims a text of {size} bytes: allowed are 1 to {longest}"
                )
        message = room(data.numel())
        message[HEADER.size :] = data
        return self.swap(header, [message] * self.size, sizes, setup=True)[1]

    def exchange(
        self, header: Header, body: Tensor, vectors: Vectors, weigh: Weigh, compare: bool = False
    ) -> ReceivedMessage:
        """What all replicas send in one message: a body (uint8, equal length everywhere), and
        vectors of which each gets the mean.

        Args:
            vectors: (fp32 [n] on the CPU, code); weigh: from the headers the weights of each (see
                `collectives.reduce`), or an error, which is raised here.
            compare: see `collectives.reduce`.
        """
        headers, bodies = self.gather(header, body)
        weights = weigh(headers)
        means = reduce(self, header, vectors, weights, compare) if vectors else []
        return ReceivedMessage(headers, bodies, means, slots=tuple(range(self.size)))

    def mean(self, header: Header, vectors: Vectors) -> list[Tensor]:
        """The plain mean over the replicas of each (fp32 [n] on the CPU, code)."""
        return reduce(self, header, vectors, [[1.0] * self.size] * len(vectors))

    def hand_out(
        self, header: Header, data: Tensor | None, size: int, donor: int, needs: Sequence[bool]
    ) -> Tensor:
        """The donor's `data` (uint8 [size], None elsewhere) on the ranks that need it; nothing on
        the others.
        """
        mine, empty = self.rank, room(0)
        message = empty
        if data is not None:
            message = room(size)
            message[HEADER.size :] = data
        outgoing = [message if mine == donor and needs[j] else empty for j in range(self.size)]
        sizes = [size if j == donor and needs[mine] else 0 for j in range(self.size)]
        return self.swap(header, outgoing, sizes, setup=True)[1][donor]

    def round_trip(self) -> float:
        """Seconds of a round trip between the two islands that are farthest apart, the same on all
        ranks of the peer group: as the kernels have seen it. Where one of them does not tell, it is
        the shortest of four short messages, which busy cores make longer.
        """
        known = self._longest(self.seen_round_trip())
        if math.isfinite(known):
            return known
        seen = []
        for _ in range(4):
            start = time.perf_counter()
            self.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))
            seen.append(time.perf_counter() - start)
        return self._longest(min(seen))

    def _longest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64, device="cpu").view(torch.uint8)
        return max(float(theirs.clone().view(torch.float64)) for theirs in self.all_gather(mine))

    def seen_round_trip(self) -> float:
        """Seconds of the shortest round trip to the farthest peer, as the kernel has seen it; inf
        where nobody knows, as in a mesh.
        """
        return math.inf

    def runs_in(self, submit: Callable[[Callable[[], None]], Any]) -> None:
        """`submit` runs a job in the thread that exchanges, after all that is under way."""

    @property
    def alive(self) -> tuple[int, ...]:
        """The numbers of the islands that take part."""
        return tuple(range(self.size))

    @property
    def waiting(self) -> float:
        """Seconds for which the message under way has been, where islands come and go; else 0."""
        return 0.0

    @property
    def awaited(self) -> tuple[int, ...]:
        """The numbers of the islands with which the message under way is not done yet; empty where
        none is. Read from any thread. gloo does not say which pieces are done before they are
        waited for, so with it these are all others until the whole message is here.
        """
        return tuple(sorted({j for j, _, work in self._works if not work.is_completed()}))

    @property
    def epoch(self) -> int:
        """How often the members have changed."""
        return 0

    def allow_early(self, longest: int) -> None:
        """Bytes of header, body and coded vectors that an island which leaves may send ahead of a
        message (`send_early`).
        """

    def send_early(self, header: Header, body: Tensor, vectors: Vectors, seconds: float) -> bool:
        """Where islands come and go, and this one leaves: send what it contributes to the coming
        message ahead of its time. Whether the others have it within so many seconds. Arguments
        as for `exchange`; `header.weight` is its share in every mean."""
        return False

    def ends_when(self, wish: Callable[[], bool]) -> None:
        """Where islands come and go: tell the others when `wish()`, that this rank was told to end.
        Asked in another thread.
        """

    @property
    def all_end(self) -> bool:
        """Where islands come and go: all of them are told to end."""
        return False

    @property
    def abandoned(self) -> bool:
        """A message of this rank comes to nothing, since all islands are told to end and not all
        send it: it is to be saved as unsent.
        """
        return False

    def stop_with_all(self, applied_at: int, seconds: float) -> int | None:
        """All islands are told to end, and this rank sends nothing more: wait until all have what
        all have sent. In the worker's thread, after what is under way.

        Args:
            applied_at: how many steps this rank had taken when it last applied a message.
            seconds: to wait at most.

        Returns:
            The most that any island says for `applied_at`; None where not all have come so far:
            then nothing may be saved.
        """
        return applied_at

    def leave(self) -> None:
        """Tell the others that this island goes on no more."""

    def expel(self, why: str) -> None:
        """This island has gone wrong and comes back as a newcomer: end its process, and save
        nothing. Only where islands come and go.
        """
        raise PeerLost(why)

    def wait_stable(self, seconds: float) -> bool:
        """Wait until all islands have what this one has; True at once where members are fixed."""
        return True

    def wait_read(self, seconds: float) -> bool:
        """At the end of a run: wait until all islands have what this one has, or are gone; True at
        once where members are fixed.
        """
        return True

    @property
    def slot(self) -> int:
        """This island's number in the run."""
        return self.rank

    def label(self, j: int) -> str:
        """How errors name the island of rank j."""
        return f"island {j} ({self.names[j]})"

    def label_of(self, slot: int) -> str:
        """How errors name an island by its number in the run."""
        return self.label(slot)

    def release(self) -> None:
        """Drop the process groups; a live one at interpreter exit can abort the process."""
        self.group = None


_live: weakref.WeakSet[PeerGroup] = weakref.WeakSet()
_taking = threading.Lock()


def _take_tags(peers: PeerGroup) -> None:
    """Give it the first tags that no other peer group on the same process group has. Several
    exchanges may share the group of a mesh, and each has a thread of its own: equal tags would
    swap their messages. All islands attach in one order, so they find the same tags."""
    with _taking:
        taken = {p._first_tag for p in _live if p.group is peers.group is not None}
        peers._first_tag = next(n for n in itertools.count(0, TAGS) if n not in taken)
        _live.add(peers)


def streams(rtt: float, num_peers: int) -> int:
    """Connections to each of so many peers for a round trip of `rtt` seconds.

    >>> [streams(seconds, 1) for seconds in (0.001, 0.02, 0.05, 0.1, 0.3)]
    [1, 1, 4, 8, 8]
    >>> [streams(0.1, num_peers) for num_peers in (1, 4, 7, 15, 31)]
    [8, 8, 4, 2, 1]
    """
    return min(max(int(rtt / STREAM_RTT + 0.1), 1), most_streams(num_peers))


def most_streams(num_peers: int) -> int:
    """Connections to each of so many peers at most, however long the link is."""
    return min(max(BUDGET // max(num_peers, 1), 1), STREAMS)
