"""Which coefficients of a block are sent: the largest, or those that all replicas compute from the number of the exchange."""

from __future__ import annotations

from math import ceil

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


def seeded(select: str, size: int, k: int, count: int, number: int, seed: int) -> Tensor:
    """Positions that "random" and "stride" send in exchange `number` = 0, 1, ... of `count` blocks of `size` coefficients, k of each.

    int64 [count, k] on the CPU, a pure function of the arguments. ceil(size / k) consecutive exchanges from a multiple of that number on
    are a pass, which sends every coefficient of every block at least once (the published Striding repeats the same ones where k divides the
    size; drawing anew each time, as the published Random does, misses a share of exp(-1) of them in a pass).

    random: one permutation per pass, of which each exchange takes the next k; every block's is shifted by an offset of its own.
    stride: floor(j size / k) + i for the i-th exchange of a pass.
    """
    length = ceil(size / k)
    pass_, turn = divmod(number, length)
    steps = torch.arange(k)
    if select == "stride":
        return ((steps * size // k + turn) % size).expand(count, k)
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + pass_) * 4099 + size) % 2**63)
    order = torch.randperm(size, generator=generator)
    shift = torch.randint(size, (count, 1), generator=generator)
    return (order[(turn * k + steps) % size] + shift) % size
