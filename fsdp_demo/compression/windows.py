"""Windows: stretches of a workspace of blocks that are worked on at once, and the places of their
elements in the tensors.

A workspace (`blocks.py`) is seldom made as a whole: its windows are packed, transformed, selected,
decoded and applied one after the other, in memory that is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

import torch
from torch import Tensor

from ..config.parts import BLOCK

EDGE = 64
CACHED = 32
"""Blocks that a CPU works on at once, half a MiB: what is written in between stays in the cache of
a core. 16 and 64 take a tenth longer (Intel Xeon with AMX, 2026-11-27, `codec.py`).
"""
# coefficients coded at once: 2 MiB of places, and 32 MiB where every kernel has to be launched
CODED, CODED_GPU = 1 << 18, 1 << 22


@dataclass(frozen=True)
class Group:
    """Consecutive workspace slots whose blocks have one r x s extent and one transform."""

    r: int
    s: int
    transform: bool
    start: int
    count: int

    @property
    def stop(self) -> int:
        """First slot after the group."""
        return self.start + self.count

    def k(self, topk: int) -> int:
        """Coefficients kept of a block: topk of 4096, in proportion for edge blocks, rounded up."""
        return ceil(topk * self.r * self.s / BLOCK)


@dataclass(frozen=True)
class Box:
    """The place of some blocks in the memory of a contiguous tensor.

    Attributes:
        tensor: index of the tensor.
        offset: element of the tensor with which the first block begins.
        shape: [y, x, r, s]: y x `x` blocks of r x s elements.
        strides: strides of `shape`, in elements of the tensor.
        lo, hi: numbers of the blocks in the window.
    """

    tensor: int
    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    lo: int
    hi: int

    def view(self, tensor: Tensor) -> Tensor:
        """The blocks of a contiguous tensor, a view [y, x, r, s]."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)

    def slots(self, work: Tensor) -> Tensor:
        """The same blocks in the memory of the window, a view [y, x, r, s]."""
        strides = (self.shape[1] * BLOCK, BLOCK, EDGE, 1)
        return work.as_strided(self.shape, strides, work.storage_offset() + self.lo * BLOCK)


