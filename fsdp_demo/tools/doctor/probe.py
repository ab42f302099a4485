"""The measurement between two islands: round trip, clock, rate by number of connections, the first
message after a pause, and what the kernel counted.

A rate is bytes over the seconds from the first byte to the acknowledgement of the last, less the
round trip that the acknowledgement and the first byte take.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from ...elastic.chunks import streams
from ...errors import PeerLost
from ...net import tcp
from ...net.tcp import Counted
from ...peers.pieces import LARGEST
from ...peers.zeromq import GroupConnections, Meeting, ZeroMQ
from .measured import Direction

# Two islands and the connections between them, for measuring: the exchange's own kind, with the
# steps in which the two take turns.
#
# Both run the same steps in the same order, one as the leader, which sends and measures. Every
# wait has a deadline; the first that passes ends the measurement of this pair on both sides.

SILENCE = 10.0  # seconds without a piece after which the other side counts as dead
PLAN = struct.Struct("=qq")


class Pair:
    """Connections of this island to one other.

    Args:
        meeting: meeting of two ranks, this one and the other.
        end: `time.monotonic()` after which nothing is waited for.

    Raises:
        ValueError, PeerLost: see `zeromq.ZeroMQ.open`.
    """

    def __init__(self, meeting: Meeting, end: float):
        self._opener, self._other, self._end = ZeroMQ(meeting), 1 - meeting.rank, end
        self._groups: list[GroupConnections] = []
        self._number = 0
        # one for all: nobody reads what came
        self._room = torch.zeros(LARGEST, dtype=torch.uint8, device="cpu")
        self.widen(1)

    def widen(self, connections: int) -> None:
        """Have so many connections, at least."""
        while len(self._groups) < connections:
            self._groups.append(self._opener.open(len(self._groups)))

    def close(self) -> None:
        """Close the connections."""
        with suppress(RuntimeError):
            for group in self._groups[:1]:  # closes all
                group.close()
        self._groups = []

    def counted(self) -> list[tcp.Counted]:
        """The kernel's counters of each connection; none where it does not tell."""
        wires = [group.wires[self._other] for group in self._groups]
        found = [tcp.counted(wire.descriptor) for wire in wires]
        return [counts for counts in found if counts is not None]

    # ---- messages ------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send a short message."""
        self._number += 1
        piece = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._wait([self._groups[0].send(piece, self._other, self._number)])

    def recv(self, size: int) -> bytes:
        """The other side's short message of `size` bytes."""
        self._number += 1
        room = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._wait([self._groups[0].recv(room, self._other, self._number)])
        return bytes(room.tolist())

    def plan(self, leads: bool, pieces: int = 0, more: int = 0) -> tuple[int, int]:
        """Agree on two whole numbers: the leader sends them, and both sides return them."""
        if leads:
            self.send(PLAN.pack(pieces, more))
            return pieces, more
        found: tuple[int, int] = PLAN.unpack(self.recv(PLAN.size))
        return found

    def message(self, leads: bool, sizes: Iterable[int], connections: int = 1) -> float:
        """Seconds from the first byte of a message to the acknowledgement of its last; 0 on the
        side that receives.

        Args:
            leads: whether this side sends.
            sizes: bytes of the message's pieces, which are dealt to the connections in turn.
        """
        start = time.perf_counter()
        self._number += 1
        works = []
        for i, n in enumerate(sizes):
            group = self._groups[i % connections]
            post = group.send if leads else group.recv
            works.append(post(self._room[:n], self._other, self._number))
        self._wait(works)
        if not leads:
            self.send(b"k")
            return 0.0
        self.recv(1)
        return time.perf_counter() - start

    def _wait(self, works: list[Any]) -> None:
        for work in works:
            left = min(SILENCE, self._end - time.monotonic())
            if left <= 0:
                raise RuntimeError("the time for this measurement is over")
            work.wait(timedelta(seconds=left))


