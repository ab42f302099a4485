"""A model of two layers whose inputs depend on the island, and what its tests need beside it."""

from __future__ import annotations

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


def attached(config: Any, topology: Any = None, **options: Any) -> tuple[Net, Any, Any]:
    """A net, its optimizer and its exchange; alone without a topology."""
    net = Net(topology or fsdp_demo.Topology())
    optimizer = sgd(net.parameters())
    given = {"model": net, "topology": topology, **options}
    return net, optimizer, fsdp_demo.attach(optimizer, config, **given)
