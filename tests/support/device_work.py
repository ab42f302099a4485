"""What a device is given to do: operations, and bytes that they read and write."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .accelerator import UNCOUNTED, There

SECTOR = 32  # bytes that a GPU reads or writes for one value of a gather or a scatter
JUMPS = {"gather": 1, "index_select": 1, "scatter_": 1, "scatter_add_": 2}
"""Where an operation jumps about in memory: how often it touches a sector for each index."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Those of an operation's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def size(t: Tensor) -> int:
    """Bytes of the elements that lie in memory: a dimension of stride 0 is one element."""
    count = t.element_size()
    for length, stride in zip(t.shape, t.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count


class DeviceWork(TorchDispatchMode):
    """Counts what runs in this thread on other devices than the CPU: on a GPU, or on the stand-in
    within an `Accelerator`.

    Attributes:
        operations: how often each ran that is not a view and does more than take memory.
        bytes: read and written by them. A gather or scatter touches a sector for each index, but no
            more than the whole tensor.
        held, most: bytes of the results on the stand-in that are there, now and at most.

    Args:
        shapes_only: results on the stand-in get no values (torch's meta device), so that a real
            model's shapes cost no memory.
    """

    def __init__(self, shapes_only: bool = False) -> None:
        super().__init__()
        self.shapes_only = shapes_only
        self.operations: Counter[str] = Counter()
        self.bytes = self.held = self.most = 0
        self._known: dict[int, int] = {}

    def begin(self) -> int:
        """Count from here on; returns the bytes that are held."""
        self.operations.clear()
        self.bytes, self.most = 0, self.held
        return self.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        out = func(*args, **kwargs)
        given, made = list(tensors([*args, *kwargs.values()])), list(tensors(out))
        if all(t.device.type in ("cpu", "meta") for t in (*given, *made)):
            return out
        for t in made:
            if isinstance(t, There):
                t.inner = t.inner.to("meta") if self.shapes_only else t.inner
                self._hold(t.inner.untyped_storage())
        if func.is_view or name in UNCOUNTED:
            return out
        self.operations[name] += 1
        sizes = [size(t) for t in (*given, *made)]
        if name in JUMPS:
            indices = given[1].numel()
            sizes[0] = min(sizes[0], SECTOR * indices * JUMPS[name])
            made = [] if name.startswith("scatter") else made
        self.bytes += sum(sizes[: len(given)]) + sum(size(t) for t in made)
        if name in ("copy_", "zero_", "fill_"):  # only written
            self.bytes -= size(given[0])
        elif kwargs.get("out") is not None and name != "add":
            self.bytes -= size(kwargs["out"])
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.held += storage.nbytes()
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.held -= self._known.pop(key)
