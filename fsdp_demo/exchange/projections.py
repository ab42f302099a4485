"""The projections of `LowRankAdamW`, remade after an exchange from how far it has moved anchors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..channels.channel import ChannelRunner
from ..hosts.base import TrainingHost, local_part
from ..hosts.lowrank import PROJECTION, LowRankAdamW


class Projections:
    """Remakes them on one rank. Anchors are equal to the bit on all islands; so are projections
    where these are of one hardware (`startup.agree_on_run`). A change of `diloco` holds the outer
    momentum, too.
    """

    def __init__(self, host: TrainingHost):
        self._host = host
        self._optimizers = [o for o in host.optimizers if isinstance(o, LowRankAdamW)]
        self._before: list[tuple[ChannelRunner, Tensor | None]] = []

    def note(self, c: ChannelRunner) -> None:
        """Keep the anchor of a channel, whose mean is about to be applied."""
        if self._optimizers and c.channel.source == "delta":
            self._before.append((c, None if c.anchor is None else c.anchor.clone()))

    def remake(self) -> None:
        """Remake them from the anchors that have moved since they were noted. All ranks of the
        island call it together, when moments of the same step have landed: those are of the basis
        in which they were sent.
        """
        while self._before:
            c, change = self._before.pop(0)
            if change is not None and c.anchor is not None:
                change = change.sub_(c.anchor).to(self._host.device)
            owners = [self._owner(i) for i in c.covered]
            rooms = [
                None if o is None else torch.zeros_like(local_part(self._host.parameter(i)))
                for i, o in zip(c.covered, owners, strict=True)
            ]
            c.write(change, rooms)
            for i, owner, room in zip(c.covered, owners, rooms, strict=True):
                if owner is not None and room is not None:
                    owner.remake(self._host.parameter(i), room)

    def tensors(self) -> Iterator[Tensor]:
        """The projections of this rank."""
        states = (s for o in self._optimizers for s in o.state.values() if PROJECTION in s)
        return (local_part(s[PROJECTION]) for s in states)

    def _owner(self, index: int) -> LowRankAdamW | None:
        """The optimizer that keeps a projection for a parameter."""
        p = self._host.parameter(index)
        return next((o for o in self._optimizers if PROJECTION in o.state.get(p, {})), None)
