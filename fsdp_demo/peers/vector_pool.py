"""Memory on the host for vectors that are exchanged whole in every step, used again from step to
step, as DistributedDataParallel keeps its buckets.

The kernel hands out new memory page by page, when it is written first, which takes several times
as long as the writing.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .header import memory


def new_vector(n: int) -> Tensor:
    """A vector, fp32 [n] on the CPU, not written."""
    return torch.empty(n, dtype=torch.float32, device="cpu")


class VectorPool:
    """The memory of vectors of one length.

    Args:
        n: number of values; vectors of another length are not kept.
    """

    def __init__(self, n: int):
        self._n = n
        self._free: list[Tensor] = []

    def new_vector(self, n: int) -> Tensor:
        """A vector, fp32 [n] on the CPU, not written. Its memory is given to another vector when no
        tensor and no connection reads it any more. From any thread.
        """
        if n != self._n or not n:
            return new_vector(n)
        try:
            block = self._free.pop()
        except IndexError:
            block = new_vector(n)
        lent = memory(block)
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=torch.float32)
