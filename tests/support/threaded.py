"""Islands as threads of one process, in a mesh: real connections, real messages and the whole
exchange, without the cost of processes.

For what needs many short runs. Use it inside `run_ranks(fn, 1, 1)`, so that the threads live and
end in a process of their own.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdp_demo import Topology
from fsdp_demo.elastic.chunks import SLOTS
from fsdp_demo.net import address
from fsdp_demo.peers.connection import QueuedPiece

from .threads import warm


def islands(fn: Callable[[int, Topology], Any], count: int = 2, timeout: float = 10.0) -> list[Any]:
    """fn(island, topology) on `count` threads at once; what each returned, or the exception it
    raised.
    """
    store, results = dist.HashStore(), [None] * count
    gc.freeze()  # what is there already need not be looked through at each end of an island
    warm()

    def work(i: int) -> None:
        try:
            results[i] = fn(i, Topology.from_store(store, i, count, timeout))
        except BaseException as error:  # pytest.fail is no Exception
            traceback.print_exc()
            results[i] = error.with_traceback(None)
        gc.collect()  # the end of a process would do it

    # their token is drawn at random: to stretch it would take as long as all the rest
    with mock.patch.object(address, "STRETCH", 2):
        at_once(work, count, 4 * timeout)
    return results


def at_once(work: Callable[[int], None], count: int, limit: float) -> None:
    """work(0), work(1), ... each in a thread of its own; all end within `limit` seconds each."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(limit)
    assert not any(t.is_alive() for t in threads), "a thread hangs"


def values(results: list[Any]) -> list[Any]:
    """The results, none of which may be an exception."""
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results


class Tap:
    """Stands before the connections of a peer group: `change(data, index)` may replace the bytes of
    the index-th piece that it sends of the messages to come. Pieces of the message before may still
    leave: they pass uncounted.

    Attributes:
        sent: to whom (slot), and bytes, of each piece. A piece may leave a moment after the message
            is complete here: `all_left` waits for it.
        message: the number of the message that the piece under way belongs to.
    """

    def __init__(
        self,
        exchange: Any,
        change: Callable[[torch.Tensor, int], torch.Tensor] = lambda data, index: data,
    ):
        self.change = change
        self.sent: list[tuple[int, int]] = []
        self.message, self._meter = 0, exchange.peers.meter
        self._first = exchange.peers._next
        self._before = self._meter.bytes_sent
        for member, wires in exchange.peers._driver.connections.items():
            for wire in wires:
                wire.post_send = partial(self._send, member.slot, wire.post_send)

    def _send(
        self, to: int, send: Callable[[QueuedPiece, int], None], piece: QueuedPiece, number: int
    ) -> None:
        self.message = (number - 1) // (3 * SLOTS + 1)
        if self.message < self._first:
            send(piece, number)
            return
        whole = torch.frombuffer(piece.view, dtype=torch.uint8)
        data = self.change(whole, len(self.sent)).contiguous()
        self.sent.append((to, data.numel()))
        send(QueuedPiece(piece._poller, data), number)

    def all_left(self, before: int = 0) -> list[tuple[int, int]]:
        """What was sent since the first `before` pieces, when all has left that the meter has
        counted.
        """
        end, counted = time.monotonic() + 10, self._meter.bytes_sent - self._before
        while sum(n for _, n in self.sent) < counted and time.monotonic() < end:
            time.sleep(0.001)
        return self.sent[before:]


def alone(run_ranks: Any, run: Callable[[], Any], timeout: float = 120) -> Any:
    """run() in a process of its own: threads and sockets end with it."""
    return run_ranks(lambda me: run(), 1, 1, timeout=timeout)[0]
