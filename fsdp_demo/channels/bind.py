"""The channels of a configuration, bound to the tensors of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config.channel import Channel, matches
from ..config.parts import Applier, SyncSchedule
from ..config.schema import ExchangeConfig
from ..errors import first_few
from ..hosts.base import LocalParam, is_foreign, local_part, plain_name
from .channel import ChannelRunner
from .state import LocalChannel, Placement

# Floating-point buffers of a model (running statistics of BatchNorm) are averaged, too: no
# optimizer steps them, so every island would end with its own. That happens as for the parameters
# of `local_sgd`: in the message of the channel that moves parameters, or every EVERY steps where
# only gradients are exchanged, and at the end. Whole-number buffers (counters), those that a model
# does not save, masks, and those that are each island's own (`ExchangeConfig.own_tensors`) stay as
# they are.

NAME = "buffers"
"""Name of the channel of buffers. No configuration has a channel of this name."""

LIMIT = 1e18
"""The largest magnitude of a buffer that is averaged: the square of a larger one overflows in fp32.
A buffer that holds more, or Inf, is no statistic but a mask: -inf or the smallest number of its
dtype.
"""

EVERY = 100
"""Steps between two averages where no channel moves parameters."""


class Buffers:
    """The local parts of a model's floating-point buffers that are saved with it, in the place of a
    `TrainingHost` for the channel that averages them.

    Args:
        device: of the buffers.
        own: `ExchangeConfig.own_tensors`, which are left out.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, own: Sequence[str] = ()):
        self._model, self.device, left_out = model, device, masks(model)
        averaged = {
            n: b
            for n, b in saved_buffers(model).items()
            if n not in left_out and b.element_size() <= 4 and not matches(plain_name(n), own)
        }
        self._names = list(averaged)
        self.params = [
            LocalParam(plain_name(name), tuple(b.shape), tuple(local_part(b).shape), b.dtype, False)
            for name, b in averaged.items()
        ]

    def tensors(self, source: str) -> list[Tensor | None]:
        """The buffers as they are now (`source` "parameter"), in the order of `params`."""
        assert source == "parameter", source
        there = saved_buffers(self._model)
        return [local_part(there[name]) for name in self._names]


@torch.no_grad()
def masks(model: torch.nn.Module) -> set[str]:
    """Names of `saved_buffers` with a value beyond `LIMIT`, or Inf. One read from the device."""
    parts = {n: local_part(b) for n, b in saved_buffers(model).items()}
    parts = {n: t for n, t in parts.items() if t.numel() and t.device.type != "meta"}
    if not parts:
        return set()
    most = torch.stack([t.float().abs().amax() for t in parts.values()])
    return {n for n, far in zip(parts, (most > LIMIT).tolist(), strict=True) if far}


def saved_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers saved with a model, by name, but `is_foreign` ones."""
    saved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
    return {
        n: b
        for n, b in model.named_buffers()
        if n in saved and b.is_floating_point() and not is_foreign(b)
    }


def buffer_channel(
    model: torch.nn.Module | None,
    moving: Sequence[Channel],
    placement: Placement,
    own: Sequence[str] = (),
) -> list[ChannelRunner]:
    """The channel that averages a model's buffers over the islands, as a list; empty where there is
    nothing to average.

    Args:
        moving: the channels that write parameters: the first one gives the schedule.
        own: `ExchangeConfig.own_tensors`.
    """
    if model is None or placement.islands == 1:
        return []
    buffers = Buffers(model, placement.host.device, own)
    if not buffers.params:
        return []
    schedule = moving[0].schedule if moving else SyncSchedule(EVERY)
    what = Channel(NAME, "parameter", schedule, applier=Applier("replace"))
    return [ChannelRunner(what, replace(placement, host=buffers))]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Bound:
    """The channels of an exchange at work on one rank.

    Attributes:
        channels: in the order of the configuration.
        buffers: the channel that averages the model's buffers, if it has any.
        parameters: a channel over all parameters that are not frozen, which no schedule sends.
    """

    channels: list[ChannelRunner]
    buffers: list[ChannelRunner]
    parameters: LocalChannel


def bind(
    channels: Sequence[Channel],
    config: ExchangeConfig,
    placement: Placement,
    model: torch.nn.Module | None,
) -> Bound:
    """Bind `channels`, those of `config` with every fragment a channel, to the tensors of a rank.

    Args:
        model: its buffers are averaged; None: no buffers are.

    Raises:
        ValueError: the channels do not fit the parameters, or leave out some of them where the
            preset keeps replicas equal.
    """
    active = [ChannelRunner(c, placement, config.seed) for c in channels]
    parameters = LocalChannel(
        Channel("parameters", "parameter", applier=Applier("replace")), placement
    )
    if config.equal_at_end and placement.islands > 1:
        _check_covered(active, placement, config.preset)
    moving = [c for c in channels if c.writes_parameters]
    return Bound(active, buffer_channel(model, moving, placement, config.own_tensors), parameters)


def _check_covered(channels: Sequence[ChannelRunner], placement: Placement, preset: str) -> None:
    """Raise ValueError for trained parameters that no channel covers (`exclude`), where the preset
    promises replicas that end equal.
    """
    covered = {i for c in channels for i in c.covered if c.channel.equal_at_end}
    left = [
        s.name for i, s in enumerate(placement.host.params) if i not in covered and not s.frozen
    ]
    if left:
        raise ValueError(
            f"preset {preset!r} keeps replicas equal, but no channel covers {first_few(left)}: "
            "freeze these parameters, or name them in another channel's include"
        )
