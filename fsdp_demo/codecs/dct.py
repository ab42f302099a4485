"""Orthonormal DCT-II of the blocks of a workspace, in place, and its inverse.

coefficients = D_r X D_s^T for a block X of r x s elements; D_n is the n-point orthonormal DCT-II matrix,
D_n[k, i] = sqrt(2 / n) cos(pi (i + 1/2) k / n), the first row divided by sqrt(2) (Ahmed, Natarajan, Rao 1974). Edge blocks use their own
r and s, so the padding of their slot stays exactly zero. Orthonormal: the inverse is the transpose, norms are kept.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..blocks import EDGE, Layout

_CHUNK = 1024  # blocks transformed at once: bounds the temporary to 16 MiB


@lru_cache(maxsize=256)
def dct_matrix(n: int, device: torch.device | str = "cpu") -> Tensor:
    """The n-point orthonormal DCT-II as a matrix [n, n], fp32, computed in fp64."""
    k = torch.arange(n, dtype=torch.float64)[:, None]
    i = torch.arange(n, dtype=torch.float64)[None]
    d = torch.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2.0 / n)
    d[0] /= math.sqrt(2.0)
    return d.float().to(device)


def transform(layout: Layout, work: Tensor, inverse: bool = False) -> Tensor:
    """DCT (or inverse) of every block of the groups that are transformed, in place; `work` is the flat fp32 workspace."""
    slots = layout.blocks(work).view(-1, EDGE, EDGE)
    for g in layout.groups:
        if not g.transform:
            continue
        left, right = dct_matrix(g.r, work.device), dct_matrix(g.s, work.device).t()
        if inverse:
            left, right = left.t(), right.t()
        for lo in range(g.start, g.stop, _CHUNK):
            x = slots[lo : min(lo + _CHUNK, g.stop), : g.r, : g.s]
            x.copy_(left @ (x @ right))
    return work
