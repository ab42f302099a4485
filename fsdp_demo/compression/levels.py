"""A sign and a level that a group of values shares: the mean of all magnitudes, in 1 bit, or one of
two, the means of the small magnitudes and of the large ones, in 2 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class OneLevel:
    """The bit is the sign, the scale of a group the mean of its magnitudes. See `formats.Coder`."""

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `formats.Coder.encode`."""
        mean = _sum(v.abs())
        # a tensor: CUDA would multiply by a scalar's reciprocal
        mean = mean / torch.full_like(mean, v.shape[-1])
        return mean.to(torch.bfloat16), (v.view(torch.int32) >> 31 & 1).to(torch.uint8)

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        """See `formats.Coder.decode`."""
        return q.float().mul_(-2).add_(1).mul_(scales)


class TwoLevels:
    """Bit 1 is the sign, bit 0 the level. A group has two scales, the lower level and the upper
    one. See `formats.Coder`.
    """

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `formats.Coder.encode`."""
        size = v.abs()
        count = torch.full_like(size[..., :1], v.shape[-1])
        threshold = _sum(size) / count
        high = (size >= threshold).float()
        upper, high_count = size * high, high.sum(-1, keepdim=True)
        sums = torch.cat([_sum(size - upper), _sum(upper)], -1)
        levels = sums / torch.cat([count - high_count, high_count], -1).clamp_min_(1)
        levels = torch.where(threshold.isfinite(), levels, torch.nan)
        return levels.to(torch.bfloat16), (v.view(torch.int32) >> 30 & 2).to(torch.uint8).add_(
            high.to(torch.uint8)
        )

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        """See `formats.Coder.decode`."""
        levels = torch.cat([scales, -scales], -1)  # of each group, by code
        start = torch.arange(0, levels.numel(), 4, dtype=torch.int32, device=q.device).view(
            *q.shape[:2], 1
        )
        return levels.view(-1).index_select(0, (q + start).view(-1)).view(q.shape)


def _sum(v: Tensor) -> Tensor:
    """Sums fp32 [..., 1] over the last dimension, padded by zeros to a power of two and folded in
    halves: one order on every device.
    """
    v = F.pad(v, (0, (1 << (v.shape[-1] - 1).bit_length()) - v.shape[-1]))
    while v.shape[-1] > 1:
        v = torch.add(*v.chunk(2, -1))
    return v
