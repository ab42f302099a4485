"""Which coefficients of a block are sent."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(a: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes of each row, ascending; ties go to the lower position.

    Args:
        a: [n, m] floats.
        k: 1 <= k <= m.

    Returns:
        int64 [n, k]. The same on every device: torch.topk leaves ties open, so rows that have one at the threshold (blocks of
        zeros above all) are sorted again, stably.
    """
    n, m = a.shape
    if k >= m:
        return torch.arange(m, device=a.device).expand(n, m)
    magnitude = a.abs()
    values, index = torch.topk(magnitude, k, dim=1, sorted=False)
    tied = (magnitude >= values.amin(1, keepdim=True)).sum(1) != k
    if tied.any():  # one device synchronisation per exchange, next to the copy of the payload
        index[tied] = torch.sort(magnitude[tied], dim=1, descending=True, stable=True).indices[:, :k]
    return index.sort(1).values
