"""The rule of `sign_loco`, written from its five lines alone, with a choice and a scale of its own.

Every H steps, from the anchor a, over blocks of 4096 values in a row:

    D_r = a - theta_r;  e_r = beta e_r + D_r
    I_r = the k largest of |e_r| of a block;  s_r = mean |e_r[I_r]| of it;  q_r = s_r sign(e_r[I_r])
    e_r[I_r] -= q_r, where beta > 0
    u = mean of q over those that sent;  M = mu M + u;  a -= lr (u + mu M);  theta_r = a

What is sent at step `switch` or later has beta = 1, u = (1 / R) sum of q, and a -= late_lr u; M is
of no use any more.

mu rises linearly from 0 over the first rounds. What is in no block travels whole in bf16, as the
scales do, and is averaged over all replicas.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .blocks import cut, shard_rows
from .quantise import bf16
from .replicas import Gradients, Replicas, Tensors


class SignLoCo(Replicas):
    """`delay`: an exchange acts so many steps after it was made; less than the period.

    `margin` is the smallest of the choices and of the scales: how far the mean was from the number
    that would round to another bf16.
    """

    def __init__(
        self,
        *args: Any,
        period: int = 5,
        k: int = 90,
        beta: float = 0.6,
        lr: float = 0.7,
        momentum: float = 0.5,
        rise: int = 48,
        delay: int = 0,
        switch: int = 0,
        late_lr: float = 1.5,
        late_k: int | None = None,
        **kw: Any,
    ):
        super().__init__(*args, **kw)
        self.switch, self.late_lr, self.late_k = switch or 1 << 30, late_lr, late_k or k
        self.period, self.k, self.beta, self.delay = period, k, beta, delay
        self.lr, self.momentum, self.rise = lr, momentum, rise
        start = self.now(0)
        self.a = start
        self.M = {n: torch.zeros_like(p) for n, p in start.items()}
        self.e = [{n: torch.zeros_like(p) for n, p in start.items()} for _ in range(self.R)]
        self.rounds = 0
        self.due: dict[int, tuple[Tensors, bool]] = {}

    @property
    def late(self) -> bool:
        """Whether what is sent now is sent at step `switch` or later; steps count from 0."""
        return self.t - 1 >= self.switch

    def step(self, grads: list[Gradients]) -> None:
        self.local_steps(grads)
        self.t += 1
        if self.t % self.period == 0:
            self.due[self.t + self.delay] = {n: self.exchanged(n) for n in self.a}, self.late
        if self.t in self.due:
            self.outer(*self.due.pop(self.t))

    def exchanged(self, name: str) -> torch.Tensor:
        """u of one tensor: each shard has blocks of its own."""
        beta = 1.0 if self.late else self.beta
        for r, e in enumerate(self.e):
            e[name] = beta * e[name] + (self.a[name] - self.theta[r][name].detach())
        shards = [shard_rows(e[name], self.S) for e in self.e]
        out = []
        for of_all in zip(*shards, strict=True):
            sent = [self.sent(x.reshape(-1)) for x in of_all]
            for x, (q, _) in zip(of_all, sent, strict=True):
                x -= q.reshape(x.shape) if beta > 0 else x  # without beta nothing is kept
            total = sum(q for q, _ in sent)
            senders = sum(who.to(total.dtype) for _, who in sent)
            by = self.R if self.late else senders.clamp(min=1)
            out.append((total / by).reshape(of_all[0].shape))
        return torch.cat(out)

    def sent(self, e: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q of one shard, and where it was sent (flat)."""
        q, who = torch.zeros_like(e), torch.zeros(len(e), dtype=torch.bool)
        blocks, rest = cut((len(e),), flat=True)
        for block in blocks:
            places = block.reshape(-1).tolist()
            size = {p: abs(float(e[p])) for p in places}
            order = sorted(places, key=lambda p: (-size[p], p))
            k = math.ceil((self.late_k if self.late else self.k) * len(places) / 4096)
            mean = math.fsum(size[p] for p in order[:k]) / k
            self.clear(size[order[k - 1]] - size[order[k]], size[order[0]])
            near = {bf16(mean * (1 + x)) for x in (-(2**-18), 2**-18)}
            self.clear(2.0 - len(near), 1.0)
            for p in order[:k]:
                q[p], who[p] = math.copysign(bf16(mean), float(e[p])), size[p] > 0
        for p in rest.tolist():
            q[p], who[p] = bf16(float(e[p])), True
        return q, who

    def clear(self, distance: float, of: float) -> None:
        if of:
            self.margin = min(self.margin, distance / of)

    def outer(self, u: Tensors, late: bool) -> None:
        """The Nesterov step, or the plain one; everybody goes on from the anchor."""
        mu = self.momentum * min(1.0, self.rounds / self.rise) if self.rise else self.momentum
        self.rounds += 1
        for n, a in self.a.items():
            self.M[n] = mu * self.M[n] + u[n]
            a -= self.late_lr * u[n] if late else self.lr * (u[n] + mu * self.M[n])
            for theta in self.theta:
                theta[n].data.copy_(a)
