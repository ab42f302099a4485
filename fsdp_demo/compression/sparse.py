"""The byte layout of a sparse channel's section in the body of a message (`peers/header.py` has the
header).

For each group of the layout the values (`formats.encode`, one row per block) and then the positions
inside the r x s block (s row + column), ascending (`Form`); after all groups the dense elements.
The size is fixed by layout and codec, so both sides know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..config.parts import Codec
from . import formats as values
from . import threshold
from .blocks import Layout
from .formats import cut, low_bits, low_planes, pack
from .selection import BY_DATA
from .windows import EDGE, Group, Window, stretches, upload


def position_form(group: Group, topk: int) -> Form:
    """The form in which the positions of a group's blocks are sent, as many of each."""
    return shortest_form(group.r * group.s, group.k(topk))


def _form(group: Group, codec: Codec) -> Form | threshold.TensorForm:
    """The form of a group's positions under this codec."""
    chosen = threshold.form if codec.by_tensor else position_form
    return chosen(group, codec.topk)


def dense_code(codec: Codec) -> str:
    """The code of the tensors that a sparse channel sends whole: bf16, or fp32 where the values
    are. Codes with scales would hurt here: small tensors would share one.
    """
    return "fp32" if codec.value_dtype == "fp32" else "bf16"


def sparse_bytes(layout: Layout, codec: Codec) -> int:
    """Bytes of a sparse channel's section, without the header."""
    blocks = spans(layout, codec)[-1][2] if layout.groups else 0
    return blocks + values.num_bytes(dense_code(codec), 1, layout.num_dense)


def spans(layout: Layout, codec: Codec) -> list[tuple[int, int, int]]:
    """The bytes of each group in a section: begins of its values and positions, and their end."""
    out, at = [], 0
    for g in layout.groups:
        middle = at + values.num_bytes(codec.value_dtype, g.count, g.k(codec.topk))
        end = middle + _form(g, codec).num_bytes(g.count)
        out.append((at, middle, end))
        at = end
    return out


def encode_stretch(
    stretch: Window, span: tuple[int, int, int], codec: Codec, work: Tensor, data: Tensor
) -> Tensor:
    """Select and code the blocks of a stretch of `work` into a section `data`, at `span`. Returns
    the positions, int64 [n, k].
    """
    g = stretch.group
    assert g is not None
    picked = []
    for w in stretch.parts:
        rows = w.of(work).view(-1, EDGE, EDGE)[:, : g.r, : g.s].reshape(w.count, -1)
        index = BY_DATA[codec.select](rows, g.k(codec.topk))
        picked.append((index, rows.gather(1, index)))
    index, chosen = picked[0] if len(picked) == 1 else map(torch.cat, zip(*picked, strict=True))
    values.encode_rows(codec.value_dtype, chosen, data[span[0] : span[1]], g.count, stretch.first)
    form = position_form(g, codec.topk)
    planes = form.split(data[span[1] : span[2]], g.count)
    for plane, bits, new in zip(planes, form.planes, encode_positions(form, index), strict=True):
        at = stretch.first * bits // 8
        plane[at : at + len(new)] = new
    return index


@dataclass(frozen=True)
class Coded:
    """The bytes of one group in several sections, in rank order.

    Attributes:
        group: the group.
        values: scales and codes of the values in each section.
        positions: planes of the positions in each section (`Form.planes`, `TensorForm.split`).
    """

    group: Group
    values: list[tuple[Tensor, Tensor]]
    positions: list[list[Tensor]]


def split(layout: Layout, codec: Codec, datas: Sequence[Tensor]) -> dict[Group, Coded]:
    """The bytes of sections by group, as views."""
    out = {}
    for g, (begin, middle, end) in zip(layout.groups, spans(layout, codec), strict=True):
        found = [
            values.split_bytes(codec.value_dtype, d[begin:middle], g.count, g.k(codec.topk))
            for d in datas
        ]
        form = _form(g, codec)
        out[g] = Coded(g, found, [form.split(d[middle:end], g.count) for d in datas])
    return out


