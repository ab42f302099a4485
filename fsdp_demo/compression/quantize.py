"""Codes of values: fp32, bf16, int8, and four codes of 4 or 2 bits with scales shared by a group. Encoders return bytes, decoders fp32.

A row is cut into groups of GROUP[code] consecutive values, the last of a row may be shorter. First the scales of all groups in bf16, row
by row; then the codes of all values, row by row without gaps, those under 8 bits together in a byte, the first in its lowest bits; unused
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
========  =====  ==================  =====================================================================  ========================

A bound in s has fp32's rounding on top (2^-16 of it) and holds for normal numbers: scales from 2^-126, magnitudes that bf16 can hold.
The fp4 codes take the nearest magnitude, of two equally near ones that which is an even multiple of their distance (e3m0: the larger, and
0 rather than 2^-6); their sign bit (the highest) is that of the value also at 0. What lies above the largest magnitude, because the scale
was rounded down, gets the largest. 2bit has no zero: exact zeros count as |v| and get the lower level; bit 1 is the sign, bit 0 the level;
a level of no values is 0.

A scale of 0 marks a group of zeros. A group that is not finite gets a scale (both levels) that is not, and is decoded so as a whole.
Little-endian; the same bytes of finite values on CPU and CUDA: only operations that IEEE 754 defines, sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "fp4_e3m0": 4, "fp4_e2m1": 4, "2bit": 2}
GROUP = {"int8": 4096, "int4": 256, "fp4_e3m0": 4096, "fp4_e2m1": 32, "2bit": 256}  # values that share a scale
LARGEST = {"int8": 127.0, "int4": 7.0, "fp4_e3m0": 1.0, "fp4_e2m1": 6.0}  # the largest magnitude in units of the scale
MAGNITUDES = {"fp4_e3m0": (0.0, *(2.0**e for e in range(-6, 1))), "fp4_e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)}
LINES = {  # the code of a magnitude, between neighbours: slope * magnitude + start
    "fp4_e3m0": ((64.0, 0), (32.0, 1), (16.0, 2), (8.0, 3), (4.0, 4), (2.0, 5)),
    "fp4_e2m1": ((2.0, 0), (1.0, 2), (0.5, 4)),
}
CHUNK = 1 << 18  # values coded at once on a CPU: what is written in between stays in the cache of a core
CHUNK_GPU = 1 << 24  # elsewhere: few launches, memory in between that is still bounded


def bytes_per_value(code: str) -> float:
    """Bytes of one value, without scales.

    Example:
        >>> [bytes_per_value(code) for code in ("fp32", "bf16", "int8", "int4", "2bit")]
        [4.0, 2.0, 1.0, 0.5, 0.25]
    """
    return BITS[code] / 8


def num_bytes(code: str, rows: int, cols: int) -> int:
    """Bytes of `rows` rows of `cols` values each."""
    scales = rows * -(-cols // GROUP[code]) * _scales(code) if code in GROUP else 0
    return 2 * scales + (rows * cols * BITS[code] + 7) // 8


def as_bytes(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [numel * itemsize]."""
    return t.contiguous().view(-1).view(torch.uint8)


def encode(code: str, v: Tensor) -> Tensor:
    """Code values [rows, cols] fp32 as uint8 [num_bytes]."""
    if code not in GROUP:
        return as_bytes(v if code == "fp32" else v.to(torch.bfloat16))
    data = torch.empty(num_bytes(code, *v.shape), dtype=torch.uint8, device=v.device)
    for part, scales, codes in _chunks(code, data, v):
        coded = [_encode(code, groups) for groups in _groups(code, part)]
        scales.copy_(torch.cat([s for s, _ in coded], 1))
        codes.copy_(_pack(torch.cat([q.flatten(1) for _, q in coded], 1).view(-1), BITS[code]))
    return data


