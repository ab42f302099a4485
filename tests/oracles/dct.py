"""The orthonormal DCT-II of a block of any size, as the textbook writes it."""

from __future__ import annotations

import math

import torch


def basis(n: int) -> torch.Tensor:
    """The n x n matrix C with C[u, x] = s(u) cos(pi (2 x + 1) u / (2 n)), s(0) = sqrt(1/n), s(u) =
    sqrt(2/n); float64.
    """
    rows = []
    for u in range(n):
        scale = math.sqrt((1 if u == 0 else 2) / n)
        rows.append([scale * math.cos(math.pi * (2 * x + 1) * u / (2 * n)) for x in range(n)])
    return torch.tensor(rows, dtype=torch.float64)


_bases: dict[int, torch.Tensor] = {}


def _basis(n: int) -> torch.Tensor:
    if n not in _bases:
        _bases[n] = basis(n)
    return _bases[n]


def dct2(block: torch.Tensor) -> torch.Tensor:
    """r x s samples -> r x s coefficients: columns by the r-point transform, rows by the s-point
    one.
    """
    rows, cols = block.shape
    return (_basis(rows) @ block.double() @ _basis(cols).T).to(block.dtype)


def idct2(coefficients: torch.Tensor) -> torch.Tensor:
    """The inverse of `dct2`; the matrices are orthogonal."""
    rows, cols = coefficients.shape
    return (_basis(rows).T @ coefficients.double() @ _basis(cols)).to(coefficients.dtype)


def coefficient(block: torch.Tensor, u: int, v: int) -> float:
    """One coefficient as the double sum of the definition."""
    rows, cols = block.shape
    total = 0.0
    for x in range(rows):
        for y in range(cols):
            total += (
                float(block[x, y])
                * math.cos(math.pi * (2 * x + 1) * u / (2 * rows))
                * math.cos(math.pi * (2 * y + 1) * v / (2 * cols))
            )
    return total * math.sqrt((1 if u == 0 else 2) / rows) * math.sqrt((1 if v == 0 else 2) / cols)
