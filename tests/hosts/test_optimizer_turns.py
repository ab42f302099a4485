"""Several optimizers of one exchange: all gradients are there when the first one steps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset

from ..support.inside import in_ranks
from ..support.two_layers import AS_IS, Net, attached, train, two

LATE = r"gradients of optimizer 1 are new, or were changed.*all backward passes first.*each alone"
NEEDED = {
    "full": preset("full"),
    "demo": preset("demo", topk=8, **AS_IS),
    "diloco": preset("diloco", period=10, inner_optimizers="as_is"),
}


@pytest.mark.parametrize("kind", NEEDED)
@pytest.mark.parametrize("there", [True, False])
def test_turns_refuse_a_backward_between_two_steps(kind: str, there: bool) -> None:
    """A backward between the steps of two optimizers is refused: its gradients would be neither
    exchanged nor clipped. Those of the second optimizer may be there already, or be new.
    """
    net, (first, second), exchange = attached(NEEDED[kind], inner=two)
    net.loss(0).backward()
    if not there:
        second.zero_grad()
    first.step()
    net.loss(1).backward()
    with pytest.raises(RuntimeError, match=LATE):
        second.step()
    assert exchange.step == 0
    second.zero_grad()
    second.step()
    assert exchange.step == 1
    exchange.detach()


def test_turns_accept_writes_that_are_no_backward() -> None:
    """Writes that are no new gradient are accepted: the exchange and clipping write into gradients;
    a loop may empty those of who has stepped, or of both; where gradients are left alone nobody
    asks.
    """
    for config in (*NEEDED.values(), preset("full", clip=1e-3)):
        net, (first, second), exchange = attached(config, inner=two)
        for t in range(4):
            net.loss(t).backward()
            first.step()
            first.zero_grad(set_to_none=t % 2 == 0)
            if t == 3:
                second.zero_grad()
            second.step()
            second.zero_grad()
        assert exchange.step == 4
        exchange.detach()
    net, optimizers, exchange = attached(preset("diloco", period=2, **AS_IS), inner=two)
    for optimizer in optimizers:
        train(optimizer, net.loss, 1)
    assert exchange.step == 1
    exchange.detach()


@in_ranks()
def test_turns_under_fsdp2(me: Any) -> None:
    """A backward between two steps is refused under FSDP2, too: gradients are DTensors, and FSDP2
    adds to the local part of one that is there.
    """
    from torch.distributed.fsdp import fully_shard

    for there in (True, False):
        net = Net(fsdp_demo.Topology(island=me.island))
        fully_shard(net, mesh=me.mesh())
        os.environ["ISLAND_RUN"] += "+"
        _, (first, second), exchange = attached("full", inner=two, net=net)
        x = torch.ones(2, 66)
        net(x).sum().backward()
        first.step()
        second.step()
        if not there:
            second.zero_grad()
        net(x).sum().backward()
        first.step()
        net(x).sum().backward()
        with pytest.raises(RuntimeError, match=LATE):
            second.step()
        assert exchange.step == 1
        exchange.detach()
