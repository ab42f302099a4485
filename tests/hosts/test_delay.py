"""Delays of gradients and deltas, and `flush()`. Two islands as threads."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_demo import preset

from ..support.inside import in_threads
from ..support.two_layers import AS_IS, Net, attached, equal

FULL = preset("full")
DEMO = preset("demo", topk=8, **AS_IS)
DILOCO = preset("diloco", period=3, **AS_IS)


def fixed_gradients(net: Net, t: int) -> None:
    """Gradients that do not depend on the parameters, so that a delay is a pure shift."""
    for k, p in enumerate(net.parameters()):
        key = 1000 * t + 10 * net.island + k
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(key))


@in_threads()
def test_delay_of_a_gradient_is_tau_steps(topology: Any) -> None:
    """A delayed gradient acts exactly tau steps later, clipped where its mean is."""
    for config in (FULL, FULL.changed({"clip": 0.1}), DEMO):
        histories = []
        for tau in (0, 1, 3):
            late = config.changed({"schedule.delay": tau})
            net, optimizer, exchange = attached(late, topology)
            # before the first payload lands the parameters rest
            history = [net.copies()] * (tau + 1)
            for t in range(7):
                fixed_gradients(net, t)
                optimizer.step()
                assert len(exchange.state_dict()["in_flight"]) == min(tau, t + 1)
                if t < tau:
                    assert equal(history[0], net.copies())
                else:
                    history.append(net.copies())
                assert exchange.digests_equal()  # in flight, too
            assert exchange.metrics()["exchanges"] == 7
            exchange.flush()
            assert exchange.step == 7 and not exchange.state_dict()["in_flight"]
            end = net.copies()
            exchange.flush()
            assert equal(end, net.copies())
            histories.append((history[tau:], end))
            exchange.finish()
            assert equal(end, net.copies())
        (now, end), *delayed = histories
        for history, same_end in delayed:
            assert all(equal(a, b) for a, b in zip(history, now, strict=False))
            assert equal(end, same_end)


@in_threads()
def test_delay_of_a_delta_is_tau_steps(topology: Any) -> None:
    """A delayed delta acts exactly tau steps later. period 3, tau 2: sent after steps 3, 6, landed
    after steps 5, 8; flush brings what is left.
    """
    net, optimizer, exchange = attached(DILOCO.changed({"schedule.delay": 2}), topology)
    (channel,) = exchange.channels
    moved = []
    for t in range(9):
        before = channel.anchor.clone()
        fixed_gradients(net, t)
        optimizer.step()
        moved.append(not torch.equal(before, channel.anchor))
        assert exchange.digests_equal() == moved[-1]
    assert moved == [False] * 4 + [True] + [False] * 2 + [True, False]
    assert exchange.metrics()["exchanges"] == 3 and len(exchange.state_dict()["in_flight"]) == 1
    exchange.flush()
    assert exchange.digests_equal()
    exchange.finish()
    assert exchange.digests_equal()
