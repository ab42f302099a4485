"""A model of two layers whose inputs depend on the island, and the loop that trains it and other
models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fsdp_demo

AS_IS = {"inner_optimizers": "as_is", "clip": None}


class Net(torch.nn.Module):
    """Two layers; inputs depend on island and key."""

    def __init__(self, topology: Any):
        super().__init__()
        self.island = topology.island
        self.a, self.b = torch.nn.Linear(66, 64), torch.nn.Linear(64, 3)
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) / 8)

    def loss(self, key: int) -> torch.Tensor:
        x = torch.randn(4, 66, generator=torch.Generator().manual_seed(100 * key + self.island))
        return self.b(self.a(x).tanh()).square().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())

    def copies(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sgd(params: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def plain(net: Net) -> torch.optim.Optimizer:
    return sgd(net.parameters())


def two(net: Net) -> list[torch.optim.Optimizer]:
    """An optimizer for each layer."""
    return [sgd(net.a.parameters()), sgd(net.b.parameters())]


def alone() -> Net:
    """A net of one replica."""
    return Net(fsdp_demo.Topology())


def attached(
    config: Any, topology: Any = None, inner: Any = plain, net: Any = None, **options: Any
) -> tuple[Net, Any, Any]:
    """A net, its optimizer (what `inner` makes of the net) and its exchange; alone without a
    topology.
    """
    net = net or Net(topology or fsdp_demo.Topology())
    optimizer = inner(net)
    given = {"model": net, "topology": topology, **options}
    return net, optimizer, fsdp_demo.attach(optimizer, config, **given)


def step(optimizer: Any, loss: torch.Tensor) -> None:
    """A step on the gradients of this loss, of one optimizer or of several in turns."""
    loss.backward()
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for o in optimizers:
        o.step()
    for o in optimizers:
        o.zero_grad()


def train(
    optimizer: Any,
    loss: Callable[[int], torch.Tensor],
    *steps: int,
    each: Callable[[int], Any] = lambda t: None,
) -> None:
    """The steps of range(*steps) on loss(t), and each(t) behind every step."""
    for t in range(*steps):
        step(optimizer, loss(t))
        each(t)
