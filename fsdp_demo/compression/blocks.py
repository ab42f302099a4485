"""Packing local shards into one workspace of blocks, and back.

A workspace is one flat fp32 vector: `num_blocks` slots of 4096 elements (64 x 64, row-major), then
`num_dense` elements. Which tensor goes where depends on names and local shapes only, so that the
same shard has the same layout on every island:

* 64 x 64 blocks over the local rows and columns where both are >= 64 and padding stays <= 1.1x.
  Blocks at the right and lower edge keep the 64 x 64 slot but fill only r x s of it; their
  transform is the r-point (s-point) one, so padding stays zero in both domains.
* else flat blocks of 4096 consecutive elements seen as 64 x 64; the tail is one (m // 64) x 64 edge
  block, the last m % 64 elements dense.
* tensors under 4096 elements, and those named in `dense`, are dense: sent whole, no transform.

Where several ranks of an island hold the same tensors, the blocks are dealt to `active_copies` of
them: copy l of L holds every group's blocks [n l / L, n (l + 1) / L) and the same share of the
dense elements.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import TypeVar

import torch
from torch import Tensor

from ..config.parts import BLOCK
from .windows import CACHED, EDGE, Box, ContiguousViews, Group, Window

MAX_PADDING = 1.1
# blocks worked on at once: 8 MiB, and 128 MiB where every kernel has to be launched; multiples of 8
WINDOW, WINDOW_GPU = 512, 8192

T = TypeVar("T")
P = TypeVar("P", "BlockRange", "DensePiece")


@dataclass(frozen=True)
class Region:
    """A rectangle of blocks of one tensor, which is seen as a matrix.

    Attributes:
        tensor: index of the tensor.
        row, col: upper left corner in the matrix.
        y, x: number of blocks down and across.
        r, s: elements of each block down and across, at most 64.
        transform: whether the blocks are transformed.
        cols: columns of the matrix: those of `matrix_shape`, or 64 where blocks are flat.
    """

    tensor: int
    row: int
    col: int
    y: int
    x: int
    r: int
    s: int
    transform: bool
    cols: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.y * self.x

    def cut(self, lo: int, hi: int) -> Iterator[Box]:
        """The places of blocks lo..hi (row-major) in the tensor, as at most three boxes."""
        at, r, s, cols = lo, self.r, self.s, self.cols
        while at < hi:
            y, x = divmod(at, self.x)
            whole_rows = (hi - at) // self.x if x == 0 else 0
            end = at + whole_rows * self.x if whole_rows else min(hi, (y + 1) * self.x)
            shape = (whole_rows or 1, self.x if whole_rows else end - at, r, s)
            yield Box(
                self.tensor,
                (self.row + y * r) * cols + self.col + x * s,
                shape,
                (r * cols, s, cols, 1),
                at - lo,
                end - lo,
            )
            at = end


@dataclass(frozen=True)
class BlockRange:
    """Blocks lo..hi (row-major) of a region, in workspace slots start, start + 1, ..."""

    region: Region
    lo: int
    hi: int
    start: int


@dataclass(frozen=True)
class DensePiece:
    """Elements lo..hi of one flattened tensor, at dense positions start, start + 1, ..."""

    tensor: int
    lo: int
    hi: int
    start: int


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The 2-D form of a local shape: [-1, last] for over two dims, last >= 64; else [first, -1]."""
    numel = prod(shape)
    if not shape or numel == 0:
        return (0, 0) if numel == 0 else (1, 1)
    if len(shape) > 2 and shape[-1] >= EDGE:
        return numel // shape[-1], shape[-1]
    return shape[0], numel // shape[0]


