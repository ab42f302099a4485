"""The damped outer step: other papers' forms of it, and none of it at 0."""

from __future__ import annotations

import pytest
import torch

from fsdp_demo.channels.apply import outer_step


def means(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(50, generator=g, dtype=dtype) for _ in range(20)]


@pytest.mark.parametrize("c, a", [(0.7, 0.9934), (0.7, 0.936), (0.5, 0.8)])
def test_damped_step_is_gpa(c: float, a: float) -> None:
    """The settings that docs/methods.md maps GPA's c and a to give its y, round for round."""
    anchor = torch.zeros(50, dtype=torch.float64)
    z, x, m = anchor.clone(), anchor.clone(), anchor.clone()
    damped = 1 - c * (1 - a) / ((1 - c) * a)
    for u in means():
        z = z - u
        x = a * x + (1 - a) * z
        outer_step(anchor, m, u.clone(), a, True, 1 - c, damped)
        assert torch.allclose(anchor, c * x + (1 - c) * z, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mu", [0.5, 0.9])
def test_damped_step_is_qhm(mu: float) -> None:
    """A dampening of mu with Nesterov is QHM with nu = mu / (1 + mu) at (1 + mu) times the rate."""
    anchor = torch.zeros(50, dtype=torch.float64)
    theta, m, slow = anchor.clone(), anchor.clone(), anchor.clone()
    for u in means():
        slow = mu * slow + (1 - mu) * u
        theta = theta - 0.7 * (1 + mu) * (u + mu * slow) / (1 + mu)
        outer_step(anchor, m, u.clone(), mu, True, 0.7, mu)
        assert torch.allclose(anchor, theta, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("nesterov", [True, False])
def test_damped_step_by_0_is_sgd_of_torch(nesterov: bool) -> None:
    """Without dampening the anchor has the bits of torch.optim.SGD, every round."""
    p = torch.nn.Parameter(torch.ones(50))
    sgd = torch.optim.SGD([p], lr=0.7, momentum=0.9, nesterov=nesterov)
    anchor, m = torch.ones(50), torch.zeros(50)
    for u in means(torch.float32):
        p.grad = u.clone()
        sgd.step()
        outer_step(anchor, m, u.clone(), 0.9, nesterov, 0.7, 0.0)
        assert torch.equal(anchor, p.detach())