def decode(code: str, data: Tensor, rows: int, cols: int, out: Tensor | None = None, alpha: float | None = None) -> Tensor:
    """The inverse of `encode`: fp32 [rows, cols] from uint8 [num_bytes]. A non-finite scale makes its whole group non-finite.

    out: where to write the values, or, with `alpha`, to add alpha times them."""
    data = data.clone() if data.storage_offset() % 4 else data  # a slice may start at any byte, a view of another dtype may not
    out = torch.empty(rows, cols, device=data.device) if out is None else out
    if code not in GROUP:
        _write(out, data.view(torch.float32 if code == "fp32" else torch.bfloat16).view(rows, cols), alpha)
        return out
    for part, scales, codes in _chunks(code, data, out):
        q = _unpack(codes, BITS[code])[: part.numel()].view_as(part)
        start = 0
        for groups, its in zip(_groups(code, part), _groups(code, q), strict=True):
            _write(groups, _decode(code, scales[:, start : start + groups.shape[1]].float(), its), alpha)
            start += groups.shape[1]
    return out


def encode_rows(code: str, v: Tensor, data: Tensor, rows: int, first: int) -> None:
    """Write what `encode` would have made of `v` [n, cols] as rows first, first + 1, ... of `rows` into its bytes `data`; what comes
    before `first` fills whole bytes (any multiple of 4 rows does)."""
    scales, codes = split_bytes(code, data, rows, v.shape[1])
    coded, size = encode(code, v), len(scales) // max(rows, 1)
    scales[first * size : (first + len(v)) * size] = coded[: len(v) * size]
    start = first * v.shape[1] * BITS[code] // 8
    codes[start : start + len(coded) - len(v) * size] = coded[len(v) * size :]


def decode_rows(code: str, split: Sequence[tuple[Tensor, Tensor]], rows: int, cols: int, first: int, count: int) -> Tensor:
    """Rows first, first + 1, ... of what several encoded with equal shapes, each `split_bytes`: fp32 [len(split), count, cols]."""
    size, bits = len(split[0][0]) // max(rows, 1), cols * BITS[code]
    at, end = first * bits // 8, ((first + count) * bits + 7) // 8
    scales, codes = ([s[first * size : (first + count) * size] for s, _ in split] if size else []), [c[at:end] for _, c in split]
    if count * bits % 8:  # the last byte is not full
        parts = zip(scales, codes, strict=True) if size else ((c,) for c in codes)
        return torch.stack([decode(code, torch.cat(part), count, cols) for part in parts])
    return decode(code, torch.cat(scales + codes), len(split) * count, cols).view(len(split), count, cols)


