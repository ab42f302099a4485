"""Where channels stand: made once per rank, and handed to all of them."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_demo import preset
from fsdp_demo.channels.bind import bind
from fsdp_demo.channels.state import Placement
from fsdp_demo.hosts.torch_params import TorchHost
from fsdp_demo.rendezvous.position import ShardPosition


def shards() -> tuple[nn.Module, TorchHost]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, TorchHost(
        [torch.optim.SGD([(n, p) for n, p in model.named_parameters()], lr=0.1)]
    )


def test_placement_active_copies() -> None:
    """A placement names the active copy of a rank."""
    _, here = shards()
    active_copies = [
        Placement(here, ShardPosition(1, 0, 3, copy), active_copies=2).active_copy
        for copy in range(3)
    ]
    assert active_copies == [0, 1, None]


def test_placement_binds_channels() -> None:
    """The bound channels are those of the configuration, one for buffers on the schedule of what
    moves parameters, and one over everything.
    """
    model, here = shards()
    config = preset("local_sgd", period=3)
    bound = bind(config.channels, config, Placement(here, islands=2), model)
    assert [c.channel.name for c in bound.channels] == [c.name for c in config.channels]
    assert bound.channels[0].size == 2
    assert [(b.channel.name, b.channel.schedule.sync_every) for b in bound.buffers] == [
        ("buffers", 3)
    ]
    assert len(bound.parameters.covered) == 4
    assert bind(config.channels, config, Placement(here), model).buffers == []
    beyond = bind(
        config.channels,
        config,
        Placement(here, ShardPosition(1, 0, 2, 1), active_copies=1, islands=2),
        None,
    )
    assert beyond.channels[0].section is None
    assert beyond.channels[0].layout is None
    assert beyond.buffers == []
