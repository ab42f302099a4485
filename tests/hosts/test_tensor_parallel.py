"""Tensor and sequence parallelism inside an island: one step is that of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.exchange import copies


class Block(torch.nn.Module):
    """What a transformer has: a norm whose gradients are partial sums, and two cut matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(64)
        self.up = torch.nn.Linear(64, 128, bias=False)
        self.down = torch.nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(self.norm(x)).relu())


def stepped(model: torch.nn.Module, name: str, **changes: Any) -> dict[str, torch.Tensor]:
    """The parameters after one step, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = fsdp_demo.attach(optimizer, name, model=model, **changes)
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(5))
    model(x).square().mean().backward()
    optimizer.step()
    exchange.detach()
    named = model.named_parameters()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in named}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("demo", {"beta": 0.5}), ("full", {"clip": 1e-3}), ("full", {"clip": None})],
)
def test_partial_gradients_are_added_up_and_counted_once(
    run_ranks: Callable[..., Any], name: str, changes: dict[str, Any]
) -> None:
    def run(me: Any) -> float:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        told: list[str] = []
        copies.log.warning = lambda text, *args, **_: told.append(text % args)
        cut = parallelize_module(Block(), me.mesh(), plan)
        found = stepped(cut, name, **changes)
        assert told == []  # the norm, which both ranks hold whole, trains as one
        return max(float((found[n] - p).abs().max()) for n, p in whole.items())

    whole = stepped(Block(), name, **changes)
    # a clipped step has a norm of 1e-4
    assert max(run_ranks(run, 1, 2)) < (1e-9 if changes.get("clip") else 1e-6)
