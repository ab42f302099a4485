"""Values on the wire: bf16 by its bits, int8 with one bf16 scale per block; numpy, one value at a time where it matters."""

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

    scale = bf16(max|v| / 127); code = round-half-even(v / scale), clamped to +-127; both quotients are fp32's.
    An all-zero block has scale 0 and codes 0.
    """
    v = values.float().reshape(-1).numpy()
    scale = bf16(float(np.float32(np.abs(v).max(initial=0.0)) / np.float32(127)))
    if scale == 0:
        return 0.0, [0] * len(v)
    return scale, [max(-127, min(127, half_even(Fraction(float(x / np.float32(scale)))))) for x in v]


def dequantised(values: torch.Tensor, code: str) -> torch.Tensor:
    """What the receivers make of the selected values of one block (float32, same shape)."""
    values = values.float()
    if code == "fp32":
        return values.clone()
    if code == "bf16":
        return bf16_all(values)
    if code == "int8":
        scale, codes = int8(values)
        return (torch.tensor(codes, dtype=torch.float32) * scale).reshape(values.shape)
    raise ValueError(code)
