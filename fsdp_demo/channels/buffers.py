"""The floating-point buffers of a model (running statistics of BatchNorm) as something a channel
can average.

No optimizer steps them, so no exchange of gradients or deltas moves them: every island would end
with its own. They are averaged like the parameters of `local_sgd`: in the message of the channel
that moves parameters, or every EVERY steps where only gradients are exchanged, and at the end.
Whole-number buffers (counters), and those that a model does not save, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config.channel import Applier, Channel, SyncSchedule
from ..hosts.base import LocalParam, local_part, plain_name
from .channel import ChannelRunner
from .placement import Placement

NAME = "buffers"
"""Of the channel. Configurations have no channel of this name: nobody sets it."""

EVERY = 100
"""Steps between two averages where no channel moves parameters."""


class Buffers:
    """What a channel reads of `TrainingHost`: the local parts of a model's floating-point buffers
    that are saved with it, by name.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device):
        self._model, self.device = model, device
        self.params = [
            LocalParam(plain_name(name), tuple(b.shape), tuple(local_part(b).shape), b.dtype, False)
            for name, b in _averaged(model).items()
        ]

    def tensors(self, source: str) -> list[Tensor | None]:
        """The buffers as they are now (`source` "parameter"), in the order of `params`."""
        assert source == "parameter", source
        return [local_part(b) for b in _averaged(self._model).values()]


def _averaged(model: torch.nn.Module) -> dict[str, Tensor]:
    saved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
    return {
        n: b
        for n, b in model.named_buffers()
        if n in saved and b.is_floating_point() and b.element_size() <= 4
    }


def channel(
    model: torch.nn.Module | None, moving: Sequence[Channel], placement: Placement
) -> list[ChannelRunner]:
    """The channel that averages a model's buffers over the islands, on the schedule of the first of
    `moving`; none where nothing is to do."""
    if (
        model is None
        or placement.islands == 1
        or not (buffers := Buffers(model, placement.host.device)).params
    ):
        return []
    schedule = moving[0].schedule if moving else SyncSchedule(EVERY)
    what = Channel(NAME, "parameter", schedule, applier=Applier("replace"))
    return [ChannelRunner(what, replace(placement, host=buffers))]  # type: ignore[arg-type]