@dataclass(frozen=True)
class Window:
    """A stretch of a workspace that is worked on at once: blocks of one group, or dense elements.

    Attributes:
        group: group of the blocks; None of dense elements.
        begin, end: elements of the workspace.
        boxes: places of the blocks in the tensors.
        rows: places of dense elements: (tensor, first element, end, place in the window).
        parts: smaller windows that cover this one: of `Layout.windows` those that fit into the
            cache of a core; of `stretches` the windows of `Layout.windows`; empty in a window that
            is a part itself.
    """

    group: Group | None
    begin: int
    end: int
    boxes: tuple[Box, ...] = ()
    rows: tuple[tuple[int, int, int, int], ...] = ()
    parts: tuple[Window, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    @property
    def inner(self) -> tuple[Window, ...]:
        """The parts of the window, or itself where it has none."""
        return self.parts or (self,)

    @property
    def first(self) -> int:
        """Number of the first block, counted in the group."""
        return self.begin // BLOCK - self.group.start if self.group is not None else 0

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.numel // BLOCK

    def of(self, work: Tensor) -> Tensor:
        """The elements of the window in a workspace, a view [numel]."""
        return work[self.begin : self.end]

    def pack(self, tensors: ContiguousViews, out: Tensor) -> Tensor:
        """Copy the window's elements of the tensors (None: zeros) into `out` fp32 [numel]."""
        for tensor, lo, hi, at in self.rows:
            _copy(out[at : at + hi - lo], tensors.flat(tensor, lo, hi))
        for box in self.boxes:
            source = tensors[box.tensor]
            if box.shape[2] * box.shape[3] < BLOCK:  # the padding of an edge block is zero
                out[box.lo * BLOCK : box.hi * BLOCK].zero_()
            _copy(box.slots(out), None if source is None else box.view(source))
        return out

    def scale(self, out: Tensor, factors: Sequence[float]) -> Tensor:
        """Multiply each tensor's elements in `out` [numel] by that tensor's factor, in place."""
        for tensor, lo, hi, at in self.rows:
            out[at : at + hi - lo].mul_(factors[tensor])
        for box in self.boxes:
            box.slots(out).mul_(factors[box.tensor])
        return out

    def unpack(self, work: Tensor, tensors: ContiguousViews, sign: bool = False) -> None:
        """Write `work` [numel], or its `sign`, into the tensors in place (None is left out)."""
        for tensor, lo, hi, at in self.rows:
            target = tensors.flat(tensor, lo, hi)
            if target is not None:
                _put(target, work[at : at + hi - lo], sign)
        for box in self.boxes:
            target = tensors[box.tensor]
            if target is not None:
                _put(box.view(target), box.slots(work), sign)


def stretches(
    windows: Iterable[Window], device: torch.device, topk: int, size: int = 1
) -> list[Window]:
    """Stretches that cover the blocks of `windows`: each is as much as is coded at once, of `topk`
    coefficients of a block from each of `size` replicas. Their parts are the windows.

    A stretch has several windows, so that coding takes few operations: on a CPU as many as leave
    what is coded in the cache.
    """
    out: list[Window] = []
    coded = CODED if device.type == "cpu" else CODED_GPU
    for group, its in groupby(windows, lambda w: w.group):
        if group is None:
            continue
        inside = tuple(its)  # all but the last have the size of the first
        many = max(1, coded // (inside[0].count * size * group.k(topk)))
        for i in range(0, len(inside), many):
            parts = inside[i : i + many]
            out.append(Window(group, parts[0].begin, parts[-1].end, parts=parts))
    return out


class ContiguousViews:
    """Tensors, each as contiguous memory: a contiguous one as it is, another as a copy.

    One copy is kept at a time. With `back` it is written back into its tensor when the next one is
    made, and at the end of the context.
    """

    def __init__(self, tensors: Sequence[Tensor | None], back: bool = False):
        self._tensors, self._back = tensors, back
        self._copied: tuple[int, Tensor] | None = None

    def __getitem__(self, index: int) -> Tensor | None:
        tensor = self._tensors[index]
        if tensor is None or tensor.is_contiguous():
            return tensor
        if self._copied is None or self._copied[0] != index:
            self._return()
            self._copied = index, tensor.contiguous()
        return self._copied[1]

    def flat(self, index: int, lo: int, hi: int) -> Tensor | None:
        """Elements lo..hi of the tensor of this index, a view; None where there is none."""
        tensor = self[index]
        return None if tensor is None else tensor.view(-1)[lo:hi]

    def _return(self) -> None:
        if self._copied is not None and self._back:
            index, copied = self._copied
            target = self._tensors[index]
            assert target is not None
            target.copy_(copied)
        self._copied = None

    def __enter__(self) -> ContiguousViews:
        return self

    def __exit__(self, *_: object) -> None:
        self._return()


def _put(target: Tensor, source: Tensor, sign: bool) -> None:
    if not sign:
        target.copy_(source)
    elif target.dtype == source.dtype:  # on the way
        torch.sign(source, out=target)
    else:
        target.copy_(source.sign())


def _copy(target: Tensor, source: Tensor | None) -> None:
    if source is None:
        target.zero_()
    else:
        target.copy_(source)


# ---- copies between the host and the device of a workspace --------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for all that is queued on a device; nothing on the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def upload(t: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`, without waiting for its queue; itself on the CPU."""
    return t if device.type == "cpu" else pinned(t).copy_(t).to(device, non_blocking=True)


def pinned(like: Tensor) -> Tensor:
    """An empty CPU tensor of the shape and dtype of `like`, in pinned memory: a device copies from
    and to it by itself. torch keeps such memory and hands it out again.
    """
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)


def pinned_vector(device: torch.device, n: int) -> Tensor:
    """An empty vector fp32 [n] in pinned memory, from which `device` copies by itself; from any
    thread.
    """
    with torch.get_device_module(device).device(device):
        return torch.empty(n, dtype=torch.float32, device="cpu", pin_memory=True)
