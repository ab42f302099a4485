"""Eager updates (Kale et al., arXiv 2502.12996) as the paper writes them: every replica has an
outer optimizer of its own.
"""

from __future__ import annotations

from typing import Any

from .replicas import Gradients, Replicas, due, mean


class Eager(Replicas):
    """Every `period` steps each replica's outer optimizer takes a step on the mean delta of the
    round before, in which its own delta then is replaced by the fresh one.

    A delta is the way of the parameters in a round. In the first round nothing has come from the
    others: the outer optimizers step, and the parameters stay where they are until the second.

    Args:
        share: of the own delta in the mean: 1/R.
        dampening: the delta joins the momentum by 1 - dampening.
    """

    def __init__(
        self,
        *args: Any,
        period: int,
        share: float,
        lr: float = 0.7,
        momentum: float = 0.9,
        dampening: float = 0.0,
        **kw: Any,
    ):
        super().__init__(*args, **kw)
        self.period, self.share, self.lr, self.momentum = period, share, lr, momentum
        self.dampening = dampening
        self.outer = [self.now(r) for r in range(self.R)]
        self.begun, self.m, self.before = self.outer, self.zeros(), self.zeros()

    def step(self, grads: list[Gradients]) -> None:
        self.local_steps(grads)
        self.t += 1
        if not due(self.t - 1, self.period):
            return
        number = self.t // self.period
        delta = [
            {n: p - self.theta[r][n].detach() for n, p in begun.items()}
            for r, begun in enumerate(self.begun)
        ]
        for n in self.theta[0]:
            late = mean([b[n] for b in self.before], self.weights)
            for r in range(self.R):
                eager = late + self.share * (delta[r][n] - self.before[r][n])
                self.m[r][n] = self.momentum * self.m[r][n] + (1 - self.dampening) * eager
                nesterov = eager + self.momentum * self.m[r][n]
                self.outer[r][n] = self.outer[r][n] - self.lr * nesterov
                if number > 1:
                    self.theta[r][n].data.copy_(self.outer[r][n])
        self.before, self.begun = delta, [self.now(r) for r in range(self.R)]
