"""A model whose gradients are given from outside, on every kind of parameter, and the loop that
trains it for real.

The loss is the sum of <p, G_p>, so the gradient of p is G_p whatever the parameters are. The G are
multiples of 2^-18 in [-2, 2]: means over two or four processes are exact in fp32, so a replica's
gradient does not depend on how it is sharded.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_demo

from .ranks import encode

SHAPES = {
    # 64 x 64 blocks with edges of 60 and 58; halves are flat blocks with a tail
    "layer.weight": (124, 122),
    "aligned.weight": (128, 128),  # halves fall on block edges
    "odd.weight": (131, 70),  # flat: 2 blocks, a tail, dense elements; uneven shards
    "embed.weight": (100, 50),  # no transform
    "tied.weight": (67, 3),  # used twice; dense
    "bias": (5,),
    "one": (1,),  # an empty shard
    "unused": (3, 3),  # never a gradient
    "sometimes": (6, 2),  # a gradient on replica 0 only
    "frozen": (4, 4),
}
PLAIN_EMBEDDINGS = {
    "momentum.no_transform": ["*embed*", "*wte*", "*wpe*", "*lm_head*"]
}  # a change of `demo`: a tensor that is not transformed
TRAINED = [n for n in SHAPES if n not in ("unused", "frozen")]


class Held(nn.Module):
    """One tensor in a module of its own."""

    def __init__(self, shape: tuple[int, ...] | None = None, tied: nn.Parameter | None = None):
        super().__init__()
        self.weight = tied if tied is not None else nn.Parameter(torch.empty(shape))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return (self.weight * g).sum()


class Probe(nn.Module):
    """loss(G) = sum over the parameters of <p, G[p]>."""

    def __init__(self, seed: int = 0, only: list[str] | None = None):
        super().__init__()
        for name, shape in SHAPES.items():
            if only is not None and name not in only:
                continue
            if "." in name:
                setattr(self, name.split(".")[0], Held(shape))
            else:
                setattr(self, name, nn.Parameter(torch.empty(shape)))
        if hasattr(self, "tied"):
            self.again = Held(tied=self.tied.weight)
        if hasattr(self, "frozen"):
            self.frozen.requires_grad_(False)
        with torch.no_grad():
            for n, p in self.named_parameters():
                p.copy_(integers((seed, n), p.shape))

    def forward(self, g: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for name, value in g.items():
            if name == "tied.weight":
                total = total + self.tied(value / 4) + self.again(value * 3 / 4)
            elif "." in name:
                total = total + getattr(self, name.split(".")[0])(value)
            else:
                total = total + (getattr(self, name) * value).sum()
        return total


def integers(key: Any, shape: Any) -> torch.Tensor:
    """A tensor of multiples of 2^-18 in [-2, 2] that depends on `key` only (and on torch's integer
    generator).
    """
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6], "little")
    return (
        torch.randint(
            -(2**19), 2**19 + 1, tuple(shape), generator=torch.Generator().manual_seed(seed)
        ).float()
        / 2**18
    )


def gradient(
    seed: int, t: int, island: int, proc: int, names: list[str] | None = None
) -> dict[str, torch.Tensor]:
    """What process `proc` of 2 of an island feeds at step t."""
    chosen = [n for n in (names or TRAINED) if n != "sometimes" or island == 0]
    return {n: integers((seed, t, island, proc, n), SHAPES[n]) for n in chosen}


def island_gradient(
    seed: int, t: int, island: int, names: list[str] | None = None
) -> dict[str, torch.Tensor]:
    """The mean gradient of an island, exact: the same whether one process computes it or two."""
    a, b = (gradient(seed, t, island, p, names) for p in (0, 1))
    return {n: (a[n] + b[n]) / 2 for n in a}


def shard(model: nn.Module, mesh: Any) -> None:
    """FSDP2 over the island's processes, one submodule as a unit of its own."""
    from torch.distributed.fsdp import fully_shard

    for name in ("layer", "odd"):
        if hasattr(model, name):
            fully_shard(getattr(model, name), mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full copies of all parameters (collective inside an island that is sharded)."""
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in model.named_parameters()
    }


def parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what this rank holds of every parameter."""
    return {
        n: (p.to_local() if hasattr(p, "to_local") else p).detach().clone()
        for n, p in model.named_parameters()
    }


def complete(
    history: list[dict[str, torch.Tensor]], me: Any | None
) -> list[dict[str, torch.Tensor]]:
    """Full tensors from the `parts` of all ranks of an island, for all steps at once (`me` None:
    they are whole already).
    """
    if me is None:
        return history
    every: list[Any] = [None] * me.procs
    dist.all_gather_object(every, encode(history))
    every = [pickle.loads(rank) for rank in every]
    return [
        {n: torch.cat([rank[t][n] for rank in every]) for n in step}
        for t, step in enumerate(history)
    ]


def backward(
    model: nn.Module, me: Any, t: int, seed: int, sharded: bool, names: list[str] | None = None
) -> None:
    """One micro-batch: the gradient of the island's mean arrives in `.grad`."""
    if me.procs == 1:
        g = island_gradient(seed, t, me.island, names)
    else:
        g = gradient(seed, t, me.island, me.proc, names)
    model(g).backward()
    if me.procs > 1 and not sharded:
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= me.procs


class Job:
    """A probe on this rank with its optimizer and its exchange, for loops of a test's own. Each has
    a run id of its own, so that a rank may have one after another.

    mesh: of the island, where it is not that of its processes. options: of `attach`.
    """

    def __init__(
        self,
        me: Any,
        config: fsdp_demo.ExchangeConfig | str,
        inner: Callable[[Any], torch.optim.Optimizer],
        seed: int = 0,
        names: list[str] | None = None,
        sharded: bool = True,
        mesh: Any = None,
        **options: Any,
    ):
        if "ISLAND_RUN" in os.environ:
            os.environ["ISLAND_RUN"] += "+"
        self.me, self.seed, self.names = me, seed, names
        self.sharded = sharded and me.procs > 1
        self.model = Probe(seed, names)
        if self.sharded:
            shard(self.model, mesh or me.mesh())
        self.optimizer = inner(self.model.parameters())
        self.exchange = fsdp_demo.attach(self.optimizer, config, model=self.model, **options)

    def backward(self, t: int) -> None:
        """One micro-batch, as `backward`."""
        backward(self.model, self.me, t, self.seed, self.sharded, self.names)

    def step(self, t: int) -> None:
        """A backward and a step."""
        self.backward(t)
        self.end_step()

    def end_step(self) -> None:
        """A step of the optimizer on the gradients that are there."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, *t: int) -> None:
        """The steps of range(*t)."""
        for step in range(*t):
            self.step(step)

    def whole(self) -> dict[str, torch.Tensor]:
        """Full copies of all parameters."""
        return whole(self.model)


def train(
    me: Any,
    config: fsdp_demo.ExchangeConfig,
    inner: Callable[[Any], torch.optim.Optimizer],
    steps: int = 20,
    sharded: bool = True,
    seed: int = 0,
    names: list[str] | None = None,
    each: Callable[[int, fsdp_demo.Exchange], Any] | None = None,
    before: Callable[[int, fsdp_demo.Exchange], Any] | None = None,
    finish: bool = False,
) -> dict[str, Any]:
    """Train on this rank; returns the full parameters after every step, and what else tests look
    at.
    """
    job = Job(me, config, inner, seed, names, sharded)
    model, exchange = job.model, job.exchange
    out: dict[str, Any] = {"params": [], "equal": [], "each": []}
    for t in range(steps):
        job.backward(t)
        if before:
            before(t, exchange)
        job.end_step()
        out["params"].append(parts(model))
        out["equal"].append(exchange.digests_equal())
        out["each"].append(each(t, exchange) if each else None)
    out["metrics"] = exchange.metrics()
    out["params"] = complete(out["params"], me if job.sharded else None)
    if finish:
        exchange.finish()
        out["final"] = whole(model)
        out["drift"] = exchange.drift
        out["final_equal"] = exchange.digests_equal()
    else:
        exchange.detach()
    return out
