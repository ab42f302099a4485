"""The channels of a configuration, bound to the tensors of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config.channel import Applier, Channel
from ..config.schema import ExchangeConfig
from . import buffers
from .channel import ChannelRunner
from .placement import Placement
from .state import LocalChannel


@dataclass(frozen=True)
class Bound:
    """What an exchange has at work on one rank.

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
    """Bind `channels`, which are those of `config` with every fragment a channel, and what goes
    with them.

    Args:
        model: whose buffers are averaged; None: nobody's.

    Raises:
        ValueError: they do not fit the parameters, or leave out some of them where the preset keeps
            replicas equal.
    """
    active = [ChannelRunner(c, placement, config.seed) for c in channels]
    parameters = LocalChannel(
        Channel("parameters", "parameter", applier=Applier("replace")), placement
    )
    if config.equal_at_end and placement.islands > 1:
        _check_covered(active, placement, config.preset)
    moving = [c for c in channels if c.writes_parameters]
    return Bound(active, buffers.channel(model, moving, placement, config.own_tensors), parameters)


def _check_covered(channels: Sequence[ChannelRunner], placement: Placement, preset: str) -> None:
    """`exclude` means never exchanged: refused where the preset promises replicas that end equal,
    unless the parameter is frozen.
    """
    covered = {i for c in channels for i in c.covered if c.channel.equal_at_end}
    left = [
        s.name for i, s in enumerate(placement.host.params) if i not in covered and not s.frozen
    ]
    if left:
        names = ", ".join(left[:4]) + (" ..." if len(left) > 4 else "")
        raise ValueError(
            f"preset {preset!r} keeps replicas equal, but no channel covers {names}: freeze these "
            "parameters, or name them in another "
            "channel's include"
        )
