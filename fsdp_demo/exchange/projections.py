"""The projections of `LowRankAdamW`, remade after an exchange from the change of anchors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..channels.channel import ChannelRunner
from ..hosts.base import TrainingHost, local_part
from ..hosts.lowrank import PROJECTION, LowRankAdamW


class Projections:
    """The projections of one rank. Each is made of anchors alone, which are equal to the bit on all
    islands, so it is, too, where these are alike (`startup.agree_on_run`).
    """

    def __init__(self, host: TrainingHost):
        self._host, self._before = host, list[tuple[ChannelRunner, Tensor | None]]()
        self._optimizers = [o for o in host.optimizers if isinstance(o, LowRankAdamW)]

    def note(self, c: ChannelRunner) -> None:
        """Keep the anchor of a channel, whose mean is about to be applied."""
        if self._optimizers and c.channel.source == "delta":
            self._before.append((c, None if c.anchor is None else c.anchor.clone()))

    def remake(self) -> None:
        """Remake them, once moments of the same step have landed: those are of the basis in which
        they were sent. All ranks of the island call it together.
        """
        while self._before:
            c, change = self._before.pop(0)
            if change is not None and c.anchor is not None:
                change = change.sub_(c.anchor).to(self._host.device)
            params = [self._host.parameter(i) for i in c.covered]
            owners = [next((o for o in self._optimizers if _has(o, p)), None) for p in params]
            both = list(zip(params, owners, strict=True))
            rooms = [torch.zeros_like(local_part(p)) if o else None for p, o in both]
            c.write(change, rooms)
            for (p, owner), room in zip(both, rooms, strict=True):
                if owner is not None and room is not None:
                    owner.remake(p, room)

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        states = (s for o in self._optimizers for s in o.state.values() if PROJECTION in s)
        return (local_part(s[PROJECTION]) for s in states)


def _has(optimizer: LowRankAdamW, p: Tensor) -> bool:
    return PROJECTION in optimizer.state.get(p, {})
