"""Islands as threads of one process: real gloo groups, real messages and the whole exchange,
without the cost of processes.

For what needs many short runs. Use it inside `run_ranks(fn, 1, 1)`, so that the threads live and
end in a process of their own.
"""

from __future__ import annotations

import datetime
import gc
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_demo import Topology

from .threads import warm


def islands(fn: Callable[[int, Topology], Any], count: int = 2, timeout: float = 10.0) -> list[Any]:
    """fn(island, topology) on `count` threads at once; what each returned, or the exception it
    raised.
    """
    store, results = dist.HashStore(), [None] * count
    gc.freeze()  # what is there already need not be looked through at each end of an island
    warm()

    def work(i: int) -> None:
        group = dist.ProcessGroupGloo(
            dist.PrefixStore("line", store), i, count, datetime.timedelta(seconds=timeout)
        )
        try:
            results[i] = fn(i, Topology.from_group(group, timeout))
        except BaseException as error:  # pytest.fail is no Exception
            traceback.print_exc()
            results[i] = error.with_traceback(None)
        del group
        gc.collect()  # the end of a process would do it: with the group its connections close

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
    """Stands before a line's process group: `change(data, index)` may replace the bytes of the
    index-th message it sends.
    """

    def __init__(
        self,
        exchange: Any,
        change: Callable[[torch.Tensor, int], torch.Tensor] = lambda data, index: data,
    ):
        self.group, self.change = exchange._peers.group, change
        self.sent: list[tuple[int, int]] = []  # to whom, bytes
        exchange._peers.group = self

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        data = self.change(tensors[0], len(self.sent)).contiguous()
        self.sent.append((rank, data.numel() * data.element_size()))
        work = self.group.send([data], rank, tag)
        return Held(work, data)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self.group.recv(tensors, rank, tag)


class Held:
    """A send under way, and the bytes it reads from."""

    def __init__(self, work: Any, data: torch.Tensor):
        self.work, self.data = work, data

    def wait(self, timeout: Any) -> Any:
        return self.work.wait(timeout)
