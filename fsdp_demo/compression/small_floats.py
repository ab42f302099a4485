"""Floats of 4 bits in units of a scale that a group of values shares: a sign and one of eight
magnitudes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .integers import scales


@dataclass(frozen=True)
class SmallFloat:
    """Eight magnitudes and a sign, the highest bit. See `formats.Coder`.

    Attributes:
        magnitudes: in units of the scale, ascending, the first is 0.
        lines: (slope, start): from magnitude to magnitude the code rises by one, by less and less
            per unit, so it is the least of some straight lines slope * magnitude + start, each
            rounded.
    """

    magnitudes: tuple[float, ...]
    lines: tuple[tuple[float, int], ...]

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return self.magnitudes[-1]

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `formats.Coder.encode`."""
        scale, step, size = scales(v, self.largest)
        return scale, self._nearest(v, size.div_(step))

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        """See `formats.Coder.decode`."""
        return (
            table(self.magnitudes, q.device)
            .index_select(0, q.int().view(-1))
            .view(q.shape)
            .mul_(scales)
        )

    def _nearest(self, v: Tensor, size: Tensor) -> Tensor:
        """Codes (uint8): the sign of v and the magnitude nearest to size, which is |v| in units of
        the scale (NaN: that of 0).
        """
        nearest, line = torch.full_like(size, 7), torch.empty_like(size)
        for slope, start in self.lines:
            torch.minimum(
                nearest, torch.mul(size, slope, out=line).round_().add_(start), out=nearest
            )
        return (
            nearest.nan_to_num_(0.0)
            .to(torch.uint8)
            .bitwise_or_((v.view(torch.int32) >> 28 & 8).to(torch.uint8))
        )


@cache
def table(magnitudes: tuple[float, ...], device: torch.device) -> Tensor:
    """What each of the 16 codes stands for, in units of the scale (fp32)."""
    return torch.tensor(
        [*magnitudes, *(-m for m in magnitudes)], dtype=torch.float32, device="cpu"
    ).to(device)


E3M0 = SmallFloat(
    (0.0, *(2.0**e for e in range(-6, 1))),
    ((64.0, 0), (32.0, 1), (16.0, 2), (8.0, 3), (4.0, 4), (2.0, 5)),
)
E2M1 = SmallFloat((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), ((2.0, 0), (1.0, 2), (0.5, 4)))
