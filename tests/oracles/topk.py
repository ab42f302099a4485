"""Top-k of one block."""

from __future__ import annotations

import math

import torch


def kept(k: int, rows: int, cols: int) -> int:
    """How many coefficients an r x s block sends where a full block sends k: ceil(k r s / 4096)."""
    return math.ceil(k * rows * cols / 4096)


def topk(values: torch.Tensor, k: int) -> list[int]:
    """Positions (row-major, ascending) of the k largest |values|; ties go to the lower position
    (the sort is stable).
    """
    order = torch.sort(values.reshape(-1).abs(), descending=True, stable=True).indices
    return sorted(order[:k].tolist())


def margin(values: torch.Tensor, k: int) -> float:
    """How clear the choice is: (k-th - (k+1)-th largest magnitude) / largest; inf if there was none
    to make.
    """
    flat = torch.sort(values.reshape(-1).abs(), descending=True).values
    if k >= len(flat) or flat[0] == 0:
        return math.inf
    return float((flat[k - 1] - flat[k]) / flat[0])
