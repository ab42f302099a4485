"""Exchanges on a real GPU: two replicas share it, as threads. They must agree bit for bit, come to
what the CPU comes to, and make no step wait for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_demo
from fsdp_demo import Topology, preset

from ..support import threaded
from ..support.threaded import islands, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU, BACKEND = "cuda", "nccl"
SHAPES = {"q": (256, 192), "up": (320, 192), "odd": (187, 70), "flat": (9000,), "norm": (192,)}
OWN = {"inner_optimizers": "as_is"}
CASES = {
    "full": preset("full"),
    "demo": preset("demo"),
    "demo late": preset("demo", **{"schedule.delay": 2}),
    "demo plain": preset("demo", transform=False, topk=128),
    "random": preset("random"),
    "stride": preset("stride"),
    **{f"diloco {code}": preset("diloco", period=2, value_dtype=code, **OWN)
        for code in ("fp32", "bf16", "int8", "int4", "2bit", "1bit")},
    "diloco late": preset("diloco", period=2, **OWN, **{"schedule.delay": 1, "applier.mix": 0.5}),
    "streaming_diloco": preset("streaming_diloco", period=6, delay=2, layers=1, **OWN),
    "decoupled_momentum": preset("decoupled_momentum", period=2, **OWN),
    "sparse_loco": preset("sparse_loco", period=2, **OWN),
    "sign_loco": preset("sign_loco", period=2, momentum_warmup=1, **OWN),
    "desloc": preset("desloc", period=2),
    "muloco": preset("muloco", period=2),
}  # fmt: skip


def train(config, device, steps=12, dtype=torch.float32) -> Callable[[int, Topology], Any]:
    """Two islands on gradients of noise; what each ends with, on the CPU."""

    def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    def island(i: int, topology: Topology) -> Any:
        model = nn.Module()
        model.layers = nn.ModuleList(
            nn.ParameterDict({name: nn.Parameter(draw(s, n))})
            for n, (name, s) in enumerate(SHAPES.items())
        )
        optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr=0.01)
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology)
        for t in range(steps):
            for n, p in enumerate(model.parameters()):
                p.grad = draw(tuple(p.shape), 1000 * t + 10 * n + i + 1)
            optimizer.step()
        exchange.finish()
        return {n: p.detach().cpu() for n, p in model.named_parameters()}

    return island


@pytest.mark.parametrize("name", CASES)
def test_gpu_replicas_agree_and_equal_cpu(name: str) -> None:
    """Replicas on a GPU agree bit for bit and come to what the CPU comes to. Products of matrices
    add up in another order there. Where that chooses other coefficients, single values differ by a
    step; the most must be as on the CPU.
    """
    a, b = values(islands(train(CASES[name], GPU), timeout=60))
    c, _ = values(islands(train(CASES[name], "cpu"), timeout=60))
    assert all(torch.equal(a[n], b[n]) for n in a)
    near = {n: torch.isclose(a[n], c[n], rtol=1e-3, atol=2e-3).float().mean().item() for n in a}
    assert min(near.values()) > 0.98, near


@pytest.mark.parametrize("name", ["demo", "diloco fp32"])
def test_gpu_bf16_parameters(name: str) -> None:
    """Replicas with bf16 parameters agree on a GPU."""
    a, b = values(islands(train(CASES[name], GPU, dtype=torch.bfloat16), timeout=60))
    assert all(torch.equal(a[n], b[n]) and a[n].isfinite().all() for n in a)


@pytest.mark.parametrize("name", ["full", "demo", "demo late", "diloco fp32", "diloco late"])
def test_gpu_step_without_sync(name: str) -> None:
    """No step waits for the device. torch raises where a thread would wait for the stream. The
    first steps may: constants are made.
    """
    together = threading.Barrier(2)

    def island(i: int, topology: Topology) -> Any:
        torch.manual_seed(i)
        config = CASES[name]
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
        optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr=1e-3)
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology)
        gradients = [torch.randn_like(p) for p in model.parameters()]
        for t in range(10):
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g.clone()
            if t == 4:
                together.wait()
                torch.cuda.set_sync_debug_mode("error")  # of the whole process
            optimizer.step()
        together.wait()
        torch.cuda.set_sync_debug_mode("default")
        exchange.finish()
        return exchange.step

    try:
        assert values(islands(island, timeout=60)) == [10, 10]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["demo late", "diloco fp32"])
def test_gpu_fsdp2_shards_nccl(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of FSDP2 under NCCL are exchanged. A world of one rank: two ranks of one world cannot
    share a GPU.
    """
    monkeypatch.setattr(threaded, "warm", lambda: None)  # makes a world of its own
    dist.init_process_group(BACKEND, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    mesh = dist.init_device_mesh(GPU, (1,))

    def island(i: int, topology: Topology) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(GPU)
        fully_shard(model, mesh=mesh)
        optimizer = fsdp_demo.base_optimizer(CASES[name], model.named_parameters(), lr=1e-3)
        exchange = fsdp_demo.attach(optimizer, CASES[name], model=model, topology=topology)
        for t in range(6):
            model(torch.full((8, 256), 0.1 * (i + t), device=GPU)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        exchange.finish()
        return [p.full_tensor().detach().cpu() for p in model.parameters()]

    try:
        a, b = values(islands(island, timeout=60))
        assert all(map(torch.equal, a, b))
    finally:
        dist.destroy_process_group()
