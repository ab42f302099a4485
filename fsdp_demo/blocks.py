"""Packing local shards into one workspace of blocks, and back.

A workspace is one flat fp32 vector: `num_blocks` slots of 4096 elements (64 x 64, row-major), then `num_dense` elements.
Which tensor goes where depends on names and local shapes only, so that the same shard has the same layout on every island:

* 64 x 64 blocks over the local rows and columns where both are >= 64 and padding stays <= 1.1x. Blocks at the right and lower edge
  keep the 64 x 64 slot but fill only r x s of it; their transform is the r-point (s-point) one, so padding stays zero in both domains.
* else flat blocks of 4096 consecutive elements seen as 64 x 64; the tail is one (m // 64) x 64 edge block, the last m % 64 elements dense.
* tensors under 4096 elements, and those named in `dense`, are dense: sent whole, no transform.

Where several ranks of an island hold the same tensors, `lanes` deals the blocks to them: lane l of L holds every group's blocks
[n l / L, n (l + 1) / L) and the same share of the dense elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

import torch
from torch import Tensor

from .config import BLOCK

EDGE = 64
MAX_PADDING = 1.1

T = TypeVar("T")


@dataclass(frozen=True)
class Region:
    """y x `x` blocks of r x s elements of one tensor.

    The upper left corner is (row, col) of the tensor's matrix view or, where `flat`, the element row * 64 of the flattened tensor seen
    with 64 columns.
    """

    tensor: int
    flat: bool
    row: int
    col: int
    y: int
    x: int
    r: int
    s: int
    transform: bool

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.y * self.x

    def view(self, tensor: Tensor) -> Tensor:
        """View [y, x, r, s] of the region in a contiguous local tensor."""
        if self.flat:
            offset = self.row * EDGE
            m = tensor.view(-1)[offset : offset + self.y * self.r * EDGE].view(-1, EDGE)
        else:
            m = matrix(tensor)[self.row : self.row + self.y * self.r, self.col : self.col + self.x * self.s]
        return m.unflatten(1, (self.x, self.s)).unflatten(0, (self.y, self.r)).transpose(1, 2)


@dataclass(frozen=True)
class Piece:
    """Blocks lo..hi (row-major) of a region, in workspace slots start, start + 1, ..."""

    region: Region
    lo: int
    hi: int
    start: int

    @property
    def whole(self) -> bool:
        """Whether this lane holds all blocks of the region."""
        return self.hi - self.lo == self.region.count

    def rows(self, view: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """The parts of a region's view that this piece covers, at most three: the end of a row of blocks, whole rows, the start of one.
        With each come the piece's own blocks for it, counted from 0."""
        x, at = self.region.x, self.lo
        while at < self.hi:
            row, col = divmod(at, x)
            whole_rows = (self.hi - at) // x if col == 0 else 0
            end = at + whole_rows * x if whole_rows else min(self.hi, (row + 1) * x)
            part = view[row : row + whole_rows] if whole_rows else view[row : row + 1, col : col + end - at]
            yield part, at - self.lo, end - self.lo
            at = end


@dataclass(frozen=True)
class Group:
    """Consecutive workspace slots whose blocks have the same r x s extent and the same transform."""

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
        """Coefficients kept of each block: topk of 4096, in proportion for edge blocks, rounded up."""
        return ceil(topk * self.r * self.s / BLOCK)


