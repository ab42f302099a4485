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
    "diloco, in flight": preset("diloco", period=4, inner_optimizers="as_is",
        **{"schedule.delay": 2}),
    "consensus": preset("decoupled_momentum", transform=True, period=4, inner_optimizers="as_is"),
    "released, in flight": preset("decoupled_momentum", transform=True, rule="released", period=4,
        inner_optimizers="as_is", **{"schedule.delay": 2}),
}  # fmt: skip


class Small:
    """A model of two tensors, its optimizer and exchange; gradients depend on island and step
    only. Ten tokens are reported before each step.
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
            self.exchange.report(tokens=10)
            self.optimizer.step()

    def save(self) -> Any:
        return copy.deepcopy(
            (
                [p.detach() for p in self.params],
                self.optimizer.state_dict(),
                self.exchange.state_dict(),
            )
        )


class Noise:
    """Two matrices and a vector; gradients are noise of island and step, times `scale`, but where
    `change` puts something else into the parameters or their gradients. saved: `tensors` to begin
    with, and the exchange's state.
    """

    def __init__(
        self, topology: Any, config: ExchangeConfig, adamw: bool = False, saved: Any = (None, None)
    ):
        g = torch.Generator().manual_seed(7)
        tensors, state = saved
        self.island = topology.island
        shapes = (("0.a", (70, 66)), ("1.b", (64, 64)), ("head", (5,)))
        self.named = [(n, torch.nn.Parameter(torch.randn(s, generator=g))) for n, s in shapes]
        for (_, p), t in zip(self.named, tensors or self.tensors(), strict=True):
            p.data.copy_(t)
        kind = torch.optim.AdamW if adamw else torch.optim.SGD
        self.optimizer: Any = kind(self.named, lr=0.01)
        self.exchange = fsdp_demo.attach(self.optimizer, config, topology=topology, state=state)

    def step(self, change: Any = None, scale: float = 1.0) -> None:
        params = [p for _, p in self.named]
        for k, p in enumerate(params):
            seed = 1000 * self.exchange.step + 10 * self.island + k
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * scale
        if change:
            change(params)
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        return [p.detach().clone() for _, p in self.named]

    def states(self) -> list[torch.Tensor]:
        """The tensors that the optimizer keeps."""
        kept = [v for state in self.optimizer.state.values() for v in state.values()]
        return [v for v in kept if isinstance(v, torch.Tensor)]


def finite(tensors: Any) -> bool:
    """Whether all values of all tensors are finite."""
    return all(bool(t.isfinite().all()) for t in tensors)


def same(a: Any, b: Any) -> bool:
    """Bit-equal nested tensors, dicts and lists."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)
