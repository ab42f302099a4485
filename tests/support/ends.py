"""A small regression on threads, for what a run's last steps do to its validation loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fsdp_demo
from fsdp_demo import ExchangeConfig, Topology

from . import threaded


class Result:
    """What one island saw: validation losses and parameters around `finish()`."""

    def __init__(self) -> None:
        self.local = self.anchor = self.after = 0.0
        self.before: list[torch.Tensor] = []
        self.final: list[torch.Tensor] = []
        self.equal: bool | None = None


def model() -> nn.Module:
    """Two layers of 64, numbered as transformers number theirs."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [count, 16] and what a fixed network with noise makes of them [count, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    w = torch.randn(16, 2, generator=torch.Generator().manual_seed(99)) / 4
    return x, torch.tanh(x @ w).sum(1, keepdim=True) + 0.1 * torch.randn(
        count, 1, generator=generator
    )


def trained(config: ExchangeConfig, steps: int, count: int = 2, lr: float = 3e-3) -> list[Result]:
    """`steps` steps of AdamW on `count` islands with rows of their own, then `finish()`."""

    def work(island: int, topology: Topology) -> Result:
        net, out = made[island], Result()
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        exchange = fsdp_demo.attach(optimizer, config, model=net, topology=topology)
        data, held = rows(4096, island), rows(512, 50)
        draw = torch.Generator().manual_seed(island)

        def validation() -> float:
            with torch.no_grad():
                return float(nn.functional.mse_loss(net(held[0]), held[1]))

        for _ in range(steps):
            chosen = torch.randint(4096, (32,), generator=draw)
            nn.functional.mse_loss(net(data[0][chosen]), data[1][chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        out.local, out.before = validation(), [p.detach().clone() for p in net.parameters()]
        with exchange.outer_parameters(net):
            out.anchor = validation()
        exchange.finish()
        out.after = validation()
        out.final = [p.detach().clone() for p in net.parameters()]
        out.equal = exchange.digests_equal()
        return out

    # not in the threads: they would draw from one generator
    made: list[Any] = [model() for _ in range(count)]
    return threaded.values(threaded.islands(work, count, timeout=60.0))
