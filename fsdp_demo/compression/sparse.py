"""The byte layout of a sparse channel's section in the body of a message (`comm/header.py` has the
header).

For each group of the layout the values (`quantize.encode`, one row per block) and then the
positions inside the r x s block, slot coordinates (64 row + column), ascending, 12 bits each, two
in three bytes; after all groups the dense elements. The size is fixed by layout and codec, so both
sides know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.channel import BLOCK, Codec
from . import quantize as values
from .blocks import Layout
from .selection import choose
from .windows import EDGE, Group, Window


def pack12(index: Tensor) -> Tensor:
    """Pack numbers 0..4095 into uint8 [ceil(1.5 n)]: a, b -> a & 255, a >> 8 | (b & 15) << 4, b >>
    4; an odd last one is padded by 0.
    """
    flat = index.reshape(-1)
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    a, b = flat.view(-1, 2).unbind(1)
    packed = torch.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], 1).to(torch.uint8).view(-1)
    return packed[: (3 * index.numel() + 1) // 2]


def unpack12(data: Tensor, n: int) -> Tensor:
    """The inverse of `pack12`: int64 [n]."""
    if data.numel() % 3:
        data = torch.cat([data, data.new_zeros(1)])
    x, y, z = data.to(torch.int64).view(-1, 3).unbind(1)
    return torch.stack([x | ((y & 15) << 8), (y >> 4) | (z << 4)], 1).view(-1)[:n]


def dense_code(codec: Codec) -> str:
    """How a sparse channel codes the tensors it sends whole: a scale shared by small tensors would
    hurt, so bf16 unless it is fp32.
    """
    return "fp32" if codec.value_dtype == "fp32" else "bf16"


def sparse_bytes(layout: Layout, codec: Codec) -> int:
    """Bytes of a sparse channel's section, without the header."""
    total = values.num_bytes(dense_code(codec), 1, layout.num_dense)
    for g in layout.groups:
        k = g.k(codec.topk)
        total += values.num_bytes(codec.value_dtype, g.count, k) + (3 * g.count * k + 1) // 2
    return total


def spans(layout: Layout, codec: Codec) -> list[tuple[int, int, int]]:
    """Of each group: where its values begin in the section, where its positions, and where they
    end.
    """
    out, at = [], 0
    for g in layout.groups:
        k = g.k(codec.topk)
        size = values.num_bytes(codec.value_dtype, g.count, k)
        out.append((at, at + size, at + size + (3 * g.count * k + 1) // 2))
        at = out[-1][2]
    return out


def encode_stretch(
    stretch: Window, span: tuple[int, int, int], codec: Codec, work: Tensor, data: Tensor
) -> None:
    """Select and code the blocks of a stretch of the workspace `work` into its places of a section
    `data`; `span` is that of its group.
    """
    g = stretch.group
    assert g is not None
    picked = [_select(w, codec, w.of(work)) for w in stretch.parts]
    index, chosen = picked[0] if len(picked) == 1 else map(torch.cat, zip(*picked, strict=True))
    values.encode_rows(codec.value_dtype, chosen, data[span[0] : span[1]], g.count, stretch.first)
    packed, at = (
        pack12(index if g.s == EDGE else index // g.s * EDGE + index % g.s),
        span[1] + 3 * stretch.first * index.shape[1] // 2,
    )
    data[at : at + packed.numel()] = packed


def _select(window: Window, codec: Codec, work: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in the r x s block (int64) and values (fp32) of what is sent of each of a window's
    blocks, [n, k].
    """
    g = window.group
    assert g is not None
    rows = work.view(-1, EDGE, EDGE)[:, : g.r, : g.s].reshape(window.count, -1)
    index = choose(codec.select, rows, g.k(codec.topk))
    return index, rows.gather(1, index)


@dataclass(frozen=True)
class Coded:
    """What several sections hold for one group: scales and codes of the values, and positions, in
    rank order.
    """

    group: Group
    values: list[tuple[Tensor, Tensor]]
    positions: list[Tensor]


def split(layout: Layout, codec: Codec, datas: Sequence[Tensor]) -> dict[Group, Coded]:
    """Cut sections into their groups (views)."""
    out = {}
    for g, (begin, middle, end) in zip(layout.groups, spans(layout, codec), strict=True):
        found = [
            values.split_bytes(codec.value_dtype, d[begin:middle], g.count, g.k(codec.topk))
            for d in datas
        ]
        out[g] = Coded(g, found, [d[middle:end] for d in datas])
    return out


def decode_window(window: Window, coded: Coded, codec: Codec) -> tuple[Tensor, Tensor]:
    """What R sections hold for a window of n blocks: places in the block (int64 [R, n, k], distinct
    in each), values (fp32 [R, n, k]).
    """
    k, n, size = coded.group.k(codec.topk), window.count, len(coded.positions)
    found = values.decode_rows(
        codec.value_dtype, coded.values, coded.group.count, k, window.first, n
    )
    at, length = 3 * window.first * k // 2, (3 * n * k + 1) // 2
    parts = [p[at : at + length] for p in coded.positions]
    slot = (
        torch.stack([unpack12(p, n * k) for p in parts])
        if n * k % 2
        else unpack12(torch.cat(parts), size * n * k)
    )
    return slot.view(size, n, k), found


def encode_sparse(layout: Layout, codec: Codec, work: Tensor) -> Tensor:
    """Select and code the workspace `work` (flat fp32): uint8 [sparse_bytes]. `work` is not
    changed.
    """
    data = torch.empty(sparse_bytes(layout, codec), dtype=torch.uint8, device=work.device)
    of = dict(zip(layout.groups, spans(layout, codec), strict=True))
    for s in layout.stretches(work.device, codec.topk):
        assert s.group is not None
        encode_stretch(s, of[s.group], codec, work, data)
    dense = values.encode(dense_code(codec), layout.dense_part(work).view(1, -1))
    data[data.numel() - dense.numel() :] = dense
    return data


def decode_sparse(layout: Layout, codec: Codec, data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions in the workspace (int64 [m], distinct), their values (fp32 [m]) and the dense part
    (fp32 [num_dense]).
    """
    positions, found = (
        [torch.empty(0, dtype=torch.int64, device=data.device)],
        [torch.empty(0, device=data.device)],
    )
    of = split(layout, codec, [data])
    for s in layout.stretches(data.device, codec.topk):
        assert s.group is not None
        place, value = decode_window(s, of[s.group], codec)
        positions.append(
            place[0]
            .add_(torch.arange(s.begin, s.end, BLOCK, device=place.device)[:, None])
            .view(-1)
        )
        found.append(value.view(-1))
    return torch.cat(positions), torch.cat(found), decode_dense(layout, codec, data)


def decode_dense(layout: Layout, codec: Codec, data: Tensor) -> Tensor:
    """The elements that are sent whole, fp32 [num_dense]."""
    size = values.num_bytes(dense_code(codec), 1, layout.num_dense)
    return values.decode(dense_code(codec), data[data.numel() - size :], 1, layout.num_dense).view(
        -1
    )
