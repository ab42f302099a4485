"""Whole multiples of a scale that a group of values shares: int8, int4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Integer:
    """Two's complement of 8 or 4 bits; `largest` is the largest magnitude in units of the scale.
    See `formats.Coder`.
    """

    largest: float

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `formats.Coder.encode`."""
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
        """See `formats.Coder.decode`."""
        signed = q if self.largest > 7 else (q ^ 8) - 8
        return signed.view(torch.int8).float().mul_(scales)


def scales(v: Tensor, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """The scale (bf16 [n, groups, 1]) by which the largest magnitude of a group becomes `largest`;
    what to divide by (fp32, the scale, or infinity in a group of zeros); and the magnitudes
    (fp32, the shape of v), the caller's to use up."""
    size = v.abs()
    top = size.amax(-1, keepdim=True)
    # a tensor: CUDA would multiply by a scalar's reciprocal
    scale = (top / torch.full_like(top, largest)).to(torch.bfloat16)
    # an empty group: 0 / inf = 0
    return scale, scale.float().masked_fill(scale == 0, torch.inf), size
