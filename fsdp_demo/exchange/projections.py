"""The projections of `LowRankAdamW`, remade after an exchange from the change of anchors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
            params, owners = [self._host.parameter(i) for i in c.covered], self._owners()
            rooms = [torch.zeros_like(local_part(p)) if p in owners else None for p in params]
            c.write(change, rooms)
            for p, room in zip(params, rooms, strict=True):
                if room is not None:
                    owners[p].remake(p, room)

    def turn(self, bases: Sequence[Tensor]) -> None:
        """Let these, in the order of `tensors`, take their place, with moments turned into them."""
        for (p, o), old, new in zip(self._owners().items(), self.tensors(), bases, strict=True):
            if not torch.equal(old, new):
                o.turn(p, new)

    def _owners(self) -> dict[Tensor, LowRankAdamW]:
        return {p: o for o in self._optimizers for p, s in o.state.items() if PROJECTION in s}

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        return (local_part(o.state[p][PROJECTION]) for p, o in self._owners().items())
