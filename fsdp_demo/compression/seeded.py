"""Coefficients of a block that all replicas compute from the number of the exchange alone.

ceil(size / k) consecutive exchanges from a multiple of that number on are a pass, which sends every
coefficient of every block at least once (the published Striding repeats the same ones where k
divides the size; drawing anew each time, as the published Random does, misses a share of exp(-1) of
them in a pass).
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from .staging import upload


def random(size: int, k: int, count: int, number: int, seed: int, device: torch.device) -> Tensor:
    """One permutation per pass, of which each exchange takes the next k; every block's is shifted
    by an offset of its own. See `selection.seeded`."""
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
