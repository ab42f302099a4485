"""AdamW with quasi-hyperbolic momentum (MT-DAO, arXiv 2510.05361), in plain numbers of float64."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def qhadamw(
    start: torch.Tensor,
    gradients: Iterable[torch.Tensor],
    lr: float,
    b1: float,
    b2: float,
    nu: float,
    eps: float,
    decay: float,
) -> torch.Tensor:
    """The parameter after a step on each of the gradients, one element after the other."""
    steps = [g.double().reshape(-1).tolist() for g in gradients]
    out = []
    for i, theta in enumerate(start.double().reshape(-1).tolist()):
        for t in range(1, len(steps) + 1):
            past = [steps[s][i] for s in range(t)]  # the newest last
            m = sum((1 - b1) * b1 ** (t - 1 - s) * g for s, g in enumerate(past)) / (1 - b1**t)
            v = sum((1 - b2) * b2 ** (t - 1 - s) * g * g for s, g in enumerate(past)) / (1 - b2**t)
            theta -= lr * decay * theta
            theta -= lr * ((1 - nu) * past[-1] + nu * m) / (v**0.5 + eps)
        out.append(theta)
    return torch.tensor(out, dtype=torch.float64).reshape(start.shape)
