"""Selections: which coefficients of a block are sent. They are chosen by their values
(`BY_DATA`), or by the number of the exchange alone (`BY_STEP`).

A new selection is a function here or in a file of its own, a line in `config/names.py` and a line
in `BY_DATA` or `BY_STEP`.

A selection by number has passes: ceil(size / k) consecutive exchanges, from a multiple of that
number on, send every coefficient of every block at least once. (The published Striding repeats the
same ones where k divides the size. The published Random draws anew each time and misses a share of
exp(-1) of them in a pass.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from ..config.parts import BLOCK
from .windows import upload

# ---- the largest coefficients of a block -------------------------------------------------------

try:
    from . import _kernels  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # built without a C compiler
    _kernels = None  # type: ignore[assignment, unused-ignore]

log = logging.getLogger("fsdp_demo")

MOST = 256
"""As many of a block `_kernels.c` selects at most."""
_SAID: list[bool] = []


def top_k(a: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes of each row, ascending; ties go to the lower position,
    NaN is the largest.

    Args:
        a: [n, m] fp32.
        k: 1 <= k <= m.

    Returns:
        int64 [n, k], the same on every device. Nothing that depends on the data decides what is
        done, so that no device has to be waited for.
    """
    n, m = a.shape
    if k >= m:
        return torch.arange(m, device=a.device).expand(n, m)
    if m < BLOCK:
        return _exact(a, k)
    if a.device.type != "cpu":
        return _grouped(a, k) if k <= 128 else _exact(a, k)
    return _in_c(a, k) if _kernels is not None and k <= MOST and a.is_contiguous() else _exact(a, k)


def _in_c(a: Tensor, k: int) -> Tensor:
    """`top_k` of contiguous blocks fp32 [n, 4096] on a CPU and 1 <= k <= MOST."""
    out = torch.empty(len(a), k, dtype=torch.int64, device="cpu")
    _kernels.top_k(a.data_ptr(), len(a), k, out.data_ptr())
    return out


def say_what_selects() -> None:
    """Log, once in a process, where the extension module is missing."""
    if _kernels is None and not _SAID:
        _SAID.append(True)
        log.info(
            "compression on this CPU selects by torch, with the same result and more slowly: the "
            "package was built without a C compiler or Python's headers"
        )


def magnitudes(a: Tensor) -> Tensor:
    """Magnitudes as int32, in the same order."""
    return a.view(torch.int32) & 0x7FFFFFFF


def _best(magnitude: Tensor, index: Tensor, k: int) -> Tensor:
    """Those of `index` (int64 below 4096) with the k largest magnitudes (int32) of each row, in any
    order; ties go to the lower index.
    """
    # distinct, smaller for a larger magnitude, then for a lower index, which is their last 12 bits
    keys = torch.sub(index, magnitude, alpha=4096)
    return torch.topk(keys, k, dim=1, largest=False, sorted=False).values.bitwise_and_(4095)


def _exact(a: Tensor, k: int) -> Tensor:
    """Top k of rows of any length up to 4096."""
    index = torch.arange(a.shape[1], device=a.device)
    return _best(magnitudes(a.contiguous()), index, k).sort(1).values


def _grouped(a: Tensor, k: int) -> Tensor:
    """Top k of blocks: they lie in the k groups of 16 rows of a column whose first largest element
    is among the k best of all groups. Keys are made of these and of the candidates alone, so that
    few bytes move.
    """
    n, index = len(a), torch.arange(BLOCK, device=a.device)
    magnitude = magnitudes(a.contiguous())
    most, row = magnitude.view(n, 4, 16, 64).max(2)  # of equal ones the first
    first = row.mul_(64).add_(index.view(4, 16, 64)[:, 0])
    found = _best(most.view(n, 256), first.view(n, 256), k)  # an element of each group
    start = (found & 0b110000000000).bitwise_or_(found & 63)
    place = (start[:, :, None] + index[:1024:64]).view(n, -1)
    return _best(magnitude.gather(1, place), place, k).sort(1).values


def random(size: int, k: int, count: int, number: int, seed: int, device: torch.device) -> Tensor:
    """Positions int64 [count, k] as `seeded` describes: one permutation per pass, of which each
    exchange takes the next k; every block's is shifted by an offset of its own.
    """
    pass_, turn = divmod(number, ceil(size / k))
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + pass_) * 4099 + size) % 2**63)
    order = torch.randperm(size, generator=generator, device="cpu")
    shift = torch.randint(size, (count, 1), generator=generator, device="cpu")
    return (
        upload(order[(turn * k + torch.arange(k, device="cpu")) % size], device)
        + upload(shift, device)
    ) % size


def stride(size: int, k: int, count: int, number: int, seed: int, device: torch.device) -> Tensor:
    """Positions int64 [count, k] as `seeded` says: floor(j size / k) + i for the i-th exchange."""
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
"""Positions that the number of the exchange chooses, with the arguments of `seeded`."""

CPU = torch.device("cpu")


def seeded(
    select: str, size: int, k: int, count: int, number: int, seed: int, device: torch.device = CPU
) -> Tensor:
    """The positions that a selection of `BY_STEP` chooses: int64 [count, k] on `device`.

    Args:
        select: name of the selection.
        size, k: coefficients of a block, and those of them that are sent.
        count: number of blocks.
        number: 0, 1, ...: number of the exchange.
        seed: seed of the configuration, the same on all replicas.
    """
    return BY_STEP[select](size, k, count, number, seed, device)