def split_bytes(code: str, data: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """The bytes of the scales of coded rows, and those of the codes."""
    scales = 2 * rows * -(-cols // GROUP[code]) * _scales(code) if code in GROUP else 0
    return data[:scales], data[scales:]


def _write(out: Tensor, found: Tensor, alpha: float | None) -> None:
    if alpha is None:
        out.copy_(found)
    else:
        out.add_(found, alpha=alpha)


def _scales(code: str) -> int:
    return 2 if code == "2bit" else 1


def _chunks(code: str, data: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views that belong together: rows [n, cols] of v [rows, cols], their scales [n, groups, 1 or 2] bf16 and codes uint8 in `data`."""
    rows, cols = v.shape
    if not v.numel():
        return
    if cols % GROUP[code] == 0:  # as rows of one group the same bytes: also a long row is done in chunks
        rows, cols = v.numel() // GROUP[code], GROUP[code]
    v, groups = v.reshape(rows, cols), -(-cols // GROUP[code])
    scales = data[: 2 * rows * groups * _scales(code)].view(torch.bfloat16).view(rows, groups, -1)
    codes = data[scales.numel() * 2 :]
    step = max(8, (CHUNK if v.device.type == "cpu" else CHUNK_GPU) // cols // 8 * 8)  # eight rows are whole bytes
    width = step * cols * BITS[code] // 8
    for i, start in enumerate(range(0, rows, step)):
        yield v[start : start + step], scales[start : start + step], codes[i * width : (i + 1) * width]


def _groups(code: str, part: Tensor) -> list[Tensor]:
    """Views of rows [n, cols] as groups [n, number, size]: the whole ones, and the shorter last one of each row."""
    size = min(GROUP[code], part.shape[1])
    whole = part.shape[1] // size * size
    last = [part[:, whole:].unsqueeze(1)] if whole < part.shape[1] else []
    return [part[:, :whole].unflatten(1, (-1, size)), *last]


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [n] below 2^bits as uint8 [ceil(n * bits / 8)]: neighbours are joined until they fill a byte."""
    codes = F.pad(codes, (0, -codes.numel() % (8 // bits)))
    while bits < 8:
        pairs = codes.view(torch.int16)  # the first of the two in the low byte
        codes, bits = (pairs | pairs >> 8 - bits).to(torch.uint8), 2 * bits
    return codes


def _unpack(data: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack`: uint8 [n * 8 / bits], the last ones may be padding."""
    half = 4
    while bits <= half:
        pairs = data.to(torch.int16)
        data, half = ((pairs | pairs << 8 - half) & ((1 << half) - 1) * 257).view(torch.uint8), half // 2
    return data


def _encode(code: str, v: Tensor) -> tuple[Tensor, Tensor]:
    """Scales bf16 [n, groups, 1 or 2] and codes uint8 [n, groups, size] of values fp32 [n, groups, size]."""
    if code == "2bit":
        return _encode_2bit(v)
    size = v.abs()
    top = size.amax(-1, keepdim=True)
    scale = (top / torch.full_like(top, LARGEST[code])).to(torch.bfloat16)  # a tensor: CUDA would multiply by a scalar's reciprocal
    step = scale.float().masked_fill(scale == 0, torch.inf)  # an empty group: 0 / inf = 0
    if code in MAGNITUDES:
        return scale, _nearest(code, v, size.div_(step))
    q = torch.div(v, step, out=size).round_().clamp_(-LARGEST[code], LARGEST[code]).nan_to_num_(0.0).to(torch.int8).view(torch.uint8)
    return scale, q if code == "int8" else q & 15


def _nearest(code: str, v: Tensor, size: Tensor) -> Tensor:
    """fp4 codes (uint8): the sign of v and the magnitude nearest to size, which is |v| in units of the scale (NaN: that of 0).

    From magnitude to magnitude the code rises by one, by less and less per unit: so it is the least of some straight lines, each rounded.
    """
    nearest, line = torch.full_like(size, 7), torch.empty_like(size)
    for slope, start in LINES[code]:
        torch.minimum(nearest, torch.mul(size, slope, out=line).round_().add_(start), out=nearest)
    return nearest.nan_to_num_(0.0).to(torch.uint8).bitwise_or_((v.view(torch.int32) >> 28 & 8).to(torch.uint8))


def _encode_2bit(v: Tensor) -> tuple[Tensor, Tensor]:
    """`_encode` with two levels instead of a scale."""
    size = v.abs()
    count = torch.full_like(size[..., :1], v.shape[-1])
    threshold = _sum(size) / count
    high = (size >= threshold).float()
    upper, high_count = size * high, high.sum(-1, keepdim=True)
    sums = torch.cat([_sum(size - upper), _sum(upper)], -1)
    levels = sums / torch.cat([count - high_count, high_count], -1).clamp_min_(1)
    levels = torch.where(threshold.isfinite(), levels, torch.nan)
    return levels.to(torch.bfloat16), (v.view(torch.int32) >> 30 & 2).to(torch.uint8).add_(high.to(torch.uint8))


def _sum(v: Tensor) -> Tensor:
    """Sums fp32 [..., 1] over the last dimension, padded by zeros to a power of two and folded in halves: one order on every device."""
    v = F.pad(v, (0, (1 << (v.shape[-1] - 1).bit_length()) - v.shape[-1]))
    while v.shape[-1] > 1:
        v = torch.add(*v.chunk(2, -1))
    return v


@cache
def _table(code: str, device: torch.device) -> Tensor:
    """What each of the 16 codes of an fp4 code stands for, in units of the scale (fp32)."""
    return torch.tensor([*MAGNITUDES[code], *(-m for m in MAGNITUDES[code])]).to(device)


def _decode(code: str, scales: Tensor, q: Tensor) -> Tensor:
    """The inverse of `_encode`: fp32 [n, groups, size] from scales in fp32."""
    if code in ("int8", "int4"):
        signed = q if code == "int8" else (q ^ 8) - 8
        return signed.view(torch.int8).float().mul_(scales)
    if code in MAGNITUDES:
        return _table(code, q.device).index_select(0, q.int().view(-1)).view(q.shape).mul_(scales)
    levels = torch.cat([scales, -scales], -1)  # of each group, by code
    start = torch.arange(0, levels.numel(), 4, dtype=torch.int32, device=q.device).view(*q.shape[:2], 1)
    return levels.view(-1).index_select(0, (q + start).view(-1)).view(q.shape)
