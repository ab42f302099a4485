"""What every oracle has: R copies of the parameters as lists in one process, an inner optimizer for
each, the clock, the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

Tensors = dict[str, torch.Tensor]
Gradients = dict[str, "torch.Tensor | None"]
Inner = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def due(t: int, period: int, offset: int = 0) -> bool:
    """Whether a channel acts at step t = 0, 1, 2, ..."""
    return t + 1 > offset and (t + 1 - offset) % period == 0


def warmed(momentum: float, warmup: int, number: int) -> float:
    """Outer momentum of round 1, 2, ...: it rises linearly from 0 over `warmup` rounds."""
    return momentum if warmup == 0 else momentum * min(1.0, (number - 1) / warmup)


def mean(
    values: Sequence[torch.Tensor], weights: Sequence[float], only_senders: bool = False
) -> torch.Tensor:
    """Weighted mean over replicas, or at each position over the replicas whose value there is not
    zero; added in order.
    """
    total, weight = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for value, w in zip(values, weights, strict=True):
        total = total + w * value
        weight = weight + (w * (value != 0) if only_senders else w)
    return total / torch.where(weight == 0, 1.0, weight)


class Replicas:
    """R copies of the parameters, each with an inner optimizer of its own.

    Args:
        params: name -> full tensor, where all replicas start.
        inner: makes an inner optimizer from a list of parameters.
        shards: processes per replica, over which FSDP2 would shard dim 0.
        clip, clip_over: largest gradient norm; of each replica's own, or one factor from the root
            mean square of all ("islands").
        schedule: factor of the inner learning rate at step t.
    """

    def __init__(
        self,
        params: Tensors,
        replicas: int,
        inner: Inner,
        shards: int = 1,
        clip: float | None = None,
        clip_over: str = "replica",
        schedule: Callable[[int], float] | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        self.R = replicas
        self.S = shards
        self.clip = clip
        self.clip_over = clip_over
        self.schedule = schedule
        self.t = 0
        self.theta: list[Tensors] = [
            {n: p.detach().to(dtype).clone().requires_grad_() for n, p in params.items()}
            for _ in range(replicas)
        ]
        self.inner = [inner(list(theta.values())) for theta in self.theta]
        self.rates = [[g["lr"] for g in optimizer.param_groups] for optimizer in self.inner]
        self.weights = [1.0] * replicas
        self.margin = math.inf

    def inner_step(self, r: int, grads: Gradients) -> None:
        """One step of replica r's own optimizer."""
        for name, p in self.theta[r].items():
            g = grads.get(name)
            p.grad = None if g is None else g.to(p.dtype).clone()
        factor = self.schedule(self.t) if self.schedule else 1.0
        for group, rate in zip(self.inner[r].param_groups, self.rates[r], strict=True):
            group["lr"] = rate * factor
        self.inner[r].step()

    def lr(self, r: int, name: str) -> float:
        """What `inner_step` will set for a parameter at this step."""
        factor = self.schedule(self.t) if self.schedule else 1.0
        groups = zip(self.inner[r].param_groups, self.rates[r], strict=True)
        return next(
            rate * factor
            for group, rate in groups
            if any(p is self.theta[r][name] for p in group["params"])
        )

    def local_steps(self, grads: list[Gradients]) -> None:
        """Every replica clips its own gradient and takes its own step."""
        for r, own in enumerate(self.clipped_all(grads)):
            self.inner_step(r, own)

    def clipped(self, grads: Gradients, norm: float | None = None) -> Gradients:
        """Gradients scaled so that their norm over all parameters (or the given one) is at most
        `clip`.
        """
        if self.clip is None:
            return grads
        scale = min(1.0, self.clip / ((self.norm(grads) if norm is None else norm) + 1e-6))
        return {n: None if g is None else g * scale for n, g in grads.items()}

    def clipped_all(self, grads: list[Gradients]) -> list[Gradients]:
        """Each replica's gradients, clipped by its own norm or by the root mean square of all
        norms.
        """
        common = (
            math.sqrt(sum(self.norm(g) ** 2 for g in grads) / self.R)
            if self.clip_over == "islands"
            else None
        )
        return [self.clipped(g, common) for g in grads]

    @staticmethod
    def norm(grads: Gradients) -> float:
        """Euclidean norm over all parameters."""
        return math.sqrt(
            sum(float((g.double() ** 2).sum()) for g in grads.values() if g is not None)
        )

    def zeros(self) -> list[Tensors]:
        """Per replica, a zero for every parameter."""
        return [
            {n: torch.zeros_like(p, requires_grad=False) for n, p in theta.items()}
            for theta in self.theta
        ]

    def now(self, r: int) -> Tensors:
        """A copy of replica r's parameters."""
        return {n: p.detach().clone() for n, p in self.theta[r].items()}

    def with_zeros(self, grads: Gradients) -> Tensors:
        """Gradients in the parameters' dtype, a missing one replaced by zero."""
        out = {}
        for n, p in self.theta[0].items():
            g = grads.get(n)
            out[n] = torch.zeros_like(p, requires_grad=False) if g is None else g.to(p.dtype)
        return out