def _regions(index: int, shape: Sequence[int], transform: bool) -> tuple[list[Region], int]:
    """The block regions of one tensor and the flat element from which on it is dense."""
    rows, cols = matrix_shape(shape)
    numel = rows * cols
    if numel < BLOCK:
        return [], 0
    y, x, r, s = rows // EDGE, cols // EDGE, rows % EDGE, cols % EDGE
    padded = ceil(rows / EDGE) * ceil(cols / EDGE) * BLOCK
    if rows >= EDGE and cols >= EDGE and padded <= MAX_PADDING * numel and transform:
        found = [
            Region(index, row, col, ny, nx, nr, ns, transform, cols)
            for row, ny, nr in ((0, y, EDGE), (y * EDGE, 1, r))
            for col, nx, ns in ((0, x, EDGE), (x * EDGE, 1, s))
            if ny * nx * nr * ns
        ]
        return found, numel
    whole, tail = numel // BLOCK, numel % BLOCK // EDGE
    found = [Region(index, 0, 0, whole, 1, EDGE, EDGE, transform, EDGE)]
    if tail:
        found.append(Region(index, whole * EDGE, 0, 1, 1, tail, EDGE, transform, EDGE))
    return found, (whole * EDGE + tail) * EDGE


class Layout:
    """The place of every element of a list of local tensors in the workspace of one active copy.

    Args:
        shapes: local shape of each tensor.
        blocked: per tensor: "transform" (blocks, transformed), "plain" (flat blocks of 4096, not
            transformed) or "dense".
        active_copy, active_copies: number of this copy, from 0, and of all: its share of the
            blocks.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        blocked: Sequence[str],
        active_copy: int = 0,
        active_copies: int = 1,
    ):
        groups: dict[tuple[bool, int, int], list[Region]] = {}
        dense: list[tuple[int, int, int]] = []
        for i, (shape, kind) in enumerate(zip(shapes, blocked, strict=True)):
            rows, cols = matrix_shape(shape)
            regions, rest = ([], 0) if kind == "dense" else _regions(i, shape, kind == "transform")
            for region in regions:
                groups.setdefault((region.transform, region.r, region.s), []).append(region)
            if rest < rows * cols:
                dense.append((i, rest, rows * cols))
        self.pieces: list[BlockRange] = []
        self.groups: list[Group] = []
        slot = 0
        for number, ((transform, r, s), regions) in enumerate(sorted(groups.items(), reverse=True)):
            first = slot
            # else the last active copy gets every group's remainder
            turn = active_copies - 1 - active_copy if number % 2 else active_copy
            for region, lo, hi in _share(regions, [g.count for g in regions], turn, active_copies):
                self.pieces.append(BlockRange(region, lo, hi, slot))
                slot += hi - lo
            if slot > first:
                self.groups.append(Group(r, s, transform, first, slot - first))
        self.dense: list[DensePiece] = []
        at = 0
        for (i, begin, _), lo, hi in _share(
            dense, [end - begin for _, begin, end in dense], active_copy, active_copies
        ):
            self.dense.append(DensePiece(i, begin + lo, begin + hi, at))
            at += hi - lo
        self.num_tensors, self.num_blocks, self.num_dense = len(shapes), slot, at

    @property
    def numel(self) -> int:
        """Length of the workspace in elements."""
        return self.num_blocks * BLOCK + self.num_dense

    def blocks(self, work: Tensor) -> Tensor:
        """View [num_blocks, 4096] of a workspace."""
        return work[: self.num_blocks * BLOCK].view(-1, BLOCK)

    def dense_part(self, work: Tensor) -> Tensor:
        """View [num_dense] of a workspace."""
        return work[self.num_blocks * BLOCK :]

    def windows(self, device: torch.device | str) -> list[Window]:
        """Windows that cover the workspace, each as much as `device` works on at once."""
        return self._on_cpu if torch.device(device).type == "cpu" else self._on_gpu

    @cached_property
    def _on_cpu(self) -> list[Window]:
        return self._cut(WINDOW, CACHED)

    @cached_property
    def _on_gpu(self) -> list[Window]:
        return self._cut(WINDOW_GPU, WINDOW_GPU)

    def _cut(self, size: int, part: int) -> list[Window]:
        """Windows of up to `size` blocks in parts of up to `part`."""
        out, base = [], self.num_blocks * BLOCK
        for g in self.groups:
            for lo in range(g.start, g.stop, size):
                hi = min(lo + size, g.stop)
                inner = tuple(self._window(g, a, min(a + part, hi)) for a in range(lo, hi, part))
                out.append(Window(g, lo * BLOCK, hi * BLOCK, parts=inner))
        for lo in range(0, self.num_dense, size * BLOCK):
            hi = min(lo + size * BLOCK, self.num_dense)
            rows = tuple(
                (d.tensor, d.lo + a - d.start, d.lo + b - d.start, a - lo)
                for d, a, b in _within(self.dense, lo, hi)
            )
            out.append(Window(None, base + lo, base + hi, rows=rows))
        return out

    def whole(self, group: Group) -> Window:
        """A window of all blocks of a group."""
        return self._window(group, group.start, group.stop)

    def _window(self, group: Group, lo: int, hi: int) -> Window:
        """Slots lo..hi of a group."""
        boxes = []
        for p, a, b in _within(self.pieces, lo, hi):
            cut = p.region.cut(p.lo + a - p.start, p.lo + b - p.start)
            boxes += [replace(box, lo=box.lo + a - lo, hi=box.hi + a - lo) for box in cut]
        return Window(group, lo * BLOCK, hi * BLOCK, tuple(boxes))

    def pack(self, tensors: Sequence[Tensor | None], out: Tensor) -> Tensor:
        """Copy this copy's share of `tensors` (any float dtype; None counts as zeros) into the fp32
        workspace `out`.
        """
        with ContiguousViews(tensors) as memory:
            for w in self.windows(out.device):
                for part in w.inner:
                    part.pack(memory, part.of(out))
        return out

    def unpack(self, work: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Write this copy's share of workspace `work` into `tensors` in place (None is left out),
        casting to their dtype.
        """
        with ContiguousViews(tensors, back=True) as memory:
            for w in self.windows(work.device):
                for part in w.inner:
                    part.unpack(part.of(work), memory)

    def places(self, tensors: Collection[int]) -> list[slice]:
        """The stretches of a workspace of this copy that hold these tensors, in either domain."""
        base = self.num_blocks * BLOCK
        blocks = (p for p in self.pieces if p.region.tensor in tensors)
        found = [(BLOCK * p.start, BLOCK * (p.hi - p.lo)) for p in blocks]
        found += [(base + d.start, d.hi - d.lo) for d in self.dense if d.tensor in tensors]
        return [slice(first, first + size) for first, size in found]

    def new(self, device: torch.device | str) -> Tensor:
        """A workspace of zeros on `device`, fp32."""
        return torch.zeros(self.numel, dtype=torch.float32, device=device)


def _within(pieces: Sequence[P], lo: int, hi: int) -> Iterator[tuple[P, int, int]]:
    """Yield (piece, a, b) for each piece that has a part, a..b, in lo..hi of the workspace."""

    def end(piece: P) -> int:
        return piece.start + piece.hi - piece.lo

    first = bisect_right(pieces, lo, key=end)
    for piece in pieces[first : bisect_left(pieces, hi, key=lambda p: p.start)]:
        yield piece, max(lo, piece.start), min(hi, end(piece))


def _share(
    items: Sequence[T], sizes: Sequence[int], active_copy: int, active_copies: int
) -> Iterator[tuple[T, int, int]]:
    """Yield (item, lo, hi) for the elements lo..hi of each item that belong to `active_copy`."""
    begin, end = (sum(sizes) * c // active_copies for c in (active_copy, active_copy + 1))
    at = 0
    for item, size in zip(items, sizes, strict=True):
        lo, hi = max(begin - at, 0), min(end - at, size)
        if lo < hi:
            yield item, lo, hi
        at += size
