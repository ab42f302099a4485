"""Parameters that are written between an exchange and the step after it, by something else than the
base optimizer: a wrapper around it that keeps a copy of them, weight clipping, code of the loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.digests import EVERY, total
from ..hosts.base import TrainingHost


class Rewritten:
    """Compares the sum of their bits at the end of a step that exchanged with that ahead of the
    next one, every `EVERY` steps. Nothing is read on a device.

    Args:
        host: of the parameters.
    """

    def __init__(self, host: TrainingHost):
        self._host = host
        self._exchanged, self._next = False, 0
        self._left: Tensor | None = None
        self._found: float | Tensor = 0.0

    def exchanged(self) -> None:
        """An exchange writes parameters: those noted before are no longer right."""
        self._exchanged, self._left = True, None

    def note(self, step: int) -> None:
        """Step `step` has ended. Parameters are right now, if it exchanged any."""
        if self._exchanged and step >= self._next:
            self._left, self._next = self._sum(), step + EVERY
        self._exchanged = False

    def compare(self, aside: bool) -> None:
        """Ahead of a step. aside: steps that do not count were taken meanwhile."""
        if self._left is not None and not aside:
            self._found = self._found + (self._sum() != self._left).float()
        self._left = None

    def forget(self) -> None:
        """Whoever has written parameters had the right to, or the run begins anew."""
        self._exchanged, self._left, self._next = False, None, 0

    def take(self) -> float | Tensor:
        """How many comparisons have found other parameters since the last call."""
        found, self._found = self._found, 0.0
        return found

    @torch.no_grad()
    def _sum(self) -> Tensor:
        tensors = zip(self._host.tensors("parameter"), self._host.params, strict=True)
        return total([t for t, p in tensors if t is not None and not p.frozen], self._host.device)
