"""What reaches a threshold, over all blocks of a tensor."""

from __future__ import annotations

import math

import torch


def reached(values: torch.Tensor, most: int) -> float:
    """The magnitude that `most` of the values reach."""
    return sorted(values.abs().reshape(-1).tolist(), reverse=True)[most - 1]


def passing(values: torch.Tensor, most: int, level: float) -> tuple[list[int], float]:
    """Positions (ascending) of the values of a tensor that reach the level, the largest `most` if
    more do, of equal ones the lower positions, zeros never; and how clear the choice is, relative
    to the largest.
    """
    sizes = values.abs().reshape(-1).tolist()
    order = sorted(
        (i for i, v in enumerate(sizes) if v >= level and v > 0), key=lambda i: -sizes[i]
    )
    near = [abs(v - level) for v in sizes if v not in (level, 0.0)]
    if len(order) > most:
        near.append(sizes[order[most - 1]] - sizes[order[most]])
    return sorted(order[:most]), min(near, default=math.inf) / (max(sizes) or 1.0)
