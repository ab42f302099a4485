"""Moving bytes between the ranks that hold the same shard on every island.

A `Line` is that set of ranks. It knows one move, everybody sends to everybody directly (one round trip, where a ring takes R - 1), in
pieces, so that the timeout measures silence and not size. A ring was measured against it (`recipes/benchmarks/link.py --ring`) and is not
used: among 8 islands it takes 6 times as long for what is short, and is at most 5 % faster for what is long. On long links a line has
several connections, to which pieces are dealt, since one TCP window (4 MiB where nobody has raised it) does not fill them. Two transports
are built on it:

* `Line.gather`: every payload reaches every rank (sparse codes; decoded and added in rank order by the channel).
* `reduce`: dense vectors. Each rank owns 1 / R of them, receives the others' codes, adds them in rank order in fp32, divides by the sum of
  the weights and sends the coded mean to all: the bytes of a ring all-reduce, 2 (R - 1) / R of the vector, and the same bits everywhere.

Both run in one worker thread per exchange, in order, so that training can go on meanwhile and signals still reach the main thread.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor

from .codecs import vectors as coding
from .codecs.frame import ENDING, HEADER, MEANS, PARTS, PAYLOAD, SETUP, Header, WireError, check_body, fill, open_head, room
from .link import Link
from .meter import Meter

log = logging.getLogger("fsdp_demo")

PIECE = 1 << 20  # bytes per send; the timeout counts from piece to piece, connections take turns
STREAMS = 8  # connections to one peer at most
STREAM_RTT = 0.0125
"""Seconds of round trip for which one connection is enough. Measured at 1 Gbit/s: at 20 ms more of them gain nothing, at 100 ms eight take
32 MB over in 0.6 of the time of one."""
TCP_SHARE = 1448 / 1514  # payload bytes of a full Ethernet frame: what a paced link carries of its nominal rate


class PeerLost(RuntimeError):
    """A peer island died or was silent for longer than the timeout. What was in flight has not been applied.

    Example:
        >>> from fsdp_demo import PeerLost
        >>> issubclass(PeerLost, RuntimeError)
        True
    """


class Line:
    """The ranks that hold the same shard on every island, one per island.

    Args:
        group: a process group with `send` and `recv` over CPU tensors (gloo), or None for a single replica.
        rank, size: this island and the number of islands in the group.
        names: the islands' names, for errors.
        timeout: seconds of silence after which a peer counts as lost.
        link: pace of a rehearsal, or None; `share` ranks of this island use it at once.

    Attributes:
        more: further groups of the same ranks, each with connections of its own (`widen`).
        digest: of the configuration, once it is agreed. ending: what is sent from now on belongs to `finish()`.
    """

    def __init__(self, group: Any, rank: int, size: int, names: Sequence[str], timeout: float, link: Link | None = None, share: int = 1):
        self.group, self.rank, self.size, self.names = group, rank, size, list(names)
        self.more: list[Any] = []
        self.timeout, self.link, self.share = timeout, link, share
        self.meter = Meter()
        self.digest, self.ending = 0, False
        self.alike = self.something = False
        self._tag = 0

    def header(self, kind: int, step: int = 0, **fields: Any) -> Header:
        """The header of a message of this rank, but for its number."""
        return Header(self.digest, step, kind=kind, **{**fields, "flags": fields.get("flags", 0) | ENDING * self.ending})

    def swap(
        self, header: Header, outgoing: Sequence[Tensor], sizes: Sequence[int], setup: bool = False
    ) -> tuple[list[Header], list[Tensor]]:
        """Send outgoing[j] to rank j and return what each rank j sent here; one's own is handed back.

        Args:
            header: of what is sent; the same kind, step and digest must come from everybody.
            outgoing: messages with room for a header (`frame.room`), which is written here; on the CPU, contiguous. One may go to several.
            sizes: bytes of the bodies that are expected.

        Returns:
            Headers and bodies, in rank order.

        Raises:
            PeerLost: which island, and after what. Mismatch: an island does something else. WireError: a message is damaged.
        """
        self._tag += 1
        mine = replace(header, number=self._tag)
        for message in {id(t): t for j, t in enumerate(outgoing) if j != self.rank}.values():
            fill(message, mine)
        # Room for whole pieces: gloo aborts the process if a peer that is out of step sends more than there is room for.
        pieces = [-(-(HEADER.size + n) // PIECE) if j != self.rank else 0 for j, n in enumerate(sizes)]
        rooms = [torch.empty(n * PIECE, dtype=torch.uint8) for n in pieces]
        for space, n in zip(rooms, sizes, strict=True):  # gloo accepts a shorter message: what an earlier one left must not complete it
            space[: HEADER.size].zero_()
            space[max(HEADER.size + n - 32, HEADER.size) : HEADER.size + n].fill_(0xA5)
        headers, crcs = [mine] * self.size, [0] * self.size
        works = self._post(outgoing, rooms)
        try:
            for j, first, work in works:
                self._wait(j, work)
                if first:
                    headers[j], crcs[j] = open_head(rooms[j], mine, sizes[j], self.label(j))
        except WireError:
            self._let_go(works)
            raise
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
        except RuntimeError as error:
            raise self._lost(j, error) from error

    def _let_go(self, works: list[tuple[int, bool, Any]]) -> None:
        """A peer does something else: give it a second to hear from us what we do, so that it can say so, too."""
        until = time.monotonic() + 1.0
        for _, first, work in works:
            if not first and not work.is_completed() and (left := until - time.monotonic()) > 0:
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=left))

    def _post(self, outgoing: Sequence[Tensor], rooms: Sequence[Tensor]) -> list[tuple[int, bool, Any]]:
        """Hand all pieces to the groups, in turns; (peer, whether it is the first that comes from there, work) of each, first pieces first.

        All receives are posted first: gloo bargains once more about a send whose receiver is not ready (8 MB at 100 Mbit/s and 100 ms took
        1.2 to 1.7 seconds the other way round, and takes 0.78 so, which is what rate and round trip allow)."""
        groups, others = [self.group, *self.more], [j for j in range(self.size) if j != self.rank]
        works, j = [], self.rank
        try:
            for j in others:
                works += [(j, i == 0, groups[i % len(groups)].recv([part], j, self._tag)) for i, part in enumerate(rooms[j].split(PIECE))]
            for j in others:
                works += [(j, False, groups[i % len(groups)].send([part], j, self._tag)) for i, part in enumerate(outgoing[j].split(PIECE))]
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
        return PeerLost(f"{self.label(j)} is gone or was silent for {self.timeout:g} s: {reason}")

    def all_gather(self, data: Tensor, kind: int = SETUP, step: int = 0, setup: bool = True) -> list[Tensor]:
        """`data` (uint8, equal length everywhere) of every rank, in rank order."""
        return self.gather(self.header(kind, step), data, setup)[1]

    def gather(self, header: Header, data: Tensor, setup: bool = False) -> tuple[list[Header], list[Tensor]]:
        """`all_gather` with the headers."""
        message = room(data.numel())
        message[HEADER.size :] = data
        return self.swap(header, [message] * self.size, [data.numel()] * self.size, setup)

    def widen(self, connect: Callable[[int], Any]) -> None:
        """On a long link, add connections: `connect(k)` makes group k = 1, 2, ... of the same ranks.

        The round trip is measured, and all ranks of the line take the longest that one of them has seen.

        Raises:
            PeerLost: see `swap`.
        """
        if self.size == 1:
            return
        seen = []
        for _ in range(4):
            start = time.perf_counter()
            self.all_gather(torch.zeros(1, dtype=torch.uint8))
            seen.append(time.perf_counter() - start)
        mine = torch.tensor([min(seen)], dtype=torch.float64).view(torch.uint8)
        rtt = max(float(theirs.clone().view(torch.float64)) for theirs in self.all_gather(mine))
        count = streams(rtt)
        self.more = [connect(k) for k in range(1, count)]
        if self.more:
            log.info("%.0f ms to the other islands: %d connections to each", 1e3 * rtt, count)

    def label(self, j: int) -> str:
        """How errors name the island of rank j."""
        return f"island {j} ({self.names[j]})"

    def release(self) -> None:
        """Drop the process groups; a live one at interpreter exit can abort the process."""
        self.group, self.more = None, []


def streams(rtt: float) -> int:
    """Connections to each peer for a round trip of `rtt` seconds.

    >>> [streams(seconds) for seconds in (0.001, 0.02, 0.05, 0.1, 0.3)]
    [1, 1, 4, 8, 8]
    """
    return min(max(int(rtt / STREAM_RTT + 0.1), 1), STREAMS)


@dataclass
class Arrived:
    """What came back: headers and bodies of all replicas, and for dense vectors their mean, all on the CPU.

    `decoded`: means of channels by name, as workspaces, where the message was decoded under another layout (`resharding.py`)."""

    headers: list[Header]
    bodies: list[Tensor]
    means: list[Tensor]
    decoded: dict[str, Tensor] = field(default_factory=dict)


def reduce(
    line: Line, header: Header, vectors: Sequence[tuple[Tensor, str]], weights: Sequence[Sequence[float]], compare: bool = False
) -> list[Tensor]:
    """Weighted mean over the replicas of each (vector fp32 [n] on the CPU, code), fp32, bit-equal on all ranks. Two messages.

    `header` says step and configuration. With weights w = weights[i] vector i becomes sum_r w_r v_r / sum_r w_r, zeros if all its weights
    are zero. It is cut into R parts; the means of codes under 8 bits come back in int8. `compare`: note in `line.alike` whether all sent
    the same of this rank's part, and in `line.something` whether that is more than zeros.
    """
    mine, spans = line.rank, [(v.numel(), code) for v, code in vectors]
    kinds = (PARTS, MEANS) if header.kind == PAYLOAD else (header.kind, header.kind)
    cuts = [coding.cuts(n, code, line.size) for n, code in spans]
    outgoing = [
        _pack([coding.encode(code, v[c[j] : c[j + 1]]) for (v, code), c in zip(vectors, cuts, strict=True)]) for j in range(line.size)
    ]
    there, back = legs(spans, line.size)
    arrived = line.swap(replace(header, kind=kinds[0]), outgoing, [outgoing[mine].numel() - HEADER.size] * line.size)[1]
    del outgoing  # what is as large as the vectors goes as soon as it has served
    if compare:
        line.alike, line.something = all(torch.equal(a, arrived[0]) for a in arrived), bool(arrived[0].any())
    means = _means(line, arrived, there[mine], weights)
    coded = _pack([coding.encode(code, m) for m, (_, code) in zip(means, back[mine], strict=True)])
    del means
    arrived = line.swap(replace(header, kind=kinds[1]), [coded] * line.size, [coding.total_bytes(s) for s in back])[1]
    out = [torch.empty(n) for n, _ in spans]
    for j in range(line.size):
        parts = _unpack(arrived.pop(0), back[j])
        for whole, c in zip(out, cuts, strict=True):
            whole[c[j] : c[j + 1]] = next(parts)
        del parts
    return out


def _means(line: Line, arrived: list[Tensor], spans: Sequence[tuple[int, str]], weights: Sequence[Sequence[float]]) -> list[Tensor]:
    """Weighted means of one's own part of the vectors from everybody's messages, which are used up, in rank order."""
    sums = [torch.zeros(n) for n, _ in spans]
    for j in range(line.size):
        parts = _unpack(arrived.pop(0), spans)
        for i, acc in enumerate(sums):
            part = next(parts)
            if weights[i][j]:  # a replica without a share may hold NaN: it must not touch the sum
                acc.add_(part, alpha=weights[i][j])
            del part
        del parts
    return [acc.div_(sum(w)) if sum(w) else acc for acc, w in zip(sums, weights, strict=True)]


def legs(spans: Sequence[tuple[int, str]], size: int) -> tuple[list[list[tuple[int, str]]], list[list[tuple[int, str]]]]:
    """What a reduce of vectors (values, code) moves: for each rank j the parts it is sent, and the parts of the mean it sends back."""
    cuts = [coding.cuts(n, code, size) for n, code in spans]
    there = [[(c[j + 1] - c[j], code) for c, (_, code) in zip(cuts, spans, strict=True)] for j in range(size)]
    return there, [[(n, coding.mean_code(code)) for n, code in part] for part in there]


def _pack(parts: Sequence[Tensor]) -> Tensor:
    """Coded parts as one message, with room for its header."""
    return torch.cat([torch.zeros(HEADER.size, dtype=torch.uint8), *parts])


def _unpack(body: Tensor, spans: Sequence[tuple[int, str]]) -> Iterator[Tensor]:
    """The vectors of a body."""
    at = 0
    for n, code in spans:
        size = coding.num_bytes(code, n)
        yield coding.decode(code, body[at : at + size], n)
        at += size


def leave(status: int) -> NoReturn:
    """End the process at once, with what was logged and printed: a regular exit could wait for peers that are gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Courier:
    """One worker thread that runs exchanges in order and counts how long they were under way and how long training waited.

    A daemon thread: an executor's would hold an interpreter that wants to end until a lost peer times out.
    """

    def __init__(self, line: Line):
        self.line = line
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            (job, future), task = task, None
            start, result, failure = time.perf_counter(), None, None
            try:
                result = job()
            except BaseException as error:  # handed to the thread that waits
                failure = error
            self.line.meter.seconds_exchanging += time.perf_counter() - start
            del job  # and what it holds, before the thread that waits goes on
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            del future, result, failure

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` after all earlier ones; its result or error is in the future."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def wait(self, future: Future[Any], gone: Callable[[], str] = lambda: "") -> Any:
        """Block until `future` is done; the seconds count as waiting.

        Args:
            gone: asked twice a second; why it will never be done, empty if it may be.

        Raises:
            PeerLost: it will not. What else the job has raised.
        """
        start = time.perf_counter()
        try:
            while True:
                try:
                    return future.result(0.5)
                except Late:
                    if future.done():
                        return future.result()
                    if reason := gone():
                        raise PeerLost(f"{reason}: what is waited for will not come") from None
        finally:
            self.line.meter.seconds_waiting += time.perf_counter() - start

    def close(self) -> bool:
        """Let what was submitted end, then drop thread and process group; False if the thread hangs on a silent peer and is left behind."""
        self._jobs.put(None)
        self._thread.join(5.0)
        self.line.release()
        return not self._thread.is_alive()
