"""Stretches of a workspace of blocks that are worked on at once, and where their elements lie in
the tensors.

A workspace (`blocks.py`) is never made where a window of it will do: windows are packed,
transformed, selected, decoded and applied one after the other, in memory that is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from ..config.parts import BLOCK

EDGE = 64
CACHED = 32
"""Blocks that a CPU works on at once, half a MiB: what is written in between stays in the cache of
a core. 16 and 64 take a tenth longer (Intel Xeon with AMX, 2026-11-27, `codec.py`).
"""


@dataclass(frozen=True)
class Group:
    """Consecutive workspace slots whose blocks have the same r x s extent and the same
    transform.
    """

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
        """Coefficients kept of each block: topk of 4096, in proportion for edge blocks, rounded
        up.
        """
        return ceil(topk * self.r * self.s / BLOCK)


@dataclass(frozen=True)
class Box:
    """Blocks [y, x, r, s] in the memory of a contiguous tensor, from element `offset`, with
    strides; they are its blocks lo..hi of what was asked for."""

    tensor: int
    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    lo: int
    hi: int

    def view(self, tensor: Tensor) -> Tensor:
        """The blocks in a contiguous tensor."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)

    def slots(self, work: Tensor) -> Tensor:
        """The same blocks in a contiguous stretch of slots."""
        strides = (self.shape[1] * BLOCK, BLOCK, EDGE, 1)
        return work.as_strided(self.shape, strides, work.storage_offset() + self.lo * BLOCK)


@dataclass(frozen=True)
class Window:
    """A stretch of a workspace that is worked on at once: slots of one group, or dense elements
    (`group` is None).

    Attributes:
        begin, end: elements of the workspace.
        boxes: where its blocks lie in the tensors.
        rows: of a dense one, what lies where: (tensor, from, to, place in the window).
        parts: the same stretch in parts: of a window those that fit into the cache of a core, none
            where it is one itself (`inner`); of what is coded at once (`Layout.stretches`) its
            windows.
    """

    group: Group | None
    begin: int
    end: int
    boxes: tuple[Box, ...] = ()
    rows: tuple[tuple[int, int, int, int], ...] = ()
    parts: tuple[Window, ...] = ()

    @property
    def numel(self) -> int:
        """Elements."""
        return self.end - self.begin

    @property
    def inner(self) -> tuple[Window, ...]:
        """Its parts."""
        return self.parts or (self,)

    @property
    def first(self) -> int:
        """Number of its first block in its group."""
        return self.begin // BLOCK - self.group.start if self.group is not None else 0

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.numel // BLOCK

    def of(self, work: Tensor) -> Tensor:
        """Its elements of a workspace, a view."""
        return work[self.begin : self.end]

    def pack(self, tensors: ContiguousViews, out: Tensor) -> Tensor:
        """Copy its elements of the tensors (any float dtype; None counts as zeros) into `out`
        [numel].
        """
        for tensor, lo, hi, at in self.rows:
            _copy(out[at : at + hi - lo], tensors.flat(tensor, lo, hi))
        for box in self.boxes:
            source = tensors[box.tensor]
            if box.shape[2] * box.shape[3] < BLOCK:  # the padding of an edge block is zero
                out[box.lo * BLOCK : box.hi * BLOCK].zero_()
            _copy(box.slots(out), None if source is None else box.view(source))
        return out

    def scale(self, out: Tensor, factors: Sequence[float]) -> Tensor:
        """Multiply what was packed of each tensor by a factor of its own, in place."""
        for tensor, lo, hi, at in self.rows:
            out[at : at + hi - lo].mul_(factors[tensor])
        for box in self.boxes:
            box.slots(out).mul_(factors[box.tensor])
        return out

    def unpack(self, work: Tensor, tensors: ContiguousViews, sign: bool = False) -> None:
        """Write `work` [numel], or its `sign`, into the tensors in place (None is left out),
        casting to their dtype.
        """
        for tensor, lo, hi, at in self.rows:
            target = tensors.flat(tensor, lo, hi)
            if target is not None:
                _put(target, work[at : at + hi - lo], sign)
        for box in self.boxes:
            target = tensors[box.tensor]
            if target is not None:
                _put(box.view(target), box.slots(work), sign)


class ContiguousViews:
    """Tensors, each as contiguous memory: itself, or the latest one that is not as a copy, which
    goes back when another is asked for or the context ends (`back`)."""

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
        """Elements lo..hi of one."""
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