def decode_window(
    window: Window, coded: Coded, codec: Codec, known: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Places and values of a window of n blocks in R sections; `known`: the positions (int16 [R n,
    k]) where they need not be decoded.

    Returns:
        Places in the block, int64 [R, n, k]: below 4096 whatever the bytes, and distinct in a block
        that was encoded; values fp32 [R, n, k].
    """
    if codec.by_tensor:
        return threshold.decode_window(window, coded.values, coded.positions, codec)
    g, first, n = coded.group, window.first, window.count
    k = g.k(codec.topk)
    found = values.decode_rows(codec.value_dtype, coded.values, g.count, k, first, n)
    form = position_form(g, codec.topk)
    cuts = [slice(first * b // 8, ((first + n) * b + 7) // 8) for b in form.planes]
    parts = [[p[at] for p, at in zip(planes, cuts, strict=True)] for planes in coded.positions]
    if known is not None:
        place = known.long()
    elif any(n * bits % 8 for bits in form.planes):  # the last byte of a plane is not full
        place = torch.stack([decode_positions(form, planes, n) for planes in parts])
    else:
        joined = [torch.cat(planes) for planes in zip(*parts, strict=True)]
        place = decode_positions(form, joined, len(parts) * n)
    if g.s < EDGE:
        place = place // g.s * EDGE + place % g.s
    return place.view(len(parts), n, k), found


def encode_sparse(
    layout: Layout,
    codec: Codec,
    work: Tensor,
    chosen: list[Tensor] | None = None,
    levels: Tensor | None = None,
) -> Tensor:
    """Select and code the workspace `work` (flat fp32, not changed): uint8 [sparse_bytes]. The
    positions of each stretch are added to `chosen`, int16 [n, k]. levels: `threshold.encode`'s.
    """
    data = torch.empty(sparse_bytes(layout, codec), dtype=torch.uint8, device=work.device)
    of = dict(zip(layout.groups, spans(layout, codec), strict=True))
    if codec.by_tensor:
        threshold.encode(layout, codec, work, data, of, levels)
    windows = [] if codec.by_tensor else layout.windows(work.device)
    for s in stretches(windows, work.device, codec.topk):
        assert s.group is not None
        index = encode_stretch(s, of[s.group], codec, work, data)
        if chosen is not None:
            chosen.append(index.to(torch.int16))
    dense = values.encode(dense_code(codec), layout.dense_part(work).view(1, -1))
    data[data.numel() - dense.numel() :] = dense
    return data


def decode_dense(layout: Layout, codec: Codec, data: Tensor) -> Tensor:
    """The elements that are sent whole, fp32 [num_dense], from the bytes of a section."""
    code, n = dense_code(codec), layout.num_dense
    return values.decode(code, data[len(data) - values.num_bytes(code, 1, n) :], 1, n).view(-1)


# ---- positions ---------------------------------------------------------------------------------
#
# Positions of the elements of a block that are sent, as bits: k of n, ascending and distinct, in
# a number of bits that k and n alone decide.
#
# A position is cut into its `low` lowest bits, sent as they are, and the rest h. The i-th of a
# block (i = 0, 1, ...) sets bit h + i of a bitmap of k + (n - 1 >> low) bits: the gaps in unary,
# a zero for every 2^low elements that are passed (P. Elias, J. ACM 21, 1974; R. M. Fano, 1971).
# At the best `low` about a fifth of its bits are ones. It is sent in thirds, one bit and two more
# for each one:
#
# * flags, one bit for every three bits of the bitmap: is there a one among them?
# * symbols, two bits for each position: 0, 1 or 2 is where the only one of its three lies. Where
#   there are two or three ones, the symbols before the last are 3, and the last says which of the
#   three is the zero, or 0 for three ones.
#
# So a block takes k (low + 2) + ceil((k + (n - 1 >> low)) / 3) bits, for n = 4096 8.69 per
# position at k = 32 and 7.67 at k = 64, where log2 of the number of sets is 8.32 and 7.36. Where
# that is not less than the bits of the numbers themselves (k = 1, 2, 3 of 4096), these are sent.
#
# Each part is a plane: the bits of all blocks of a group one after the other without gaps, the
# first in the lowest bit, filled up to whole bytes. What is cut at a multiple of 8 blocks begins
# with whole bytes. Any bytes are decoded, in a time and to a size that do not depend on them, to
# positions below n; those that nobody has encoded may come twice.

THIRD = 21846
"""A third in units of 2^-16: floor(x * THIRD / 2^16) is floor(x / 3) for 0 <= x < 2^14."""


@dataclass(frozen=True)
class Form:
    """The form in which k positions below n are sent.

    Attributes:
        n, k: elements of a block, and positions of it.
        low: number of lowest bits of a position that are sent as they are; all without flags.
        flags: number of flags of a block; 0 where the numbers themselves are sent.
    """

    n: int
    k: int
    low: int
    flags: int

    @property
    def planes(self) -> list[int]:
        """Bits of one block in each plane: flags, symbols, low bytes of the low bits, the rest of
        them.
        """
        low = [self.k * bits for bits in cut(self.low)]
        return [self.flags, 2 * self.k, *low] if self.flags else low

    @property
    def bits(self) -> int:
        """Bits of one block."""
        return sum(self.planes)

    def num_bytes(self, rows: int) -> int:
        """Bytes of `rows` blocks."""
        return sum((rows * bits + 7) // 8 for bits in self.planes)

    def split(self, data: Tensor, rows: int) -> list[Tensor]:
        """The planes of `rows` blocks: views of their bytes `data`."""
        return list(data.split([(rows * bits + 7) // 8 for bits in self.planes]))


@cache
def shortest_form(n: int, k: int) -> Form:
    """The shortest form of k positions below n. Even for one block or two it takes no more bytes
    than 12 bits for each position.

    >>> shortest_form(4096, 32), shortest_form(4096, 32).bits, shortest_form(4096, 2).bits
    (Form(n=4096, k=32, low=5, flags=53), 277, 24)
    """
    width = max(1, (n - 1).bit_length())
    # few blocks fill no bytes: no more than two planes
    found = [Form(n, k, width + (width in (3, 7, 11)), 0)]
    found += [Form(n, k, low, -(-(k + (n - 1 >> low)) // 3)) for low in range(width)]
    found = [f for f in found if all(f.num_bytes(m) <= (12 * m * k + 7) // 8 for m in (1, 2))]
    return min(found, key=lambda f: (f.bits, f.flags))


def encode_positions(f: Form, index: Tensor) -> list[Tensor]:
    """The planes of positions (int64 [rows, k], ascending and distinct in a row): uint8 each."""
    rows, device, number = len(index), index.device, index.to(torch.int16)
    low = low_planes(f.low, number.view(-1))
    if not f.flags:
        return low
    bit = (number >> f.low).add_(torch.arange(f.k, dtype=torch.int16, device=device))
    third = bit.to(torch.int32).mul_(THIRD).bitwise_right_shift_(16)
    inside = bit.sub_(third.to(torch.int16), alpha=3).view(-1).to(torch.uint8)
    first = torch.arange(0, rows * f.flags, f.flags, dtype=torch.int32, device=device)
    flag = third.add_(first[:, None]).view(-1)
    flags = torch.zeros(rows * f.flags, dtype=torch.uint8, device=device)
    flags.scatter_(0, flag.long(), flags.new_ones(1).expand(len(flag)))
    return [pack(flags, 1), pack(_symbols(flag.to(torch.int16), inside), 2), *low]


def _symbols(flag: Tensor, inside: Tensor) -> Tensor:
    """The symbol of each position (uint8).

    Args:
        flag: number of the three bits in which its one lies (int16, modulo 2^16).
        inside: place of its one in the three (uint8, used up).
    """
    # 1 where a position lies in the three of the one before
    again = (flag[1:] - flag[:-1]).clamp_(max=1).to(torch.uint8).bitwise_xor_(1)
    # then this one says 3 - the one before - this one: the zero of two, 0 of three
    other = torch.add(inside[:-1], inside[1:], alpha=2).neg_().add_(3).mul_(again)
    inside[1:].add_(other)
    inside[:-1].bitwise_or_(again.mul_(3))
    return inside


def decode_positions(f: Form, planes: list[Tensor], rows: int) -> Tensor:
    """The inverse of `encode_positions`: int64 [rows, k], each below n.

    Numbers are added modulo 2^16: those of honest bytes lie below 2^13.
    """
    device, count = planes[0].device, rows * f.k
    low = low_bits(f.low, planes[2 if f.flags else 0 :], count)
    if not f.flags:
        return low.clamp_(0, f.n - 1).view(rows, f.k).long()
    inside, start = _inside(planes[1], count)
    group = start.to(torch.int32).cumsum(0, dtype=torch.int32)
    bit = _set(planes[0], count).index_select(0, group).to(torch.int16)
    bit = bit.add_(inside.to(torch.int16)).view(rows, f.k)
    passed = torch.arange(0, 3 * f.flags * rows, 3 * f.flags, dtype=torch.int32, device=device)
    bit.sub_(passed.to(torch.int16)[:, None])
    bit.sub_(torch.arange(f.k, dtype=torch.int16, device=device))
    if f.low:
        bit.bitwise_left_shift_(f.low).add_(low.view(rows, f.k))
    return bit.clamp_(0, f.n - 1).long()


def _set(data: Tensor, count: int) -> Tensor:
    """Three times the place of the i-th one in the bits of `data`, from 1: int32 [count + 1]."""
    ones, place = _of_bytes(data.device)
    byte = data.to(torch.int32)
    number = ones.index_select(0, byte)
    before = number.cumsum(0, dtype=torch.int32).sub_(number)
    # the i-th lies in the last byte that has less than i ones before it
    begins = torch.zeros(count + 2, dtype=torch.int32, device=data.device)
    begins.scatter_add_(
        0, (before + 1).clamp_(max=count + 1).long(), begins.new_ones(1).expand(len(byte))
    )
    # not by assignment: a number that is assigned to an element makes the host wait for a GPU
    begins[0].fill_(1)
    begins[1].sub_(1)
    which = begins[:-1].cumsum(0, dtype=torch.int32).sub_(1)
    entry = (byte << 3).sub_(before).index_select(0, which)
    entry.add_(torch.arange(-1, count, dtype=torch.int32, device=data.device))
    entry.bitwise_and_(2047)
    return which.mul_(24).add_(place.index_select(0, entry))


def _inside(data: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The place of each symbol's one among its three bits, and 1 where it is the first of them
    (uint8 each).
    """
    byte = data.to(torch.int32)
    key = byte << 4
    key[1:] |= byte[:-1] >> 4
    key[:-1] |= (byte[1:] & 3) << 12
    found = _of_symbols(data.device).index_select(0, key).view(torch.uint8)[:count]
    return found & 3, found >> 2


@cache
def _of_bytes(device: torch.device) -> tuple[Tensor, Tensor]:
    """A table of bytes: the number of ones (int32 [256]), and three times the place of the first,
    second, ... of them (int32 [256 x 8]).
    """
    bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1
    # ones first, in their order
    place = (1 - bits).sort(dim=1, stable=True).indices
    return upload(bits.sum(1).int(), device), upload(place.mul(3).view(-1).int(), device)


@cache
def _of_symbols(device: torch.device) -> Tensor:
    """A table of four symbols (int32 [2^14]), by a key of 14 bits: the last two symbols before
    them, themselves and the one after them. An entry has a byte for each of the four, the first in
    the lowest: the place of its one, and 4 if that is the first of its three bits.
    """
    s = [torch.arange(1 << 14, device="cpu") >> 2 * i & 3 for i in range(7)]
    found = []
    for before, last, this, after in zip(s, s[1:], s[2:], s[3:], strict=False):
        first, third = last != 3, (last == 3) & (before == 3)
        lowest = torch.where(this < 3, this, (after == 0).long())
        second = torch.where(this < 3, 2 - (this == 2).long(), 1)
        inside = torch.where(first, lowest, torch.where(third, 2, second))
        found.append(inside + 4 * first)
    return upload(torch.stack(found, 1).to(torch.uint8).view(torch.int32).view(-1), device)
