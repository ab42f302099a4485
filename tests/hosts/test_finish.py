"""`finish()` and `detach()`. Two islands as threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fsdp_demo import preset

from ..support.inside import in_threads
from ..support.two_layers import AS_IS, attached, equal, sgd, step, train

FULL = preset("full")
DEMO = preset("demo", topk=8, **AS_IS)
DILOCO = preset("diloco", period=3, **AS_IS)


@in_threads()
def test_finish_may_be_called_twice(topology: Any) -> None:
    """finish() may be called twice, and training goes on after it."""
    for config in (FULL, DILOCO, preset("decoupled_momentum", rule="released", period=3, **AS_IS)):
        net, optimizer, exchange = attached(config, topology)
        train(optimizer, net.loss, 4)
        exchange.finish()
        kept, metrics = net.copies(), exchange.metrics()
        exchange.finish()
        assert equal(kept, net.copies()) and metrics == exchange.metrics()
        assert exchange.digests_equal() is (True if config.equal_after_exchange else None)
        assert (exchange.drift is None) == config.equal_after_exchange
        assert config.equal_after_exchange or exchange.drift > 0
        with pytest.raises(RuntimeError, match="finished.*detach"):
            optimizer.step()
        for call in (exchange.flush, exchange.skip):
            with pytest.raises(RuntimeError, match="finished"):
                call()
        with exchange.outer_parameters(net):
            assert equal(kept, net.copies())
        exchange.state_dict()
        exchange.detach()
        exchange.detach()
        step(optimizer, net.loss(4))
        assert exchange.step == 4 and not equal(kept, net.copies())


@in_threads()
def test_detach_leaves_a_plain_optimizer(topology: Any) -> None:
    """After detach() the optimizer goes on as if there had never been an exchange; nothing is sent,
    nobody is waited for.
    """
    for config in (DEMO, DILOCO, DEMO.changed({"schedule.delay": 2})):
        net, optimizer, exchange = attached(config, topology)
        train(optimizer, net.loss, 4)
        exchange.detach()
        twin = copy.deepcopy(net)
        other, messages = sgd(twin.parameters()), exchange.metrics()["messages"]
        for n, o in ((net, optimizer), (twin, other)):
            train(o, n.loss, 4, 4 + 3 * (1 - topology.island))  # island 0 alone
        assert equal(net.copies(), twin.copies())
        assert exchange.metrics()["messages"] == messages
        assert exchange.step == 4
        exchange.finish()
