"""The packing of positions up to wire version 3, 12 bits each: what the form of today is measured
against (`benchmarks/positions.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
