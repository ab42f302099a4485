"""A model of two tensors with an exchange, and configurations under which its runs are resumed."""

from __future__ import annotations

import copy
from typing import Any

import torch

import fsdp_demo
from fsdp_demo import ExchangeConfig, preset

RESUMED = {
    "full": preset("full"),
    "full, in flight": preset("full", clip=0.5, **{"schedule.delay": 2}),
    "demo": preset("demo"),
    "demo, in flight": preset("demo", **{"schedule.delay": 2}),
    "diloco": preset("diloco", period=4, inner_optimizers="as_is"),
    "diloco, in flight": preset(
        "diloco", period=4, inner_optimizers="as_is", **{"schedule.delay": 2}
    ),
    "consensus": preset("decoupled_momentum", transform=True, period=4, inner_optimizers="as_is"),
    "released, in flight": preset(
        "decoupled_momentum",
        transform=True,
        rule="released",
        period=4,
        inner_optimizers="as_is",
        **{"schedule.delay": 2},
    ),
}


class Small:
    """A model of two tensors, its optimizer and exchange; gradients depend on island and step
    only.
    """

    def __init__(self, topology: Any, config: ExchangeConfig, seed: int = 0, saved: Any = None):
        g = torch.Generator().manual_seed(seed)
        self.island = topology.island
        self.params = [torch.nn.Parameter(torch.randn(s, generator=g)) for s in ((70, 66), (5,))]
        self.optimizer = (
            torch.optim.AdamW(self.params, lr=0.01)
            if config.preset != "demo"
            else torch.optim.SGD(self.params, lr=0.01)
        )
        state = None
        if saved is not None:
            params, optimizer, state = copy.deepcopy(saved)
            self.optimizer.load_state_dict(optimizer)
            for p, q in zip(self.params, params, strict=True):
                p.data.copy_(q)
        self.exchange = fsdp_demo.attach(self.optimizer, config, topology=topology, state=state)

    def train(self, stop: int) -> None:
        while self.exchange.step < stop:
            for k, p in enumerate(self.params):
                key = 1000 * self.exchange.step + 10 * self.island + k
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(key))
            self.optimizer.step()

    def save(self) -> Any:
        return copy.deepcopy(
            (
                [p.detach() for p in self.params],
                self.optimizer.state_dict(),
                self.exchange.state_dict(),
            )
        )


def same(a: Any, b: Any) -> bool:
    """Bit-equal nested tensors, dicts and lists."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)
