"""The byte layout of a sparse channel's section in the body of a message (`peers/header.py` has the
header).

For each group of the layout the values (`quantize.encode`, one row per block) and then the
positions inside the r x s block (s row + column), ascending (`positions.py`); after all groups the
dense elements. The size is fixed by layout and codec, so both sides know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.parts import BLOCK, Codec
from . import positions
from . import quantize as values
from .blocks import Layout
from .selection import BY_DATA
from .windows import EDGE, Group, Window


def position_form(group: Group, topk: int) -> positions.Form:
    """The form in which the positions of a group's blocks are sent."""
    return positions.form(group.r * group.s, group.k(topk))


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
    """The bytes of each group in a section: where its values begin, where its positions begin, and
    where these end.
    """
    out, at = [], 0
    for g in layout.groups:
        middle = at + values.num_bytes(codec.value_dtype, g.count, g.k(codec.topk))
        end = middle + position_form(g, codec.topk).num_bytes(g.count)
        out.append((at, middle, end))
        at = end
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
    form = position_form(g, codec.topk)
    planes = form.split(data[span[1] : span[2]], g.count)
    for plane, bits, new in zip(planes, form.planes, positions.encode(form, index), strict=True):
        at = stretch.first * bits // 8
        plane[at : at + len(new)] = new


def _select(window: Window, codec: Codec, work: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in the r x s block (int64) and values (fp32) of what is sent of each of a window's
    blocks, [n, k].
    """
    g = window.group
    assert g is not None
    rows = work.view(-1, EDGE, EDGE)[:, : g.r, : g.s].reshape(window.count, -1)
    index = BY_DATA[codec.select](rows, g.k(codec.topk))
    return index, rows.gather(1, index)


@dataclass(frozen=True)
class Coded:
    """The bytes of one group in several sections, in rank order.

    Attributes:
        group: the group.
        values: scales and codes of the values in each section.
        positions: planes of the positions in each section (`positions.py`).
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
        form = position_form(g, codec.topk)
        out[g] = Coded(g, found, [form.split(d[middle:end], g.count) for d in datas])
    return out


def decode_window(window: Window, coded: Coded, codec: Codec) -> tuple[Tensor, Tensor]:
    """Places and values of a window of n blocks in R sections.

    Returns:
        Places in the block, int64 [R, n, k]: below 4096 whatever the bytes, and distinct in a block
        that was encoded; values fp32 [R, n, k].
    """
    g, first, n = coded.group, window.first, window.count
    k = g.k(codec.topk)
    found = values.decode_rows(codec.value_dtype, coded.values, g.count, k, first, n)
    form = position_form(g, codec.topk)
    parts = [
        [
            plane[first * b // 8 : ((first + n) * b + 7) // 8]
            for plane, b in zip(p, form.planes, strict=True)
        ]
        for p in coded.positions
    ]
    if any(n * bits % 8 for bits in form.planes):  # the last byte of a plane is not full
        place = torch.stack([positions.decode(form, planes, n) for planes in parts])
    else:
        joined = [torch.cat(planes) for planes in zip(*parts, strict=True)]
        place = positions.decode(form, joined, len(parts) * n)
    if g.s < EDGE:
        place = place // g.s * EDGE + place % g.s
    return place.view(len(parts), n, k), found


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
    places, found = (
        [torch.empty(0, dtype=torch.int64, device=data.device)],
        [torch.empty(0, device=data.device, dtype=torch.float32)],
    )
    of = split(layout, codec, [data])
    for s in layout.stretches(data.device, codec.topk):
        assert s.group is not None
        place, value = decode_window(s, of[s.group], codec)
        places.append(
            place[0]
            .add_(torch.arange(s.begin, s.end, BLOCK, device=place.device)[:, None])
            .view(-1)
        )
        found.append(value.view(-1))
    return torch.cat(places), torch.cat(found), decode_dense(layout, codec, data)


def decode_dense(layout: Layout, codec: Codec, data: Tensor) -> Tensor:
    """The elements that are sent whole, fp32 [num_dense], from the bytes of a section."""
    size = values.num_bytes(dense_code(codec), 1, layout.num_dense)
    return values.decode(dense_code(codec), data[data.numel() - size :], 1, layout.num_dense).view(
        -1
    )
