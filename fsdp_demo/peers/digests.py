"""Digests of what must be equal on all replicas: a hash of tensors, and a 64-bit sum that is cheap
enough to be compared now and then and is read on no device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .header import memory

EVERY = 50
"""Steps between two comparisons, at least. A sum takes about as long as reading the tensors once; a
step takes hundreds of times that.
"""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements at a time: torch makes a 64-bit copy of what it adds up on a CPU


def total(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The bits of `tensors` as whole numbers of the size of their elements, added up modulo 2^64:
    int64 scalar on `device`.
    """
    sums = [
        piece.view(_WORDS[t.element_size()]).sum(dtype=torch.int64)
        for t in tensors
        for piece in t.detach().contiguous().view(-1).split(_PIECE)
        if t.numel()
    ]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=device)


def sums(tensors: Sequence[Tensor | None], device: torch.device) -> list[int]:
    """`total` of each tensor, 0 for None; read from `device` in one go."""
    each = [total([] if t is None else [t], device) for t in tensors]
    return list(torch.stack(each).cpu().tolist()) if each else []


def odd_ones(totals: Sequence[int | None]) -> list[int]:
    """Which of the replicas' sums are not what more than half of them say; all, where no sum has so
    many. None: not compared.

    Example:
        >>> from fsdp_demo.peers.digests import odd_ones
        >>> odd_ones([7, 7, 9]), odd_ones([7, 9]), odd_ones([7, None])
        ([2], [0, 1], [])
    """
    known = [t for t in totals if t is not None]
    if len(set(known)) < 2:
        return []
    most = max(set(known), key=known.count)
    sure = 2 * known.count(most) > len(known)
    return [j for j, t in enumerate(totals) if t is not None and (t != most or not sure)]


def digest(tensors: Sequence[Tensor | None]) -> bytes:
    """16 bytes of BLAKE2b over the raw memory of tensors."""
    h = hashlib.blake2b(digest_size=16)
    for t in tensors:
        if t is not None and t.numel():
            h.update(memory(t.detach().cpu().contiguous().view(-1).view(torch.uint8)))
    return h.digest()
