"""Values on the wire: the number formats of docs/wire-format.md, one value at a time, in exact
fractions.

Only two things are fp32's: the quotient of a value and its scale, and the sums behind the two
levels of 2bit and the one of 1bit, which are folded in halves.
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch


@dataclass(frozen=True)
class Format:
    """A number format, with the numbers of its row in docs/wire-format.md.

    Attributes:
        bits: bits of one value.
        group: number of consecutive values that share scales; 0: there are none.
        error: (a, b); the error of a value v is at most the larger of a |v| and b scales. That of
            2bit and 1bit stands in `bound`.
        magnitudes: what |v| / scale may become, ascending from 0; the code is the place in this
            list. Of two equally near ones that is taken which is an even multiple of their
            distance. Empty: a value is itself or a level.
        complement: whether the sign is two's complement; if not, it is the highest bit.
    """

    bits: int
    group: int
    error: tuple[float, float] = (0.0, 0.0)
    magnitudes: tuple[Fraction, ...] = ()
    complement: bool = False


def multiples(unit: Fraction, *numbers: int) -> tuple[Fraction, ...]:
    """Magnitudes: a unit times each number."""
    return tuple(unit * n for n in numbers)


FORMATS = {
    "fp32": Format(32, 0),
    "bf16": Format(16, 0, (2.0**-8, 0.0)),
    "int8": Format(8, 4096, (0.0, 1 / 2), multiples(Fraction(1), *range(128)), complement=True),
    "int4": Format(4, 256, (0.0, 1 / 2), multiples(Fraction(1), *range(8)), complement=True),
    "fp4_e3m0": Format(
        4, 4096, (1 / 3, 1 / 128), multiples(Fraction(1, 64), 0, 1, 2, 4, 8, 16, 32, 64)
    ),
    "fp4_e2m1": Format(4, 32, (1 / 5, 1 / 4), multiples(Fraction(1, 2), 0, 1, 2, 3, 4, 6, 8, 12)),
    "2bit": Format(2, 256),
    "1bit": Format(1, 4096),
}


def bf16(value: float) -> float:
    """The bf16 number nearest to an fp32 value, ties to the one with an even last bit."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low, high = bits & 0xFFFF, bits >> 16
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return float("nan")
    if low > 0x8000 or (low == 0x8000 and high & 1):
        high += 1
    return float(struct.unpack("<f", struct.pack("<I", high << 16))[0])


def bf16_all(values: torch.Tensor) -> torch.Tensor:
    """`bf16` of every element of a float32 tensor."""
    flat = [bf16(v) for v in values.float().reshape(-1).tolist()]
    return torch.tensor(flat, dtype=torch.float32).reshape(values.shape)


def cut(values: torch.Tensor, code: str) -> list[torch.Tensor]:
    """One row as groups of consecutive values that share a scale; the last may be shorter."""
    row, size = values.float().reshape(-1), FORMATS[code].group
    return [row[i : i + size] for i in range(0, len(row), size)]


def scale_of(largest: float, code: str) -> float:
    """The scale of a group whose largest |v| is given: by it that becomes the largest magnitude."""
    return bf16(float(np.float32(largest) / np.float32(FORMATS[code].magnitudes[-1])))


def scaled(values: torch.Tensor, code: str) -> tuple[float, list[tuple[int, int]]]:
    """(scale, (sign bit, place of the nearest magnitude) of each value) of a group."""
    v, magnitudes = values.float().reshape(-1).numpy(), FORMATS[code].magnitudes
    scale = scale_of(np.abs(v).max(initial=0.0), code)
    out = []
    for x in v:
        size = Fraction(float(abs(x) / np.float32(scale))) if scale else Fraction(0)
        above = min(bisect.bisect(magnitudes, size), len(magnitudes) - 1)
        low, high = magnitudes[above - 1], magnitudes[above]
        near = size - low, high - size
        up = near[0] > near[1] or (near[0] == near[1] and high / (high - low) % 2 == 0)
        out.append((int(np.signbit(x)), above if up else above - 1))
    return scale, out


def fold(numbers: list[np.float32]) -> np.float32:
    """The fp32 sum by halves: padded with zeros to a power of two, the second half is added to the
    first until one number is left.
    """
    numbers = list(numbers)
    while len(numbers) & (len(numbers) - 1):
        numbers.append(np.float32(0))
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [numbers[i] + numbers[half + i] for i in range(half)]
    return numbers[0]


