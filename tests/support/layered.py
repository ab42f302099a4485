"""Models with numbered layers, and a training loop that also does schedules, accumulation and
recording.

`Layered` is the probe with layers: its loss is the sum of <p, G_p>, so that gradients are given
from outside and exact. `Small` is a real model with a real loss, for computing in bf16; its
gradients are recorded, since they depend on the parameters and on the sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_demo

from . import probe

Tensors = dict[str, torch.Tensor]
LAYERS = 5
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (40, 50),
    **{f"layers.{i}.{part}": shape
        for i in range(LAYERS) for part, shape in (("weight", (66, 64)), ("bias", (9,)))},
    "norm.weight": (33,),
    "head.weight": (30, 70),
}  # fmt: skip


class Layer(nn.Module):
    """A matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(SHAPES[f"layers.0.{part}"])) for part in ("weight", "bias")
        )

    def forward(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (self.weight * weight).sum() + (self.bias * bias).sum()


class Layered(nn.Module):
    """loss(G) = sum over the parameters of <p, G[p]>."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (
            probe.Held(SHAPES[f"{n}.weight"]) for n in ("embed", "norm", "head")
        )
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        with torch.no_grad():
            for n, p in self.named_parameters():
                p.copy_(probe.integers((seed, n), p.shape))

    def forward(self, g: Tensors) -> torch.Tensor:
        total = sum(getattr(self, n)(g[f"{n}.weight"]) for n in ("embed", "norm", "head"))
        return total + sum(
            layer(g[f"layers.{i}.weight"], g[f"layers.{i}.bias"])
            for i, layer in enumerate(self.layers)
        )


@dataclass(frozen=True)
class Given:
    """A model whose gradients are given: how it is made, and what each process of 2 of an island
    feeds.
    """

    make: Callable[[int], nn.Module]
    gradient: Callable[[int, int, int, int], Tensors]

    def start(self, seed: int) -> Tensors:
        """The initial parameters that are not frozen."""
        return {
            n: p.detach().clone() for n, p in self.make(seed).named_parameters() if p.requires_grad
        }

    def island_gradient(self, seed: int, t: int, island: int) -> Tensors:
        """The exact mean gradient of an island."""
        a, b = (self.gradient(seed, t, island, p) for p in (0, 1))
        return {n: (a[n] + b[n]) / 2 for n in a}

    def feed(self, seed: int) -> Callable[..., torch.Tensor]:
        """For `train`: the loss of one micro-batch of `micro`. Two have 1/4 and 3/4 of the
        gradient, which adds up exactly.
        """

        def loss(model: nn.Module, me: Any, t: int, m: int, micro: int) -> torch.Tensor:
            g = (
                self.gradient(seed, t, me.island, me.proc)
                if me.procs > 1
                else self.island_gradient(seed, t, me.island)
            )
            share = {(1, 0): 1.0, (2, 0): 0.25, (2, 1): 0.75}[micro, m]
            return model({n: share * x for n, x in g.items()})

        return loss


def _layered_gradient(seed: int, t: int, island: int, proc: int) -> Tensors:
    return {n: probe.integers((seed, t, island, proc, n), shape) for n, shape in SHAPES.items()}


PROBE = Given(probe.Probe, probe.gradient)
LAYERED = Given(Layered, _layered_gradient)


class Block(nn.Module):
    """x + down(tanh(up(x)))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Small(nn.Module):
    """Tokens to logits: embedding, two layers, norm, head."""

    def __init__(self, seed: int = 0, words: int = 50, width: int = 64, inner: int = 96) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList([Block(width, inner) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def small_loss(bf16: bool) -> Callable[..., torch.Tensor]:
    """For `train`: cross-entropy of `Small` on random pairs of tokens; in bf16 under autocast, or
    by FSDP2's policy.
    """

    def loss(model: nn.Module, me: Any, t: int, m: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * t + 100 * m + 10 * me.island + me.proc)
        tokens = torch.randint(50, (64,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16 and me.procs == 1):
            logits = model(tokens)
        return nn.functional.cross_entropy(logits.float(), tokens.roll(1)) / micro

    return loss


def shard(model: nn.Module, me: Any, bf16: bool) -> None:
    """FSDP2 over the island's processes, two layers as units of their own."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bf16
        else MixedPrecisionPolicy()
    )
    mesh = me.mesh()
    for layer in getattr(model, "layers", [])[:2]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def train(
    me: Any,
    model: nn.Module,
    config: fsdp_demo.ExchangeConfig,
    inner: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[..., torch.Tensor],
    steps: int,
    sharded: bool = True,
    bf16: bool = False,
    micro: int = 1,
    schedule: Callable[[int], float] | None = None,
    record: bool = False,
    end: Callable[[fsdp_demo.Exchange], Any] | None = None,
    equal: Callable[[int], bool] = lambda t: True,
) -> dict[str, Any]:
    """Train on this rank; the full parameters after every step, whether they were equal on all
    replicas (asked where `equal(t)`), and, if `record`, gradients and parameters right before
    and after each inner step ("grads", "before", "after").

    `inner` gets the named parameters. `end` may drain or finish the exchange; the parameters
    afterwards are in "final".
    """
    sharded = sharded and me.procs > 1
    if sharded:
        shard(model, me, bf16)
    optimizer = inner(model.named_parameters())
    history: dict[str, list[Tensors]] = {"params": [], "grads": [], "before": [], "after": []}

    hooks: list[Any] = []

    def before_step(*_: Any) -> None:
        if hooks:
            history["grads"].append(
                {n: _local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            )
            history["before"].append(probe.parts(model))

    def after_step(*_: Any) -> None:
        if hooks:
            history["after"].append(probe.parts(model))

    # Before attach, so that these hooks see what the exchange has not touched yet; steps that
    # attach takes do not count.
    handles = [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
    ]
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    hooks += handles if record else []
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule else None
    out: dict[str, Any] = {"equal": []}
    for t in range(steps):
        for m in range(micro):
            loss(model, me, t, m, micro).backward()
        if me.procs > 1 and not sharded:
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= me.procs
        optimizer.step()
        optimizer.zero_grad()
        if rates:
            rates.step()
        history["params"].append(probe.parts(model))
        out["equal"].append(exchange.digests_equal() if equal(t) else None)
    hooks.clear()
    if end:
        end(exchange)
        out["final"] = probe.parts(model)
    out["metrics"] = exchange.metrics()
    out["drift"] = exchange.drift
    out["final_equal"] = exchange.digests_equal() if end else None
    exchange.detach()
    every = [*history["params"], *([out["final"]] if end else [])]
    whole = probe.complete(every, me if sharded else None)
    out["params"] = whole[:steps]
    if end:
        out["final"] = whole[-1]
    if record:
        out |= {
            k: probe.complete(history[k], me if sharded else None)
            for k in ("grads", "before", "after")
        }
    return out


def _local(t: torch.Tensor) -> torch.Tensor:
    return (t.to_local() if hasattr(t, "to_local") else t).detach().clone()
