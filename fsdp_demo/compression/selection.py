"""What chooses the coefficients of a block that are sent. Who it is that chooses is a fact of the
configuration (`config/names.py`).

A new selection is a function in a file of its own, a line in `config/names.py` and a line here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .seeded import random, stride
from .topk import top_k

BY_DATA: dict[str, Callable[[Tensor, int], Tensor]] = {"topk": top_k}
"""Positions, ascending and distinct (int64 [n, k]), of k elements of each row of fp32 [n, m]; the
same on every device.
"""

BY_STEP: dict[str, Callable[[int, int, int, int, int, torch.device], Tensor]] = {
    "random": random,
    "stride": stride,
}
"""See `seeded`."""

CPU = torch.device("cpu")


def choose(select: str, rows: Tensor, k: int) -> Tensor:
    """Positions that the values themselves choose: int64 [n, k], ascending and distinct, of fp32
    [n, m].
    """
    return BY_DATA[select](rows, k)


def seeded(
    select: str, size: int, k: int, count: int, number: int, seed: int, device: torch.device = CPU
) -> Tensor:
    """Positions that exchange `number` = 0, 1, ... sends of `count` blocks of `size` coefficients,
    k of each: int64 [count, k] on `device`, a pure function of the other arguments."""
    return BY_STEP[select](size, k, count, number, seed, device)