@dataclass(frozen=True)
class DensePiece:
    """Elements lo..hi of one flattened tensor, at dense positions start, start + 1, ..."""

    tensor: int
    lo: int
    hi: int
    start: int


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The 2-D form of a local shape: [-1, last] for more than two dims with last >= 64, else [first, -1]."""
    numel = 1
    for n in shape:
        numel *= n
    if not shape or numel == 0:
        return (0, 0) if numel == 0 else (1, 1)
    if len(shape) > 2 and shape[-1] >= EDGE:
        return numel // shape[-1], shape[-1]
    return shape[0], numel // shape[0]


def matrix(tensor: Tensor) -> Tensor:
    """`tensor` viewed as `matrix_shape` says."""
    return tensor.view(matrix_shape(tensor.shape))


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
            Region(index, False, row, col, ny, nx, nr, ns, transform)
            for row, ny, nr in ((0, y, EDGE), (y * EDGE, 1, r))
            for col, nx, ns in ((0, x, EDGE), (x * EDGE, 1, s))
            if ny * nx * nr * ns
        ]
        return found, numel
    whole, tail = numel // BLOCK, numel % BLOCK // EDGE
    found = [Region(index, True, 0, 0, whole, 1, EDGE, EDGE, transform)]
    if tail:
        found.append(Region(index, True, whole * EDGE, 0, 1, 1, tail, EDGE, transform))
    return found, (whole * EDGE + tail) * EDGE


class Layout:
    """Where every element of a list of local tensors lives in the workspace of one lane.

    Args:
        shapes: local shape of each tensor.
        blocked: per tensor: "transform" (blocks, transformed), "plain" (flat blocks of 4096, not transformed) or "dense".
        lane, lanes: which share of the blocks this is.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], blocked: Sequence[str], lane: int = 0, lanes: int = 1):
        groups: dict[tuple[bool, int, int], list[Region]] = {}
        dense: list[tuple[int, int, int]] = []
        for i, (shape, kind) in enumerate(zip(shapes, blocked, strict=True)):
            rows, cols = matrix_shape(shape)
            regions, rest = ([], 0) if kind == "dense" else _regions(i, shape, kind == "transform")
            for region in regions:
                groups.setdefault((region.transform, region.r, region.s), []).append(region)
            if rest < rows * cols:
                dense.append((i, rest, rows * cols))
        self.pieces: list[Piece] = []
        self.groups: list[Group] = []
        slot = 0
        for number, ((transform, r, s), regions) in enumerate(sorted(groups.items(), reverse=True)):
            first = slot
            turn = lanes - 1 - lane if number % 2 else lane  # else the last lane gets every group's remainder
            for region, lo, hi in _share(regions, [g.count for g in regions], turn, lanes):
                self.pieces.append(Piece(region, lo, hi, slot))
                slot += hi - lo
            if slot > first:
                self.groups.append(Group(r, s, transform, first, slot - first))
        self.dense: list[DensePiece] = []
        at = 0
        for (i, begin, _), lo, hi in _share(dense, [end - begin for _, begin, end in dense], lane, lanes):
            self.dense.append(DensePiece(i, begin + lo, begin + hi, at))
            at += hi - lo
        self.num_blocks, self.num_dense = slot, at

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

    def pack(self, tensors: Sequence[Tensor | None], out: Tensor) -> Tensor:
        """Copy this lane's share of `tensors` (any float dtype; None counts as zeros) into the fp32 workspace `out`."""
        slots, dense = self.blocks(out).view(-1, EDGE, EDGE), self.dense_part(out)
        for p in self.pieces:
            g, tensor, all_slots = p.region, tensors[p.region.tensor], slots[p.start : p.start + p.hi - p.lo]
            target = all_slots[:, : g.r, : g.s]
            if tensor is None or g.r * g.s < BLOCK:  # the padding of an edge block is zero
                all_slots.zero_()
            if tensor is not None and p.whole:
                target.unflatten(0, (g.y, g.x)).copy_(g.view(tensor.contiguous()))
            elif tensor is not None:
                target.copy_(g.view(tensor.contiguous()).flatten(0, 1)[p.lo : p.hi])
        for d in self.dense:
            part, tensor = dense[d.start : d.start + d.hi - d.lo], tensors[d.tensor]
            if tensor is None:
                part.zero_()
            else:
                part.copy_(tensor.reshape(-1)[d.lo : d.hi])
        return out

    def unpack(self, work: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Write this lane's share of workspace `work` into `tensors` in place (None is left out), casting to their dtype."""
        slots, dense = self.blocks(work).view(-1, EDGE, EDGE), self.dense_part(work)
        for p in self.pieces:
            g, tensor = p.region, tensors[p.region.tensor]
            if tensor is None:
                continue
            source = slots[p.start : p.start + p.hi - p.lo, : g.r, : g.s]
            whole = tensor.contiguous()
            for target, lo, hi in p.rows(g.view(whole)):
                target.copy_(source[lo:hi].unflatten(0, target.shape[:2]))
            if whole is not tensor:
                tensor.copy_(whole)
        for d in self.dense:
            tensor = tensors[d.tensor]
            if tensor is None:
                continue
            whole = tensor.contiguous()
            whole.view(-1)[d.lo : d.hi].copy_(dense[d.start : d.start + d.hi - d.lo])
            if whole is not tensor:
                tensor.copy_(whole)

    def new(self, device: torch.device | str) -> Tensor:
        """A workspace of zeros on `device`, fp32."""
        return torch.zeros(self.numel, dtype=torch.float32, device=device)


def _share(items: Sequence[T], sizes: Sequence[int], lane: int, lanes: int) -> Iterator[tuple[T, int, int]]:
    """Yield (item, lo, hi) for the part of each item that falls into lane's share of the concatenation of all."""
    total = sum(sizes)
    begin, end, at = total * lane // lanes, total * (lane + 1) // lanes, 0
    for item, size in zip(items, sizes, strict=True):
        lo, hi = max(begin - at, 0), min(end - at, size)
        if lo < hi:
            yield item, lo, hi
        at += size
