"""Values as bytes, in every number format: groups, scales, packed codes. What a value becomes is in
`formats.py` and the files it lists.

A row is cut into groups of consecutive values (`config/names.py` says how many), the last of a row
may be shorter. First the scales of all groups in bf16, row by row; then the codes of all values,
row by row without gaps, those under 8 bits together in a byte, the first in its lowest bits; unused
bits of the last byte are 0. With m = max |v| of the group, s its scale:

========  =====  ==================  =====================================================================  ========================
code      group  scale               a value is sent as                                                     error at most
========  =====  ==================  =====================================================================  ========================
fp32                                 itself                                                                 0
bf16                                 the nearest bf16, ties to even                                         2^-8 |v|
int8      4096   bf16(m / 127)       q s, q = v / s rounded, -127..127, ties to even                        s / 2
int4      256    bf16(m / 7)         the same with -7..7, two's complement                                  s / 2
fp4_e3m0  4096   bf16(m)             sign and 0, 2^-6, 2^-5, ... 1 times s                                  max(|v| / 3, s / 128)
fp4_e2m1  32     bf16(m / 6)         sign and 0, 0.5, 1, 1.5, 2, 3, 4, 6 times s                            max(|v| / 5, s / 4)
2bit      256    two levels, bf16    sign and the mean of the |v| below, or not below, their common mean t  max(t, m - t) + 2^-8 m
1bit      4096   bf16(t)             sign and the mean t of the |v|                                         max(t, m - t) + 2^-8 m
========  =====  ==================  =====================================================================  ========================

A bound in s has fp32's rounding on top (2^-16 of it) and holds for normal numbers: scales from
2^-126, magnitudes that bf16 can hold. The fp4 codes take the nearest magnitude, of two equally near
ones that which is an even multiple of their distance (e3m0: the larger, and 0 rather than 2^-6);
their sign bit (the highest) is that of the value also at 0. What lies above the largest magnitude,
because the scale was rounded down, gets the largest. 2bit and 1bit have no zero: exact zeros count
as |v| and get the (lower) level; the highest bit is the sign, bit 0 of 2bit the level; a level of no
values is 0.

A scale of 0 marks a group of zeros. A group that is not finite gets a scale (both levels) that is
not, and is decoded so as a whole. Little-endian; the same bytes of finite values on CPU and CUDA:
only operations that IEEE 754 defines, sums in a fixed order.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..config.names import FORMATS
from .formats import CODERS, EXACT, pack, unpack

# values coded at once on a CPU: what is written in between stays in the cache of a core
CHUNK = 1 << 18
CHUNK_GPU = 1 << 24  # elsewhere: few launches, memory in between that is still bounded


def num_bytes(code: str, rows: int, cols: int) -> int:
    """Bytes of `rows` rows of `cols` values each."""
    return FORMATS[code].num_bytes(rows, cols)


def encode(code: str, v: Tensor) -> Tensor:
    """The bytes of values fp32 [rows, cols]: uint8 [num_bytes]."""
    if code in EXACT:
        return v.to(EXACT[code]).contiguous().view(-1).view(torch.uint8)
    coder = CODERS[code]
    data = torch.empty(num_bytes(code, *v.shape), dtype=torch.uint8, device=v.device)
    for part, scales, codes in _chunks(code, data, v):
        coded = [coder.encode(groups) for groups in _groups(code, part)]
        scales.copy_(torch.cat([s for s, _ in coded], 1))
        codes.copy_(
            pack(torch.cat([q.flatten(1) for _, q in coded], 1).view(-1), FORMATS[code].bits)
        )
    return data


def decode(
    code: str,
    data: Tensor,
    rows: int,
    cols: int,
    out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:
    """The inverse of `encode`: fp32 [rows, cols] from uint8 [num_bytes]. A non-finite scale makes
    its whole group non-finite.

    Args:
        out: where to write the values, or, with `alpha`, to add alpha times them.
    """
    # a slice may start at any byte, a view of another dtype (values or scales) may not
    viewed = EXACT.get(code, torch.bfloat16)
    data = data.clone() if data.storage_offset() % viewed.itemsize else data
    out = torch.empty(rows, cols, device=data.device, dtype=torch.float32) if out is None else out
    if code in EXACT:
        _write(out, data.view(EXACT[code]).view(rows, cols), alpha)
        return out
    coder = CODERS[code]
    for part, scales, codes in _chunks(code, data, out):
        q = unpack(codes, FORMATS[code].bits)[: part.numel()].view_as(part)
        start = 0
        for groups, its in zip(_groups(code, part), _groups(code, q), strict=True):
            _write(
                groups, coder.decode(scales[:, start : start + groups.shape[1]].float(), its), alpha
            )
            start += groups.shape[1]
    return out


def encode_rows(code: str, v: Tensor, data: Tensor, rows: int, first: int) -> None:
    """Code some rows of a larger tensor into the bytes of the whole.

    Args:
        v: the rows, fp32 [n, cols].
        data: the bytes of the whole, uint8 [num_bytes(code, rows, cols)].
        rows: rows of the whole.
        first: number of the first row of `v` in the whole. The rows before it must fill whole bytes
            (any multiple of 8 does).
    """
    scales, codes = split_bytes(code, data, rows, v.shape[1])
    coded, size = encode(code, v), len(scales) // max(rows, 1)
    scales[first * size : (first + len(v)) * size] = coded[: len(v) * size]
    start = first * v.shape[1] * FORMATS[code].bits // 8
    codes[start : start + len(coded) - len(v) * size] = coded[len(v) * size :]


def decode_rows(
    code: str, split: Sequence[tuple[Tensor, Tensor]], rows: int, cols: int, first: int, count: int
) -> Tensor:
    """Some rows of several coded tensors of equal shape: fp32 [len(split), count, cols].

    Args:
        split: bytes of each tensor, as `split_bytes` gives them.
        rows, cols: shape of each.
        first, count: number of the first row, and how many.
    """
    size, bits = len(split[0][0]) // max(rows, 1), cols * FORMATS[code].bits
    at, end = first * bits // 8, ((first + count) * bits + 7) // 8
    scales, codes = (
        ([s[first * size : (first + count) * size] for s, _ in split] if size else []),
        [c[at:end] for _, c in split],
    )
    if count * bits % 8:  # the last byte is not full
        parts = zip(scales, codes, strict=True) if size else ((c,) for c in codes)
        return torch.stack([decode(code, torch.cat(part), count, cols) for part in parts])
    return decode(code, torch.cat(scales + codes), len(split) * count, cols).view(
        len(split), count, cols
    )


def split_bytes(code: str, data: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """The bytes of the scales of coded rows, and those of the codes."""
    scales = 2 * rows * FORMATS[code].num_scales(cols)
    return data[:scales], data[scales:]


def _write(out: Tensor, found: Tensor, alpha: float | None) -> None:
    if alpha is None:
        out.copy_(found)
    else:
        out.add_(found, alpha=alpha)


def _chunks(code: str, data: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views that belong together: rows [n, cols] of v [rows, cols], their scales [n, groups, 1 or
    2] bf16 and codes uint8 in `data`.
    """
    (rows, cols), form = v.shape, FORMATS[code]
    if not v.numel():
        return
    # as rows of one group the same bytes: also a long row is done in chunks
    if cols % form.group == 0:
        rows, cols = v.numel() // form.group, form.group
    v, size = v.reshape(rows, cols), rows * form.num_scales(cols)
    scales = data[: 2 * size].view(torch.bfloat16).view(rows, -1, form.scales)
    codes = data[scales.numel() * 2 :]
    # eight rows are whole bytes
    step = max(8, (CHUNK if v.device.type == "cpu" else CHUNK_GPU) // cols // 8 * 8)
    width = step * cols * form.bits // 8
    for i, start in enumerate(range(0, rows, step)):
        yield (
            v[start : start + step],
            scales[start : start + step],
            codes[i * width : (i + 1) * width],
        )


def _groups(code: str, part: Tensor) -> list[Tensor]:
    """Views of rows [n, cols] as groups [n, number, size]: the whole ones, and the shorter last one
    of each row.
    """
    size = min(FORMATS[code].group, part.shape[1])
    whole = part.shape[1] // size * size
    last = [part[:, whole:].unsqueeze(1)] if whole < part.shape[1] else []
    return [part[:, :whole].unflatten(1, (-1, size)), *last]
