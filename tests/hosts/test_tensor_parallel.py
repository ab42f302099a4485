"""Tensor and sequence parallelism inside an island: one step is that of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.checkpoint import load_exchange, save_exchange
from fsdp_demo.exchange import refusals


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
def test_tensor_parallel_partial_gradients_add_up(run_ranks, name, changes: dict[str, Any]) -> None:
    """Partial gradients are added up and counted once."""

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
        refusals.log.warning = lambda text, *args, **_: told.append(text % args)
        cut = parallelize_module(Block(), me.mesh(), plan)
        found = stepped(cut, name, **changes)
        assert told == []  # the norm, which both ranks hold whole, trains as one
        return max(float((found[n] - p).abs().max()) for n, p in whole.items())

    whole = stepped(Block(), name, **changes)
    # a clipped step has a norm of 1e-4
    assert max(run_ranks(run, 1, 2)) < (1e-9 if changes.get("clip") else 1e-6)


def test_tensor_parallel_rows_under_fsdp2_keep_their_order(run_ranks, tmp_path: Path) -> None:
    """Rows that FSDP2 cuts behind tensor parallelism are joined in their order. Both cut dim 0,
    tensor parallelism first: rank 1 of four holds the third quarter.
    """

    def attached(model: torch.nn.Module, **given: Any) -> tuple[Any, torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return fsdp_demo.attach(optimizer, "diloco", model=model, period=4, **given), optimizer

    def run(me: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        def cut() -> torch.nn.Module:
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 16)
            whole = ColwiseParallel(output_layouts=Replicate())
            return fully_shard(parallelize_module(model, mesh["tp"], whole), mesh=mesh["dp"])

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = cut()
        exchange, optimizer = attached(model)
        begins = {s.name: s.offset for s in exchange.host.params}
        assert begins == {n: m * (0, 8, 4, 12)[me.rank] for n, m in [("weight", 8), ("bias", 1)]}
        for _ in range(2):
            model(torch.ones(1, 8)).square().mean().backward()
            optimizer.step()
        save_exchange(tmp_path, exchange)
        torch.distributed.barrier()
        exchange.detach()
        again, _ = attached(model, state=load_exchange(tmp_path))  # where it stood
        assert again.step == 2
        again.detach()

    run_ranks(run, 1, 4)
    torch.manual_seed(0)
    begun = torch.nn.Linear(8, 16)  # no exchange has moved the anchor from there
    whole, _ = attached(torch.nn.Linear(8, 16), state=load_exchange(tmp_path))
    (channel,) = whole.channels
    found = [torch.zeros_like(p) for p in begun.parameters()]
    channel.layout.unpack(channel.anchor, found)
    whole.detach()
    assert all(torch.equal(a, p) for a, p in zip(found, begun.parameters(), strict=True))
