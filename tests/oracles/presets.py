"""The published methods on R replicas held as lists in one process, with nothing packed, sharded
over processes or sent.

Every class takes the initial parameters (name -> full tensor), the number of replicas and of shards
per replica, and a function that makes the inner optimizer; `step(grads)` takes one optimizer step,
grads[r][name] being the mean gradient of replica r (None: no gradient), and changes
`theta[r][name]`. All arithmetic is in `dtype` (float64 by default). `margin` is the smallest
relative distance of any top-k choice so far to its alternative: where it is far above the rounding
of fp32, an implementation in fp32 must have made the same choices.
"""

from __future__ import annotations

from typing import Any

import torch

from .averaging import Averaging, SelSync
from .dense import mean_of
from .eager import Eager
from .lowrank import LowRank
from .replicas import Gradients, Inner, Replicas, Tensors, due, mean, warmed
from .sparse import Coding, DecoupledMomentum, Demo, Shard, Sparse, SparseLoCo
from .streaming import MuLoCo, Streaming, fragments

__all__ = [
    "Averaging", "Coding", "DecoupledMomentum", "Demo", "DiLoCo", "Eager", "Full", "Gradients",
    "Inner", "LowRank", "MuLoCo", "Replicas", "SelSync", "Shard", "Sparse", "SparseLoCo",
    "Streaming", "Tensors", "due", "fragments", "mean",
]  # fmt: skip


class Full(Replicas):
    """The mean gradient over the replicas at every step, `delay` steps later; then clip; then the
    inner optimizer.
    """

    def __init__(self, *args: Any, delay: int = 0, code: str = "fp32", **kw: Any):
        super().__init__(*args, **kw)
        self.delay, self.code = delay, code
        self.flying: list[tuple[int, Tensors]] = []

    def step(self, grads: list[Gradients]) -> None:
        local = [self.with_zeros(g) for g in grads]
        names = [n for n in local[0] if any(g.get(n) is not None for g in grads)]
        every = mean_of(local, list(local[0]), self.S, self.code, self.weights)
        self.flying.append((self.t, {n: every[n] for n in names}))
        while self.flying and self.flying[0][0] + self.delay <= self.t:
            self.land()
        self.t += 1

    def land(self) -> None:
        average = self.clipped(self.flying.pop(0)[1])
        for r in range(self.R):
            self.inner_step(r, average)

    def flush(self) -> None:
        """Apply what is under way, one step of the inner optimizer for each."""
        while self.flying:
            self.land()


class DiLoCo(Replicas):
    """Every H steps a Nesterov step with the mean of anchor - theta as the gradient; 2311.08105."""

    def __init__(
        self,
        *args: Any,
        period: int = 500,
        lr: float = 0.7,
        momentum: float = 0.9,
        code: str = "fp32",
        warmup: int = 0,
        dampening: float = 0.0,
        **kw: Any,
    ):
        super().__init__(*args, **kw)
        self.dampening = dampening
        self.period = period
        self.lr = lr
        self.momentum = momentum
        self.code = code
        self.warmup = warmup
        self.anchor = {n: p.detach().clone() for n, p in self.theta[0].items()}
        self.m = {n: torch.zeros_like(a) for n, a in self.anchor.items()}

    def step(self, grads: list[Gradients]) -> None:
        self.local_steps(grads)
        if due(self.t, self.period):
            deltas = [
                {n: a - theta[n].detach() for n, a in self.anchor.items()} for theta in self.theta
            ]
            average = mean_of(deltas, list(self.anchor), self.S, self.code, self.weights)
            mu = warmed(self.momentum, self.warmup, (self.t + 1) // self.period)
            for name, anchor in self.anchor.items():
                m = self.m[name] = mu * self.m[name] + (1 - self.dampening) * average[name]
                anchor -= self.lr * (average[name] + mu * m)
                for theta in self.theta:
                    theta[name].data.copy_(anchor)
        self.t += 1

    def finish(self) -> None:
        """A part of a round: all replicas become their mean. Right after an exchange nothing
        changes.
        """
        if self.t % self.period:
            deltas = [
                {n: a - theta[n].detach() for n, a in self.anchor.items()} for theta in self.theta
            ]
            average = mean_of(deltas, list(self.anchor), self.S, self.code, self.weights)
            for name, anchor in self.anchor.items():
                anchor -= average[name]
                for theta in self.theta:
                    theta[name].data.copy_(anchor)
