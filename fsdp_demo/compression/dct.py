"""The orthonormal DCT-II, as a matrix. `transform.py` applies it to blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dct_matrix(n: int) -> Tensor:
    """The n-point orthonormal DCT-II as a matrix fp64 [n, n].

    D[k, i] = sqrt(2 / n) cos(pi (i + 1/2) k / n), the first row divided by sqrt(2) (Ahmed,
    Natarajan, Rao 1974).
    """
    k = torch.arange(n, dtype=torch.float64, device="cpu")[:, None]
    i = torch.arange(n, dtype=torch.float64, device="cpu")[None]
    d = torch.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2.0 / n)
    d[0] /= math.sqrt(2.0)
    return d