def two_bit(values: torch.Tensor) -> tuple[tuple[float, float], list[tuple[int, int]]]:
    """((low, high), (sign bit, 1 if high) of each value) of a group.

    The threshold is the mean of |v|; the levels are the bf16 means of the |v| below it, and of the
    others; no values, level 0.
    """
    v = values.float().reshape(-1).numpy()
    threshold = fold([abs(x) for x in v]) / np.float32(len(v))
    levels = []
    # the places of a class's values count in the order of the sum, the others are zeros
    for wanted in (False, True):
        its = [abs(x) if (abs(x) >= threshold) == wanted else np.float32(0) for x in v]
        count = sum((abs(x) >= threshold) == wanted for x in v)
        levels.append(bf16(float(fold(its) / np.float32(max(count, 1)))))
    return (levels[0], levels[1]), [(int(np.signbit(x)), int(abs(x) >= threshold)) for x in v]


def one_bit(values: torch.Tensor) -> tuple[float, list[int]]:
    """(the bf16 mean of |v|, the sign bit of each value) of a group."""
    v = values.float().reshape(-1).numpy()
    mean = fold([abs(x) for x in v]) / np.float32(len(v))
    return bf16(float(mean)), [int(np.signbit(x)) for x in v]


def scales_and_codes(group: torch.Tensor, code: str) -> tuple[list[float], list[int]]:
    """The scales of a group and the codes of its values as they stand in the bytes (unsigned)."""
    if code == "2bit":
        levels, pairs = two_bit(group)
        return list(levels), [2 * sign + high for sign, high in pairs]
    if code == "1bit":
        mean, signs = one_bit(group)
        return [mean], signs
    form = FORMATS[code]
    scale, pairs = scaled(group, code)
    if form.complement:
        return [scale], [(-m if sign else m) % 2**form.bits for sign, m in pairs]
    return [scale], [2 ** (form.bits - 1) * sign + m for sign, m in pairs]


def encoded(rows: torch.Tensor, code: str) -> bytes:
    """The bytes of values [rows, cols]: all scales, then all codes, the first of a byte in its
    lowest bits.
    """
    if code == "fp32":
        return b"".join(struct.pack("<f", v) for v in rows.reshape(-1).tolist())
    if code == "bf16":
        return b"".join(struct.pack("<f", bf16(v))[2:] for v in rows.reshape(-1).tolist())
    scales, codes = [], []
    for row in rows:
        for group in cut(row, code):
            s, q = scales_and_codes(group, code)
            scales += s
            codes += q
    bits = FORMATS[code].bits
    # little-endian: all codes are one long number
    number = sum(q << (bits * i) for i, q in enumerate(codes))
    return b"".join(struct.pack("<f", s)[2:] for s in scales) + number.to_bytes(
        (bits * len(codes) + 7) // 8, "little"
    )


def dequantised(values: torch.Tensor, code: str) -> torch.Tensor:
    """What the receivers make of the selected values of one block, or of one row (float32, same
    shape).
    """
    values = values.float()
    if code == "fp32":
        return values.clone()
    if code == "bf16":
        return bf16_all(values)
    out: list[float] = []
    for group in cut(values, code):
        if code == "2bit":
            levels, pairs = two_bit(group)
            out += [(-1.0 if sign else 1.0) * levels[high] for sign, high in pairs]
        elif code == "1bit":
            mean, signs = one_bit(group)
            out += [(-1.0 if sign else 1.0) * mean for sign in signs]
        else:
            form = FORMATS[code]
            scale, pairs = scaled(group, code)
            for sign, m in pairs:
                size = float(form.magnitudes[m]) * scale
                # two's complement has no negative zero
                out.append(-size if sign and not (form.complement and m == 0) else size)
    return torch.tensor(out, dtype=torch.float32).reshape(values.shape)


def bound(group: torch.Tensor, code: str) -> torch.Tensor:
    """The largest error of each value of one group (float64), as docs/wire-format.md has it."""
    size, (relative, absolute) = group.double().abs(), FORMATS[code].error
    if not FORMATS[code].group:
        return relative * size
    top, slack = float(size.max()), 1 + 2.0**-16
    if not FORMATS[code].magnitudes:
        mean = float(size.mean())
        return torch.full_like(size, (max(mean, top - mean) + 2.0**-8 * top) * slack)
    return (relative * size).clamp_min(absolute * scale_of(top, code)) * slack
