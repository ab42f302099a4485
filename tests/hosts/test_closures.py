"""`step(closure)`: one backward per step with every kind of preset, gradients clipped and exchanged
as without it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset

from ..support.inside import in_threads
from ..support.two_layers import Net, attached, equal, two

AS_IS: dict[str, Any] = {"inner_optimizers": "as_is"}
PRESETS = {
    "full": preset("full"),
    "demo": preset("demo", topk=8, **AS_IS),
    "diloco": preset("diloco", period=2, clip=0.01, **AS_IS),
    "diloco unclipped": preset("diloco", period=2, clip=None, **AS_IS),
    "local_sgd": preset("local_sgd", period=2, clip=0.01, **AS_IS),
    "desloc": preset("desloc", period=2, states={"momentum_buffer": 2}, clip=0.01, **AS_IS),
    "decoupled_momentum": preset("decoupled_momentum", period=2, clip=0.01, **AS_IS),
}


class Counted:
    """A closure as Lightning makes it: forward, zero_grad, backward."""

    def __init__(self, net: Net, optimizer: torch.optim.Optimizer):
        self.net, self.optimizer, self.calls = net, optimizer, 0

    def __call__(self) -> torch.Tensor:
        assert torch.is_grad_enabled()
        loss = self.net.loss(self.calls)
        self.optimizer.zero_grad()
        loss.backward()
        self.calls += 1
        return loss


def momentum(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def muon(net: Net) -> torch.optim.Optimizer:
    return fsdp_demo.MuonAdamW(net.named_parameters(), lr=0.01)


@in_threads()
def test_closure_one_backward_per_step_and_equal_parameters(topology: Any) -> None:
    """A closure is called once per step, and ends with the parameters of a step without one: by
    keyword, by position, and not at all, from within no_grad as well; `clip` is obeyed.
    """
    cases = [(name, config, momentum) for name, config in PRESETS.items()]
    for name, config, inner in (*cases, ("MuonAdamW", preset("full", clip=0.1), muon)):
        ends = []
        for way in ("keyword", "position", "plain"):
            net, optimizer, exchange = attached(config, topology, inner)
            closure = Counted(net, optimizer)
            for t in range(4):
                if way == "plain":
                    closure()
                    optimizer.step(closure=None)
                    continue
                with torch.set_grad_enabled(t != 1):
                    if way == "keyword":
                        loss = optimizer.step(closure=closure)
                    else:
                        loss = optimizer.step(closure)
                assert closure.calls == t + 1 == exchange.step, (name, way)
                assert isinstance(loss, torch.Tensor), (name, way)
            exchange.finish()
            ends.append(net.copies())
        assert equal(ends[0], ends[2]) and equal(ends[1], ends[2]), name


def test_closure_of_steps_that_do_not_count() -> None:
    """Steps in a pause and after detach() keep their closure."""
    net, optimizer, exchange = attached("full", inner=momentum)
    closure = Counted(net, optimizer)
    with exchange.paused():
        optimizer.step(closure)
    assert (closure.calls, exchange.step) == (1, 0)
    exchange.detach()
    optimizer.step(closure)
    assert closure.calls == 2


class Twice(torch.optim.Optimizer):
    """Sharpness-aware, in short: asks for gradients two times."""

    def __init__(self, net: Net):
        super().__init__(net.parameters(), {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


def test_closure_called_twice_by_the_optimizer() -> None:
    """An optimizer that calls its closure twice is left alone where nothing needs gradients ahead
    of the step; elsewhere the second call would find stale ones.
    """
    local = preset("diloco", period=2, clip=None, **AS_IS)
    net, optimizer, exchange = attached(local, inner=Twice)
    closure = Counted(net, optimizer)
    optimizer.step(closure)
    assert (closure.calls, exchange.step) == (2, 1)
    exchange.finish()
    _, other, _ = attached("full", inner=Twice, net=net)
    with pytest.raises(RuntimeError, match="calls its closure more than once"):
        other.step(closure)


def test_closure_refused_for_several_optimizers_and_lbfgs() -> None:
    """A closure of one of several optimizers, and LBFGS, are refused."""
    net, optimizers, exchange = attached("full", inner=two)
    with pytest.raises(ValueError, match="several optimizers attached.*call backward first"):
        optimizers[0].step(Counted(net, optimizers[0]))
    exchange.detach()
    with pytest.raises(ValueError, match="LBFGS calls its closure several times"):
        lbfgs = torch.optim.LBFGS(net.parameters())
        fsdp_demo.attach(lbfgs, "diloco", model=net, clip=None, **AS_IS)
