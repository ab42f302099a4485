"""What chooses the coefficients of a block that are sent: their values, or the number of the
exchange alone. Who it is that chooses is a fact of the configuration (`config/names.py`).

A new selection is a function here or in a file of its own, a line in `config/names.py` and a line
in `BY_DATA` or `BY_STEP`.

Of those by number ceil(size / k) consecutive exchanges from a multiple of that number on are a
pass, which sends every coefficient of every block at least once (the published Striding repeats the
same ones where k divides the size; drawing anew each time, as the published Random does, misses a
share of exp(-1) of them in a pass).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from .staging import upload
from .topk import top_k


def random(size: int, k: int, count: int, number: int, seed: int, device: torch.device) -> Tensor:
    """One permutation per pass, of which each exchange takes the next k; every block's is shifted
    by an offset of its own. See `seeded`."""
    pass_, turn = divmod(number, ceil(size / k))
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + pass_) * 4099 + size) % 2**63)
    order = torch.randperm(size, generator=generator, device="cpu")
    shift = torch.randint(size, (count, 1), generator=generator, device="cpu")
    return (
        upload(order[(turn * k + torch.arange(k, device="cpu")) % size], device)
        + upload(shift, device)
    ) % size


def stride(size: int, k: int, count: int, number: int, seed: int, device: torch.device) -> Tensor:
    """floor(j size / k) + i for the i-th exchange of a pass, the same in every block. See
    `selection.seeded`.
    """
    return upload(
        (torch.arange(k, device="cpu") * size // k + number % ceil(size / k)) % size, device
    ).expand(count, k)


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
