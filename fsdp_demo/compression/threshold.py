"""A selection over whole tensors: what reaches a threshold is sent, wherever in the tensor it lies
(Dynamic Communication Thresholding, arXiv 2010.08899). So busy blocks send more than quiet ones.

A tensor is a rank's shard of it; blocks at the edge of a matrix, which are smaller, have thresholds
of their own. A section has the size that `topk` values of each block take. What it holds are the
values that were chosen, by their positions, and a count for each block. On an accelerator the host
waits for counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.parts import Codec
from . import formats as values
from .blocks import Layout
from .formats import cut, low_bits, low_planes, pack, unpack
from .selection import magnitudes
from .windows import EDGE, Group, Window


def threshold(magnitude: Tensor, most: int, level: Tensor) -> Tensor:
    """The elements of a tensor that reach a level, the largest `most` where more do; of equal ones
    those with the lower positions. Zeros never do.

    Args:
        magnitude: int32 [n], as `selection.magnitudes` gives them.
        most: 1 <= most <= n.
        level: int32 scalar. One below 0 is set to that which `most` elements reach.

    Returns:
        A mask, bool [n], the same on every device.
    """
    if level < 0:
        level.copy_(_reached(magnitude, most))
    mask = magnitude >= level.clamp(min=1)
    if int(mask.sum()) <= most:
        return mask
    least = _reached(magnitude, most)
    over, ties = magnitude > least, magnitude == least
    return over | (ties & (ties.cumsum(0) <= most - over.sum()))


def _reached(magnitude: Tensor, most: int) -> Tensor:
    """The `most`-th largest magnitude."""
    return magnitude.topk(most, sorted=False).values.min()


BY_TENSOR: dict[str, Callable[[Tensor, int, Tensor], Tensor]] = {"threshold": threshold}
"""Masks of the elements of a tensor, at most `most`, with the arguments of `threshold`."""


@dataclass(frozen=True)
class TensorForm:
    """The form in which the positions of a group of blocks are sent, where each block has a number
    of its own: that number (u16); a bitmap in which the i-th position of all sets bit i + h +
    `zeros` times its block, where h is the position in the block without its `low` lowest bits
    (Elias-Fano); these bits. Sizes are those of k positions in each block.

    Attributes:
        m: elements of a block. k: positions of it. low: as in `sparse.Form`.
    """

    m: int
    k: int
    low: int

    @property
    def zeros(self) -> int:
        """Zeros of the bitmap in each block."""
        return self.m - 1 >> self.low

    def sizes(self, rows: int) -> list[int]:
        """Bytes of the counts, the bitmap, and the planes of low bits of `rows` blocks."""
        bits = [self.k + self.zeros, *(self.k * part for part in cut(self.low))]
        return [2 * rows, *((rows * b + 7) // 8 for b in bits)]

    def num_bytes(self, rows: int) -> int:
        """Bytes of `rows` blocks."""
        return sum(self.sizes(rows))

    def split(self, data: Tensor, rows: int) -> list[Tensor]:
        """Of the bytes of `rows` blocks the place of each block's first value among all (int64
        [rows + 1], within the size whatever the bytes), the bitmap, and the planes."""
        counts, *planes = data.split(self.sizes(rows))
        each = counts.clone().view(torch.int16).long().bitwise_and_(0xFFFF).clamp_(max=self.m)
        ends = each.cumsum(0).clamp_(max=rows * self.k)
        return [torch.cat([ends.new_zeros(1), ends]), *planes]

    def encode(self, place: Tensor, rows: int) -> Tensor:
        """The bytes of positions in `rows` blocks, int64 [n], ascending and distinct."""
        block, inside = place // self.m, place % self.m
        slots = torch.arange(len(place), device=place.device)
        bitmap = torch.zeros(rows * (self.k + self.zeros), dtype=torch.uint8, device=place.device)
        bitmap[(inside >> self.low) + slots + block * self.zeros] = 1
        low = torch.zeros(rows * self.k, dtype=torch.int16, device=place.device)
        low[: len(place)] = inside.to(torch.int16)
        counts = torch.bincount(block, minlength=rows).to(torch.int16).view(torch.uint8)
        return torch.cat([counts, pack(bitmap, 1), *low_planes(self.low, low)])

    def decode(self, planes: Sequence[Tensor], first: int, n: int) -> tuple[Tensor, Tensor]:
        """Of n blocks from block `first` on, split by `split`: each position's block (from 0), and
        the position, below m whatever the bytes."""
        starts, bitmap, *low = planes
        begin, end = int(starts[first]), int(starts[first + n])
        a, b = begin + first * self.zeros, end + (first + n) * self.zeros
        bits = unpack(bitmap[a // 8 : (b + 7) // 8], 1)[a % 8 : a % 8 + b - a]
        slots = torch.arange(end - begin, device=starts.device)
        ones = torch.zeros_like(slots)
        found = bits.nonzero().view(-1)[: len(ones)]
        ones[: len(found)] = found
        block = torch.arange(n, device=starts.device).repeat_interleave(
            starts[first + 1 : first + n + 1] - starts[first : first + n]
        )
        high = (ones - slots - block * self.zeros).clamp_(0, self.zeros)
        at = begin // 8 * 8  # there a byte begins in every plane
        parts = [
            p[at * bits // 8 : (end * bits + 7) // 8]
            for p, bits in zip(low, cut(self.low), strict=True)
        ]
        rest = low_bits(self.low, parts, end - at)[begin - at :].long() if self.low else 0
        return block, ((high << self.low) + rest).clamp_(max=self.m - 1)


def form(group: Group, topk: int) -> TensorForm:
    """The shortest form of a group's positions.

    >>> form(Group(64, 64, False, 0, 8), 64)
    TensorForm(m=4096, k=64, low=5)
    """
    m, k = group.r * group.s, group.k(topk)
    forms = [TensorForm(m, k, low) for low in range(max(1, (m - 1).bit_length()))]
    return min(forms, key=lambda f: (k * (f.low + 1) + f.zeros, f.low))


def encode(
    layout: Layout,
    codec: Codec,
    work: Tensor,
    data: Tensor,
    spans: Mapping[Group, tuple[int, int, int]],
    levels: Tensor | None = None,
) -> None:
    """Select and code the blocks of a workspace into a section `data`.

    Args:
        spans: as `sparse.spans` gives them.
        levels: thresholds of `layout.pieces`, int32; those below 0 are set (`threshold`). None:
            they are not kept.
    """
    if levels is None:
        levels = torch.full((len(layout.pieces),), -1, dtype=torch.int32, device=work.device)
    for g, (begin, middle, end) in spans.items():
        k, rows = g.k(codec.topk), layout.whole(g).of(work).view(-1, EDGE, EDGE)[:, : g.r, : g.s]
        rows = rows.reshape(g.count, -1).contiguous()  # smaller blocks lie apart
        where = []
        for level, p in zip(levels, layout.pieces, strict=True):
            if g.start <= p.start < g.stop:
                first, n = p.start - g.start, p.hi - p.lo
                magnitude = magnitudes(rows[first : first + n]).view(-1)
                mask = BY_TENSOR[codec.select](magnitude, n * k, level)
                where.append(mask.nonzero().view(-1) + first * rows.shape[1])
        place = torch.cat(where)
        chosen = torch.zeros(g.count * k, dtype=torch.float32, device=work.device)
        chosen[: len(place)] = rows.view(-1)[place]
        values.encode_rows(codec.value_dtype, chosen.view(-1, k), data[begin:middle], g.count, 0)
        data[middle:end] = form(g, codec.topk).encode(place, g.count)


def decode_window(
    window: Window,
    coded: Sequence[tuple[Tensor, Tensor]],
    positions: Sequence[list[Tensor]],
    codec: Codec,
) -> tuple[Tensor, Tensor]:
    """As `sparse.decode_window`: places and values [R, n, k], where k is the largest number of any
    of these blocks; blocks with fewer are filled up with zeros at place 0. coded, positions: of
    each section (`sparse.Coded`)."""
    g, first, n = window.group, window.first, window.count
    assert g is not None
    k, its = g.k(codec.topk), form(g, codec.topk)
    found = []
    for split, planes in zip(coded, positions, strict=True):
        begin, end = int(planes[0][first]), int(planes[0][first + n])
        row = min(begin // k, g.count - 1) // 8 * 8
        last = max(-(-end // k), row + 1)  # there may be no value at all
        rows = values.decode_rows(codec.value_dtype, [split], g.count, k, row, last - row)
        block, place = its.decode(planes, first, n)
        slot = torch.arange(begin, end, device=place.device) - planes[0][first : first + n][block]
        found.append((block, slot, place, rows.view(-1)[begin - row * k : end - row * k]))
    most = max([1, *(int(slot.max()) + 1 for _, slot, _, _ in found if len(slot))])
    device = coded[0][1].device
    places = torch.zeros(len(found), n, most, dtype=torch.int64, device=device)
    out = torch.zeros(len(found), n, most, dtype=torch.float32, device=device)
    for r, (block, slot, place, value) in enumerate(found):
        places[r, block, slot] = place // g.s * EDGE + place % g.s
        out[r, block, slot] = value
    return places, out
