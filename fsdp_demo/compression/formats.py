"""Number formats: how values become bytes (groups, scales, packed codes), and come back.

The table of formats, with their bytes, scales and error bounds, is docs/wire-format.md#formats. How
to add one: docs/contributing.md#number-format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.names import FORMATS
from .windows import upload


class Coder(Protocol):
    """A number format whose values share scales: groups of values as scales and codes.

    A group of zeros has scales of 0 and stays zero. A group that is not finite has scales that are
    not, so that all of it is decoded so. The same bytes of finite values on every device: only
    operations that IEEE 754 defines, sums in a fixed order.
    """

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Scales bf16 [n, groups, scales] and codes uint8 [n, groups, size], below 2^bits, of
        values fp32 [n, groups, size].
        """

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        """The inverse of `encode`: fp32 [n, groups, size], from scales in fp32."""


@dataclass(frozen=True)
class Integer(Coder):
    """Whole multiples of a scale that a group of values shares, in two's complement of 8 or 4 bits.

    Attributes:
        largest: the largest magnitude, in units of the scale.
    """

    largest: float

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        scale, step, size = scales(v, self.largest)
        q = (
            torch.div(v, step, out=size)
            .round_()
            .clamp_(-self.largest, self.largest)
            .nan_to_num_(0.0)
            .to(torch.int8)
            .view(torch.uint8)
        )
        return scale, q if self.largest > 7 else q & 15

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        signed = q if self.largest > 7 else (q ^ 8) - 8
        return signed.view(torch.int8).float().mul_(scales)


