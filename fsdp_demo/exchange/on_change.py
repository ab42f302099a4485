"""Exchanges only where the gradient has changed (`schedule.when`, SelSync, arXiv 2307.07950).

    n_t = sum over tensors of the norm of their gradient
    s_t = the mean of the last `window` n, the newest with weight 0.99, the one before 0.99^2, ...
    d_t = the same mean of |s_t - s_(t-1)| / s_(t-1)

Every `sync_every` steps each island tells the others, in 8 bytes, whether its d has reached `delta`
since the last check. One that says so is enough: the decision is the same on all islands, whatever
each of them has measured, and a newcomer reads it in the same message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.channel import Channel
from ..config.parts import SyncSchedule
from ..hosts.torch_params import LocalParam
from ..rendezvous.island import IslandGroup

CHECK = 8
"""Bytes of an island's answer in a check, behind its header."""

DECAY = 0.99
"""Of the weights in a window, from one step to the one before (the release's 1 - 0.01)."""


def smoothed(window: Sequence[float]) -> float:
    """The weighted mean of values, the newest last.

    >>> round(smoothed([0.0, 1.0]), 4)
    0.5025
    """
    weights = [DECAY ** (len(window) - i) for i in range(len(window))]
    return sum(w * v for w, v in zip(weights, window, strict=True)) / sum(weights)


class ChangeMeter:
    """The changes of one island's gradients, the same on all its ranks.

    Args:
        channels: of the method, of which some wait for a change.

    Attributes:
        schedule: of these.
    """

    def __init__(self, channels: Sequence[Channel]):
        self.schedule: SyncSchedule = next(c.schedule for c in channels if not c.schedule.pure)
        self.clear()

    def clear(self) -> None:
        """Begin anew: nothing is known of any step."""
        window = self.schedule.window
        self._norms, self._changes = deque[float](maxlen=window), deque[float](maxlen=window)
        self._changed, self._unread = False, list[Tensor]()
        self._places, self._tensors = torch.empty(0, dtype=torch.int64, device="cpu"), 0

    def note(
        self,
        island: IslandGroup,
        params: Sequence[LocalParam],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Take the gradients of a step (local shards, one for each of `params`, on the island's
        device); n_t is read at the next check. What is not finite, or zero, is left out then. All
        ranks of the island call it together.
        """
        if not self._tensors:  # a rank may hold parts of some of them only
            named = [s.name for s in params]
            every = sorted({name for names in island.everyone(named) for name in names})
            places, self._tensors = [every.index(name) for name in named], len(every)
            self._places = torch.tensor(places, dtype=torch.int64, device=island.device)
        squares = torch.zeros(self._tensors, device=island.device, dtype=torch.float64)
        zero = squares.new_zeros(())
        parts = [
            zero
            if g is None
            else torch.linalg.vector_norm(g, dtype=torch.float32).to(squares).square() / s.repeats
            for s, g in zip(params, gradients, strict=True)
        ]
        if parts:
            squares.index_add_(0, self._places, torch.stack(parts))
        self._unread.append(island.add_shards(squares).sqrt().sum())

    def wants(self, unsent: int) -> bool:
        """Whether this island wants an exchange at a check: its gradient has changed since the last
        one, or it is not known whether it has, or `at_most` steps are over. unsent: steps since the
        last exchange.
        """
        self._read()
        known, bound = len(self._changes) == self.schedule.window, self.schedule.at_most
        changed, self._changed = self._changed, False
        return changed or not known or 0 < bound <= unsent

    def _read(self) -> None:
        found = torch.stack(self._unread).tolist() if self._unread else []
        self._unread.clear()
        for norm in found:
            if math.isfinite(norm) and norm > 0:
                self._add(norm)

    def _add(self, norm: float) -> None:
        window, norms = self.schedule.window, self._norms
        before = smoothed(norms) if len(norms) == window else 0.0
        norms.append(norm)
        if before:
            self._changes.append(abs(smoothed(norms) - before) / before)
        known = len(self._changes) == window
        self._changed |= not known or smoothed(self._changes) >= self.schedule.delta

    # ---- kept ----------------------------------------------------------------------------------

    def state(self) -> dict[str, list[float]]:
        """What is saved and handed to newcomers, as JSON."""
        self._read()
        changed = [float(self._changed)]
        return {"norms": [*self._norms], "changes": [*self._changes], "changed": changed}

    def load(self, kept: Mapping[str, Any]) -> None:
        """The inverse of `state`; nothing is known where it is empty."""
        self.clear()
        if kept:
            self._norms.extend(map(float, kept["norms"]))
            self._changes.extend(map(float, kept["changes"]))
            self._changed = bool(kept["changed"][0])
