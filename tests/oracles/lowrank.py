"""LoRDO (arXiv 2602.04396) as `LowRankAdamW` and an outer step do it, on whole matrices in fp64:
one replica after the other, column by column.
"""

from __future__ import annotations

from typing import Any

import torch

from .replicas import Gradients, Replicas, Tensors, due, mean

Matrix = torch.Tensor


def orthonormal(columns: Matrix) -> Matrix:
    """Gram and Schmidt's, twice: the columns one after the other, less what is in those before."""
    out: list[Matrix] = []
    for column in columns.T.double():
        for _ in range(2):
            for before in out:
                column = column - (before @ column) * before
        out.append(column / column.norm())
    return torch.stack(out, 1)


def first(columns: int, rank: int) -> Matrix:
    """The first projection: that of numbers drawn with the seed `columns`."""
    seed = torch.Generator().manual_seed(columns)
    found = torch.randn(columns, rank, generator=seed, dtype=torch.float64)
    return orthonormal(found)


def iterated(change: Matrix, basis: Matrix, times: int = 2) -> Matrix:
    """Subspace iteration with the matrix change^T change."""
    for _ in range(times):
        found = change.T @ change @ basis
        norm = found.norm()
        basis = orthonormal((found / norm if norm else found) + 1e-6 * basis)
    return basis


class LowRank(Replicas):
    """Local steps, and every `period` steps the mean change of the parameters.

    Args:
        states: as in `Averaging`. rank: matrices with more columns are projected.
        rate, betas, nu, eps, decay, error_feedback: of the inner optimizer, `inner` is not used.
        lr, momentum: of the outer step.
    """

    def __init__(
        self,
        *args: Any,
        period: int,
        rank: int,
        states: dict[str, int] | None = None,
        rate: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        nu: float = 0.8,
        eps: float = 1e-8,
        decay: float = 0.1,
        error_feedback: bool = False,
        lr: float = 1.0,
        momentum: float = 0.0,
        **kw: Any,
    ):
        super().__init__(*args, **kw)
        self.period, self.states, self.outer = period, states or {}, (lr, momentum)
        self.rate, self.betas, self.nu, self.eps, self.decay = rate, betas, nu, eps, decay
        self.feedback, start = error_feedback, self.theta[0]
        self.q = {
            n: first(p.shape[1], rank)
            for n, p in start.items()
            if p.ndim == 2 and rank < p.shape[1]
        }
        self.kept: list[dict[str, Tensors]] = [
            {n: self.fresh(n, p.detach()) for n, p in start.items()} for _ in range(self.R)
        ]
        self.counts = [dict.fromkeys(start, 0) for _ in range(self.R)]
        self.anchor = self.now(0)
        self.outer_m = {n: torch.zeros_like(p) for n, p in self.anchor.items()}

    def fresh(self, name: str, p: Matrix) -> Tensors:
        low = torch.zeros(p.shape[0], self.q[name].shape[1]).double() if name in self.q else 0 * p
        return {"exp_avg": low, "exp_avg_sq": low.clone(), "error": 0 * p}

    def inner_step(self, r: int, grads: Gradients) -> None:
        for name, p in self.theta[r].items():
            if (g := grads.get(name)) is not None:
                self.counts[r][name] += 1
                p.data.copy_(self.moved(r, name, p.data, g.double()))

    def moved(self, r: int, name: str, p: Matrix, g: Matrix) -> Matrix:
        kept, t, (b1, b2) = self.kept[r][name], self.counts[r][name], self.betas
        projection = self.q.get(name)
        source = g
        if projection is not None:
            source = (g + kept["error"]) @ projection
            if self.feedback:
                kept["error"] = g + kept["error"] - source @ projection.T
        kept["exp_avg"] = b1 * kept["exp_avg"] + (1 - b1) * source
        kept["exp_avg_sq"] = b2 * kept["exp_avg_sq"] + (1 - b2) * source**2
        u, v = kept["exp_avg"] / (1 - b1**t), kept["exp_avg_sq"] / (1 - b2**t)
        step = u / (v.sqrt() + self.eps)
        if projection is not None:
            row = v.mean(1, keepdim=True).sqrt() + self.eps
            step = (1 - self.nu) * g / row + self.nu * step @ projection.T
        return p * (1 - self.rate * self.decay) - self.rate * step

    def step(self, grads: list[Gradients]) -> None:
        self.local_steps(grads)
        before, (lr, mu) = dict(self.anchor), self.outer
        if exchanged := due(self.t, self.period):
            for n, anchor in self.anchor.items():
                delta = mean(
                    [anchor - self.theta[r][n].detach() for r in range(self.R)], self.weights
                )
                m = self.outer_m[n] = mu * self.outer_m[n] + delta
                self.anchor[n] = anchor - lr * (delta + mu * m if mu else delta)
                for theta in self.theta:
                    theta[n].data.copy_(self.anchor[n])
        for state, period in self.states.items():
            for n in self.anchor if due(self.t, period) else ():
                average = mean([kept[n][state] for kept in self.kept], self.weights)
                for kept in self.kept:
                    kept[n][state] = average.clone()
        for n in self.q if exchanged else ():
            self.turn(n, iterated(before[n] - self.anchor[n], self.q[n]))
        self.t += 1

    def turn(self, name: str, basis: Matrix) -> None:
        """Moments in the new basis; a direction that was not there has the mean of the row."""
        turn = self.q[name].T @ basis
        for kept in self.kept:
            u, v = kept[name]["exp_avg"], kept[name]["exp_avg_sq"]
            kept[name]["exp_avg"] = u @ turn
            new = v.mean(1, keepdim=True) * (1 - (turn**2).sum(0)).clamp_min(0)
            kept[name]["exp_avg_sq"] = v @ turn**2 + new
        self.q[name] = basis
