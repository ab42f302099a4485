"""Codes of values: fp32, bf16 and int8 with one bf16 scale per block. Encoders return bytes, decoders fp32.

Little-endian; the same bytes on CPU and CUDA. Errors: bf16 at most 2^-9 of the value; int8 at most scale / 2 (plus the rounding of the
scale to bf16, 2^-9 of it) with scale = max |v| / 127 of the block. A zero scale marks an empty block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_bytes(code: str, rows: int, cols: int) -> int:
    """Bytes of `rows` blocks of `cols` values each."""
    return {"fp32": 4 * rows * cols, "bf16": 2 * rows * cols, "int8": (2 + cols) * rows}[code]


def as_bytes(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [numel * itemsize]."""
    return t.contiguous().view(-1).view(torch.uint8)


def encode(code: str, v: Tensor) -> Tensor:
    """Code values [rows, cols] fp32 as uint8 [num_bytes]; int8: all scales, then all values."""
    if code == "fp32":
        return as_bytes(v)
    if code == "bf16":
        return as_bytes(v.to(torch.bfloat16))
    top = v.abs().amax(1, keepdim=True) if v.numel() else v.new_zeros(len(v), 1)
    scale = (top / torch.full_like(top, 127)).to(torch.bfloat16)  # a tensor: CUDA would multiply by a scalar's reciprocal
    step = scale.float()
    q = torch.where(step == 0, 0.0, v / step).round_().clamp_(-127, 127).nan_to_num_(0.0)
    return torch.cat([as_bytes(scale), as_bytes(q.to(torch.int8))])


def decode(code: str, data: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `encode`: fp32 [rows, cols] from uint8 [num_bytes]. A non-finite scale makes its whole block non-finite."""
    data = data.clone()  # a slice of a payload may start at any byte, a view of another dtype may not
    if code == "fp32":
        return data.view(torch.float32).view(rows, cols)
    if code == "bf16":
        return data.view(torch.bfloat16).float().view(rows, cols)
    scale = data[: 2 * rows].view(torch.bfloat16).float().view(rows, 1)
    return scale * data[2 * rows :].view(torch.int8).float().view(rows, cols)
