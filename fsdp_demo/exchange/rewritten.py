"""Sums of the bits of tensors, and what is seen in them: replicas that are no longer equal, and
parameters of this rank that something else than the optimizer has written (`Rewritten`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..hosts.base import TrainingHost

EVERY = 50
"""Least number of steps between two comparisons over the islands. A sum reads the tensors once; a
step takes hundreds of times as long."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements at a time: torch makes a 64-bit copy of what it adds up on a CPU


def total(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum modulo 2^64 of the bits of all tensors, as whole numbers of their elements' size."""
    sums = [
        piece.view(_WORDS[t.element_size()]).sum(dtype=torch.int64)
        for t in tensors
        for piece in t.detach().contiguous().view(-1).split(_PIECE)
        if t.numel()
    ]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=device)


def word_sum(t: Tensor | None, device: torch.device) -> Tensor:
    """`total` of one tensor, 0 for None, in words of 8 bytes where its size allows that: int64
    scalar. On a CPU that takes an eighth of the time, but it is not what messages hold.
    """
    if t is None or t.numel() * t.element_size() % 8:
        return total([] if t is None else [t], device)
    flat = t.detach().contiguous().view(-1)
    aligned = flat.storage_offset() * flat.element_size() % 8 == 0
    return (flat if aligned else flat.clone()).view(torch.int64).sum()


def sums(tensors: Sequence[Tensor | None], device: torch.device) -> list[int]:
    """`word_sum` of each tensor; read from `device` in one go."""
    each = [word_sum(t, device).to(device) for t in tensors]
    return list(torch.stack(each).cpu().tolist()) if each else []


def odd_ones(totals: Sequence[int | None]) -> list[int]:
    """Indices of the replicas whose sum is not that of more than half of them; all, where no sum
    has a majority. None: not compared.

    >>> odd_ones([7, 7, 9]), odd_ones([7, 9]), odd_ones([7, None])
    ([2], [0, 1], [])
    """
    known = [t for t in totals if t is not None]
    if len(set(known)) < 2:
        return []
    most = max(set(known), key=known.count)
    sure = 2 * known.count(most) > len(known)
    return [j for j, t in enumerate(totals) if t is not None and (t != most or not sure)]


SMALL = 0.1
"""Share of a rank's trained values: who writes more after every step has a copy of them."""


class Rewritten:
    """The check for parameters that are written between an exchange and the step after it by
    something else than the base optimizer: a wrapper around it with its own copy, weight clipping,
    code of the loop.

    The sums of the tensors that an exchange has written, at the end of its step, are compared with
    those ahead of the next step: two passes and one read from the device in a round. Where `SMALL`
    tensors were written, they are looked at after each further step of the round, too.

    Args:
        found_written: `Watch.found_written`, for the name of each tensor found.
    """

    def __init__(self, host: TrainingHost, found_written: Callable[[str, bool], bool]):
        self._host, self._found_written = host, found_written
        self._exchanged: set[int] = set()
        self._again: list[int] = []
        self._looks: list[int] = []
        self._left: Tensor | list[int] | None = None

    def exchanged(self, tensors: Iterable[int]) -> None:
        """Note that an exchange has written these of the host's `params`."""
        self._exchanged.update(tensors)
        self._left, self._again = None, []

    def note(self) -> None:
        """Note the sums at the end of a step, where there is something to look at."""
        self._looks = sorted(self._exchanged) or self._again
        self._exchanged.clear()
        if self._looks:  # nothing is read from a device here
            sums = self._sums()
            self._left = sums.tolist() if sums.device.type == "cpu" else sums

    def compare(self, aside: bool) -> None:
        """Compare, ahead of a step. aside: steps that do not count were taken meanwhile."""
        left, self._left = self._left, None
        if left is None or aside:
            return
        now = self._sums()
        moved = (now != torch.as_tensor(left, device=now.device)).cpu().tolist()
        found = [i for i, other in zip(self._looks, moved, strict=True) if other]
        params, again = self._host.params, self._looks is self._again
        untold = [i for i in found if self._found_written(params[i].name, again)]
        if not again:
            few = sum(math.prod(params[i].shape) for i in found)
            every = sum(math.prod(p.shape) for p in params if not p.frozen)
            self._again = untold if few <= SMALL * every else []

    def forget(self) -> None:
        """Forget the noted sums: parameters were written rightly, or the run begins anew."""
        self._exchanged.clear()
        self._left, self._again = None, []

    @torch.no_grad()
    def _sums(self) -> Tensor:
        tensors, device = self._host.tensors("parameter"), self._host.device
        return torch.stack([word_sum(tensors[i], device) for i in self._looks])