def scales(v: Tensor, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scales by which the largest magnitude of each group becomes `largest`.

    Returns:
        The scales, bf16 [n, groups, 1]; the divisors, fp32 of the same shape: the scale, or
        infinity in a group of zeros; the magnitudes, fp32 of the shape of v, which the caller may
        overwrite.
    """
    size = v.abs()
    top = size.amax(-1, keepdim=True)
    # a tensor: CUDA would multiply by a scalar's reciprocal
    scale = (top / torch.full_like(top, largest)).to(torch.bfloat16)
    # an empty group: 0 / inf = 0
    return scale, scale.float().masked_fill(scale == 0, torch.inf), size


@dataclass(frozen=True)
class SmallFloat(Coder):
    """Codes of 4 bits: one of eight magnitudes, and a sign as the highest bit.

    Attributes:
        magnitudes: in units of the scale, ascending, the first is 0.
        lines: straight lines (slope, start), by which a magnitude becomes a code: the least of
            slope * magnitude + start, each rounded. The code rises by one from magnitude to
            magnitude, and the magnitudes lie ever further apart, so lines are enough.
    """

    magnitudes: tuple[float, ...]
    lines: tuple[tuple[float, int], ...]

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return self.magnitudes[-1]

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        scale, step, size = scales(v, self.largest)
        return scale, self._nearest(v, size.div_(step))

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        return (
            table(self.magnitudes, q.device)
            .index_select(0, q.int().view(-1))
            .view(q.shape)
            .mul_(scales)
        )

    def _nearest(self, v: Tensor, size: Tensor) -> Tensor:
        """Codes (uint8): the sign of v, the magnitude nearest to size, |v| in scales (NaN: 0)."""
        nearest, line = torch.full_like(size, 7), torch.empty_like(size)
        for slope, start in self.lines:
            by_line = torch.mul(size, slope, out=line).round_().add_(start)
            torch.minimum(nearest, by_line, out=nearest)
        return (
            nearest.nan_to_num_(0.0)
            .to(torch.uint8)
            .bitwise_or_((v.view(torch.int32) >> 28 & 8).to(torch.uint8))
        )


@cache
def table(magnitudes: tuple[float, ...], device: torch.device) -> Tensor:
    """The values of the 16 codes of a `SmallFloat`, in units of the scale: fp32 [16]."""
    return torch.tensor(
        [*magnitudes, *(-m for m in magnitudes)], dtype=torch.float32, device="cpu"
    ).to(device)


E3M0 = SmallFloat(
    (0.0, *(2.0**e for e in range(-6, 1))),
    ((64.0, 0), (32.0, 1), (16.0, 2), (8.0, 3), (4.0, 4), (2.0, 5)),
)
E2M1 = SmallFloat((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), ((2.0, 0), (1.0, 2), (0.5, 4)))


class OneLevel(Coder):
    """Codes of 1 bit: the sign. The scale of a group is the mean of its magnitudes."""

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        mean = _sum(v.abs())
        # a tensor: CUDA would multiply by a scalar's reciprocal
        mean = mean / torch.full_like(mean, v.shape[-1])
        return mean.to(torch.bfloat16), (v.view(torch.int32) >> 31 & 1).to(torch.uint8)

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        return q.float().mul_(-2).add_(1).mul_(scales)


class TwoLevels(Coder):
    """Codes of 2 bits: bit 1 the sign, bit 0 the level, of a group's two levels (its scales)."""

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        size = v.abs()
        count = torch.full_like(size[..., :1], v.shape[-1])
        threshold = _sum(size) / count
        high = (size >= threshold).float()
        upper, high_count = size * high, high.sum(-1, keepdim=True)
        sums = torch.cat([_sum(size - upper), _sum(upper)], -1)
        levels = sums / torch.cat([count - high_count, high_count], -1).clamp_min_(1)
        levels = torch.where(threshold.isfinite(), levels, torch.nan)
        signs = (v.view(torch.int32) >> 30 & 2).to(torch.uint8)
        return levels.to(torch.bfloat16), signs.add_(high.to(torch.uint8))

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        levels = torch.cat([scales, -scales], -1)  # of each group, by code
        start = torch.arange(0, levels.numel(), 4, dtype=torch.int32, device=q.device)
        place = q + start.view(*q.shape[:2], 1)
        return levels.view(-1).index_select(0, place.view(-1)).view(q.shape)


def _sum(v: Tensor) -> Tensor:
    """Sums fp32 [..., 1] over the last dimension, folded in halves: one order on every device."""
    v = F.pad(v, (0, (1 << (v.shape[-1] - 1).bit_length()) - v.shape[-1]))
    while v.shape[-1] > 1:
        v = torch.add(*v.chunk(2, -1))
    return v


EXACT: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
CODERS: dict[str, Coder] = {
    "int8": Integer(127.0),
    "int4": Integer(7.0),
    "fp4_e3m0": E3M0,
    "fp4_e2m1": E2M1,
    "2bit": TwoLevels(),
    "1bit": OneLevel(),
}

# ---- codes in bytes ----------------------------------------------------------------------------

WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""By bits of a code the dtype with as many bytes as a byte holds codes."""
# A product by it brings the bits of each byte of a word next to each other, into its highest byte.
JOINED = {
    bits: sum(1 << 64 // bits - 8 - (8 - bits) * i for i in range(8 // bits)) for bits in WORDS
}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [n] below 2^bits as uint8 [ceil(n * bits / 8)]; unused bits of the last are 0."""
    if bits == 8:
        return codes
    if codes.numel() % (8 // bits):
        codes = F.pad(codes, (0, -codes.numel() % (8 // bits)))
    word = codes.view(WORDS[bits]) * JOINED[bits]
    # the cast drops what the sign has filled
    return word.bitwise_right_shift_(64 // bits - 8).to(torch.uint8)


def unpack(data: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [n * 8 / bits], the last ones may be padding."""
    if bits == 8:
        return data
    if bits == 4:
        pairs = data.to(torch.int16)
        return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    return _codes(bits, data.device).index_select(0, data.to(torch.int32)).view(torch.uint8)


@cache
def _codes(bits: int, device: torch.device) -> Tensor:
    """The codes that each byte holds, as one word [256]."""
    codes = (
        torch.arange(256, device="cpu")[:, None] >> bits * torch.arange(8 // bits, device="cpu")
        & (1 << bits) - 1
    )
    return upload(codes.to(torch.uint8).view(WORDS[bits]).view(-1), device)


def cut(bits: int) -> list[int]:
    """The parts, of 8, 4, 2 and 1 bit, into which numbers of `bits` bits are cut; the lowest first.

    >>> cut(12), cut(7)
    ([8, 4], [4, 2, 1])
    """
    return [part for part in (8, 4, 2, 1) if bits & part]


def low_planes(bits: int, number: Tensor) -> list[Tensor]:
    """The low bits of numbers (int16) in planes."""
    out, low = [], number.to(torch.uint8)
    for part in cut(bits):
        out.append(pack(low & (1 << part) - 1 if part < 8 else low, part))
        low = low >> part if part < 8 else (number >> 8).to(torch.uint8)
    return out


def low_bits(bits: int, planes: list[Tensor], count: int) -> Tensor:
    """The inverse of `low_planes`: int16 [count]."""
    out, at = torch.zeros(0, dtype=torch.float32, device="cpu"), 0
    for part, data in zip(cut(bits), planes, strict=True):
        found = unpack(data, part)[:count].to(torch.int16)
        out, at = out.add_(found.bitwise_left_shift_(at)) if at else found, at + part
    return out


# ---- rows of values as bytes --------------------------------------------------------------------

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
        every = torch.cat([q.flatten(1) for _, q in coded], 1).view(-1)
        codes.copy_(pack(every, FORMATS[code].bits))
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
    its whole group non-finite. out: where to write the values, or, with `alpha`, to add alpha times
    them.
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
    scales = [s[first * size : (first + count) * size] for s, _ in split] if size else []
    codes = [c[at:end] for _, c in split]
    if count * bits % 8:  # the last byte is not full
        parts = zip(scales, codes, strict=True) if size else ((c,) for c in codes)
        return torch.stack([decode(code, torch.cat(part), count, cols) for part in parts])
    found = decode(code, torch.cat(scales + codes), len(split) * count, cols)
    return found.view(len(split), count, cols)


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
    """Views of rows [n, cols] as groups [n, number, size]: whole ones, and the shorter last one."""
    size = min(FORMATS[code].group, part.shape[1])
    whole = part.shape[1] // size * size
    last = [part[:, whole:].unsqueeze(1)] if whole < part.shape[1] else []
    return [part[:, :whole].unflatten(1, (-1, size)), *last]
