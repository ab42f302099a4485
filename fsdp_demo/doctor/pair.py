"""Two islands and the connections between them, for measuring: the exchange's own kind, with the
steps in which the two take turns.

Both run the same steps in the same order, one as the leader, which sends and measures. Every wait
has a deadline; the first that passes ends the measurement of this pair on both sides.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..comm import tcp
from ..comm.frames import LARGEST
from ..comm.zeromq import Connections, Meeting, ZeroMQ

SILENCE = 10.0  # seconds without a piece after which the other side counts as dead
PLAN = struct.Struct("=qq")


class Pair:
    """Connections of this island to one other.

    Args:
        meeting: of two ranks, this one and the other.
        end: `time.monotonic()` after which nothing is waited for.

    Raises:
        ValueError, PeerLost: see `zeromq.ZeroMQ.open`.
    """

    def __init__(self, meeting: Meeting, end: float):
        self._opener, self._other, self._end = ZeroMQ(meeting), 1 - meeting.rank, end
        self._groups: list[Connections] = []
        self._tag = 0
        self._sent, self._room = torch.zeros(2, LARGEST, dtype=torch.uint8, device="cpu")
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
        """What the kernel counts of each connection, where it tells."""
        wires = [group.wires[self._other] for group in self._groups]
        found = [tcp.counted(wire.descriptor) for wire in wires]
        return [counts for counts in found if counts is not None]

    # ---- messages ------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """A short message."""
        self._wait([self._post_send(torch.frombuffer(bytearray(data), dtype=torch.uint8))])

    def recv(self, size: int) -> bytes:
        """The other side's short message."""
        room = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._wait([self._post_recv(room)])
        return bytes(room.tolist())

    def plan(self, leads: bool, pieces: int = 0, more: int = 0) -> tuple[int, int]:
        """Two whole numbers that the leader decides, on both sides."""
        if leads:
            self.send(PLAN.pack(pieces, more))
            return pieces, more
        found: tuple[int, int] = PLAN.unpack(self.recv(PLAN.size))
        return found

    def message(self, leads: bool, sizes: Iterable[int], connections: int = 1) -> float:
        """Seconds from the first byte of a message to the acknowledgement of its last; 0 on the
        side that receives.

        Args:
            sizes: bytes of its pieces, dealt to the connections.
        """
        start = time.perf_counter()
        self._tag += 1
        self._wait(self._posted(leads, sizes, connections))
        if not leads:
            self.send(b"k")
            return 0.0
        self.recv(1)
        return time.perf_counter() - start

    def both(self, sizes: list[int], connections: int) -> float:
        """Seconds until a message of the other side has come, while one of the same size goes
        there.
        """
        start = time.perf_counter()
        self._tag += 1
        coming = self._posted(False, sizes, connections)
        going = self._posted(True, sizes, connections)
        self._wait(coming)
        took = time.perf_counter() - start
        self._wait(going)
        return took

    def _posted(self, sends: bool, sizes: Iterable[int], connections: int) -> list[Any]:
        room = self._sent if sends else self._room  # one for all: nobody reads what came
        post = "send" if sends else "recv"
        return [
            getattr(self._groups[i % connections], post)([room[:n]], self._other, self._tag)
            for i, n in enumerate(sizes)
        ]

    def _post_send(self, data: Tensor) -> Any:
        self._tag += 1
        return self._groups[0].send([data], self._other, self._tag)

    def _post_recv(self, room: Tensor) -> Any:
        self._tag += 1
        return self._groups[0].recv([room], self._other, self._tag)

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


def repeat(step: Callable[[], float], count: int) -> list[float]:
    """What each of `count` steps returned."""
    return [step() for _ in range(count)]
