"""Values on the wire: bf16 by its bits, codes of 8, 4, 2 and 1 bits with bf16 scales per group; one
value at a time, exact fractions.

Only two things are fp32's: the quotient of a value and its scale, and the sums behind the two
levels of 2bit and the one of 1bit, which are folded in halves.
"""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import torch


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


def half_even(value: Fraction) -> int:
    """The nearest integer, halves to the even one (Python's round does just that)."""
    return round(value)


def int8(values: torch.Tensor) -> tuple[float, list[int]]:
    """(scale, codes) of the selected values of one block.

    scale = bf16(max|v| / 127); code = round-half-even(v / scale), clamped to +-127; both quotients
    are fp32's. An all-zero block has scale 0 and codes 0.
    """
    v = values.float().reshape(-1).numpy()
    scale = bf16(float(np.float32(np.abs(v).max(initial=0.0)) / np.float32(127)))
    if scale == 0:
        return 0.0, [0] * len(v)
    return scale, [
        max(-127, min(127, half_even(Fraction(float(x / np.float32(scale)))))) for x in v
    ]


def cut(values: torch.Tensor, code: str) -> list[torch.Tensor]:
    """One row as groups of consecutive values that share a scale; the last may be shorter."""
    size = {"int8": 4096, "int4": 256, "fp4_e3m0": 4096, "fp4_e2m1": 32, "2bit": 256}.get(
        code, 4096
    )
    row = values.float().reshape(-1)
    return [row[i : i + size] for i in range(0, len(row), size)]


def int4(values: torch.Tensor) -> tuple[float, list[int]]:
    """(scale, codes) of a group: as int8, with 7 for 127."""
    v = values.float().reshape(-1).numpy()
    scale = bf16(float(np.float32(np.abs(v).max(initial=0.0)) / np.float32(7)))
    if scale == 0:
        return 0.0, [0] * len(v)
    return scale, [max(-7, min(7, half_even(Fraction(float(x / np.float32(scale)))))) for x in v]


MAGNITUDES = {
    "fp4_e3m0": [Fraction(0)] + [Fraction(1, 2 ** (7 - e)) for e in range(1, 8)],
    "fp4_e2m1": [Fraction(m, 2) for m in (0, 1, 2, 3, 4, 6, 8, 12)],
}


def fp4(values: torch.Tensor, code: str) -> tuple[float, list[tuple[int, int]]]:
    """(scale, (sign bit, magnitude code) of each value) of a group; scale = bf16(max|v| / largest
    magnitude).

    The magnitude nearest to |v| / scale; of two equally near ones that which is an even multiple of
    their distance.
    """
    v = values.float().reshape(-1).numpy()
    magnitudes = MAGNITUDES[code]
    scale = bf16(float(np.float32(np.abs(v).max(initial=0.0)) / np.float32(magnitudes[-1])))
    out = []
    for x in v:
        size = Fraction(float(abs(x) / np.float32(scale))) if scale else Fraction(0)
        best = 0
        for m in range(1, 8):
            old, new = abs(size - magnitudes[best]), abs(size - magnitudes[m])
            if new < old or (
                new == old and magnitudes[m] / (magnitudes[m] - magnitudes[best]) % 2 == 0
            ):
                best = m
        out.append((int(np.signbit(x)), best))
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
    if code in MAGNITUDES:
        scale, pairs = fp4(group, code)
        return [scale], [8 * sign + magnitude for sign, magnitude in pairs]
    scale, codes = (int8 if code == "int8" else int4)(group)
    return [scale], [q % (256 if code == "int8" else 16) for q in codes]


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
    bits = {"int8": 8, "2bit": 2, "1bit": 1}.get(code, 4)
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
        if code in ("int8", "int4"):
            scale, codes = (int8 if code == "int8" else int4)(group)
            out += [q * scale for q in codes]
        elif code in MAGNITUDES:
            scale, pairs = fp4(group, code)
            out += [
                (-1.0 if sign else 1.0) * float(MAGNITUDES[code][m]) * scale for sign, m in pairs
            ]
        elif code == "2bit":
            levels, pairs = two_bit(group)
            out += [(-1.0 if sign else 1.0) * levels[high] for sign, high in pairs]
        elif code == "1bit":
            mean, signs = one_bit(group)
            out += [(-1.0 if sign else 1.0) * mean for sign in signs]
    return torch.tensor(out, dtype=torch.float32).reshape(values.shape)