def pieces(size: int, connections: int = 1) -> list[int]:
    """Bytes of the pieces of a message: as large as the exchange's, but at least four for each of
    several connections, so that all of them carry as much.

    >>> pieces(3 << 19), set(pieces(1 << 20, 2))
    ([1048576, 524288], {131072})
    """
    most = LARGEST if connections == 1 else min(LARGEST, -(-size // (4 * connections)))
    whole, rest = divmod(size, most)
    return [most] * whole + [rest] * bool(rest)


SIZES = (1 << 16, 1 << 20, 1 << 24)
"""Bytes of the first messages, which show how large the long ones may be."""

CONNECTIONS = (1, 2, 4)
"""Numbers of connections, beside that of the exchange."""

LARGEST_STREAM = 1 << 29  # bytes
TRIPS = 8  # round trips that a long message takes at least
PINGS = 50
PAUSE = 1.0
"""Seconds without a message before the first one: more than TCP's retransmission timeout, after
which it forgets its window (RFC 5681, section 4.1)."""

TIMES = struct.Struct("=dd")


class Probe:
    """The measurement of one pair, on one of its two islands.

    Args:
        me, other: number of this island, and of the other one.
        seconds: seconds that the whole measurement should take.
        num_peers: number of peers that an island has in the run.

    Attributes:
        mine: what was measured of this island's messages to the other, so far.
    """

    def __init__(self, pair: Pair, me: int, other: int, seconds: float, num_peers: int = 1):
        self.pair, self.seconds = pair, seconds
        self.mine = Direction(me, other)
        self._first, self._num_peers = me < other, num_peers
        self._rtt = self._least = 0.0
        self._rate = 0.0  # bytes per second, of the last message

    def run(self) -> Direction:
        """Measure; what was measured before an error, with its text."""
        turns = (self._first, not self._first)
        try:
            for leads in turns:
                self._ping(leads)
            for leads in turns:
                self._grow(leads)
            used = streams(self._agreed(self._least), self._num_peers)
            counts = sorted({*CONNECTIONS, used})
            self._note(connections=used)
            self.pair.widen(max(counts))
            before = self.pair.counted()
            for connections in counts:
                for leads in turns:
                    self._stream(leads, connections)
            self._note(**lost(before, self.pair.counted()))
            for leads in turns:
                self._after_pause(leads)
        except (RuntimeError, PeerLost, ValueError, struct.error) as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            self._note(error=text[:200])
        return self.mine

    def _note(self, **found: object) -> None:
        self.mine = replace(self.mine, **found)  # type: ignore[arg-type]

    def _agreed(self, value: float) -> float:
        """The larger of both sides' numbers."""
        for leads in (self._first, not self._first):
            if leads:
                self.pair.send(struct.pack("=d", value))
            else:
                value = max(value, struct.unpack("=d", self.pair.recv(8))[0])
        return value

    def _ping(self, leads: bool) -> None:
        seen = [self._round_trip(leads)[0] for _ in range(3)]
        share = 0.04 * self.seconds / max(*seen, 1e-5)
        count, _ = self.pair.plan(leads, max(5, min(PINGS, int(share))))
        found = [self._round_trip(leads) for _ in range(count)]
        if leads:
            seconds, offset = zip(*found, strict=True)
            ordered = sorted(seconds)
            steps = [abs(b - a) for a, b in zip(seconds, seconds[1:], strict=False)]
            self._rtt = statistics.median(seconds)
            self._least = ordered[0]
            self._note(
                rtt_ms=1e3 * self._rtt,
                jitter_ms=1e3 * statistics.fmean(steps),
                clock_offset_ms=1e3 * offset[seconds.index(ordered[0])],
            )

    def _round_trip(self, leads: bool) -> tuple[float, float]:
        """Seconds, and how far the other's clock is ahead: (t2 - t1 + t3 - t4) / 2 (RFC 5905)."""
        if not leads:
            self.pair.recv(1)
            came = time.time()
            self.pair.send(TIMES.pack(came, time.time()))
            return 0.0, 0.0
        start, sent = time.perf_counter(), time.time()
        self.pair.send(b"p")
        came, left = TIMES.unpack(self.pair.recv(TIMES.size))
        took, back = time.perf_counter() - start, time.time()
        return took - (left - came), (came - sent + left - back) / 2

    def _grow(self, leads: bool) -> None:
        """Send messages that grow until a larger one would take too long: the first rate."""
        for size in SIZES:
            takes = size / self._rate if self._rate else 0.0
            times, _ = self.pair.plan(leads, 0 if takes > 0.06 * self.seconds else 2)
            if not times:
                return
            took = [self.pair.message(leads, pieces(size)) for _ in range(times)]
            if leads:
                best = min(took)
                self._rate = size / max(best - self._rtt, best / 20)

    def _stream(self, leads: bool, connections: int) -> None:
        """The better of two messages: in the first one new connections still widen their window."""
        before = self.pair.counted()[:1] if leads and connections == 1 else []
        rates = [self._long_message(leads, connections) for _ in range(2)]
        if not leads:
            return
        self._note(mbit_s={**self.mine.mbit_s, str(connections): 8e-6 * max(rates)})
        if before and (after := self.pair.counted()[:1]):
            busy = max(after[0].busy - before[0].busy, 1e-6)
            self._note(
                held_here=(after[0].held_here - before[0].held_here) / busy,
                held_there=(after[0].held_there - before[0].held_there) / busy,
            )

    def _long_message(self, leads: bool, connections: int) -> float:
        """Bytes per second of a message that takes about as long as is left for it."""
        seconds = max(0.03 * self.seconds, TRIPS * self._rtt)
        size = max(int(min(self._rate * seconds, LARGEST_STREAM)), connections * SIZES[0])
        count, _ = self.pair.plan(leads, size)
        took = self.pair.message(leads, pieces(count, connections), connections)
        if leads:
            self._rate = count / max(took - self._rtt, took / 20)
        return self._rate

    def _after_pause(self, leads: bool) -> None:
        takes = SIZES[1] / max(self._rate, 1.0) if leads else 0.0
        size = SIZES[1] if takes < 0.5 else SIZES[0]
        size, rounds = self.pair.plan(leads, size, 2 if self.seconds >= 10 else 1)
        first, warm = [], []
        for _ in range(rounds):
            time.sleep(PAUSE)
            first.append(self.pair.message(leads, pieces(size)))
            warm += [self.pair.message(leads, pieces(size)) for _ in range(4)][1:]
        if leads:
            self._note(
                first_after_idle_ms=1e3 * min(first),
                warm_ms=1e3 * statistics.median(warm),
                idle_bytes=size,
            )


def lost(before: Sequence[Counted], after: Sequence[Counted]) -> dict[str, object]:
    """Share of packets sent again between two looks, and the path's MTU; empty: not told."""
    if not after or len(before) != len(after):
        return {}
    packets = sum(b.packets - a.packets for a, b in zip(before, after, strict=True))
    again = sum(b.again - a.again for a, b in zip(before, after, strict=True))
    return {"loss": again / packets if packets > 0 else 0.0, "mtu": min(b.mtu for b in after)}
