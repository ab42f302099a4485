"""Optimizers under which another one takes the step, on gradients of another place: refused, or
noticed where nobody calls the step of what is attached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset

from ..support.two_layers import Net, alone, attached, equal, train

FULL = preset("full")
LOCAL = preset("diloco", period=2, clip=None, inner_optimizers="as_is")


class Sam(torch.optim.Optimizer):
    """Sharpness-aware, in both forms: `first_step` and `second_step`, or `step(closure)`."""

    def __init__(self, net: Net, inner: str = "base_optimizer"):
        super().__init__(net.parameters(), {"lr": 0.01})
        setattr(self, inner, torch.optim.SGD(self.param_groups, lr=0.01))
        self.inner = getattr(self, inner)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def perturb(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=0.01)
        self.zero_grad()

    @torch.no_grad()
    def go_back(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["before"])
        self.inner.step()

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        self.perturb()
        with torch.enable_grad():
            closure()
        self.go_back()


def hidden(net: Net) -> Sam:
    return Sam(net, "hidden")


class TwoSteps(Sam):
    def __init__(self, net: Net):
        super().__init__(net, "hidden")

    first_step, second_step = Sam.perturb, Sam.go_back


def both_forms(net: Net, optimizer: Any, steps: int = 4) -> list[torch.Tensor]:
    """Both forms in turns."""
    for t in range(steps):
        net.loss(t).backward()
        if t % 2:
            optimizer.step(lambda t=t: net.loss(t).backward())
        else:
            optimizer.perturb()
            net.loss(t).backward()
            optimizer.go_back()
        optimizer.zero_grad()
    return net.copies()


@pytest.mark.parametrize("config", [FULL, LOCAL], ids=["full", "diloco"])
def test_inner_step_of_sam_is_refused(config: Any) -> None:
    """SAM, and optimizers that step in two halves, are refused with a cure."""
    with pytest.raises(ValueError, match=r"Sam steps another optimizer, SGD.*\.base_optimizer"):
        attached(config, inner=Sam)
    with pytest.raises(ValueError, match="TwoSteps takes a step in two halves"):
        attached(config, inner=TwoSteps)


def test_inner_step_of_sam_by_its_base_optimizer() -> None:
    """SAM's base optimizer, attached, trains as without an exchange."""
    net, other = alone(), alone()
    optimizer = Sam(net)
    exchange = fsdp_demo.attach(optimizer.base_optimizer, FULL, model=net)
    assert equal(both_forms(net, optimizer), both_forms(other, Sam(other)))
    assert exchange.step == 4
    exchange.finish()


class Drops(torch.optim.SGD):
    def __init__(self, net: Net):
        super().__init__(net.parameters(), lr=0.01)

    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        return super().step(closure)


@pytest.mark.parametrize("inner", [hidden, Drops])
def test_inner_step_closure_behind_a_change_is_refused(inner: Any) -> None:
    """A closure behind a move of parameters, or behind zero_grad, is refused. No name tells of it:
    the closure was called ahead of the step, at other parameters.
    """
    net, optimizer, _ = attached(FULL, inner=inner)
    net.loss(0).backward()
    said = f"{type(optimizer).__name__} has moved parameters or dropped gradients"
    with pytest.raises(RuntimeError, match=said):
        optimizer.step(lambda: net.loss(0).backward())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    caplog.set_level(logging.WARNING, logger="fsdp_demo")
    return lambda: sum("was not called once" in r.getMessage() for r in caplog.records)


def test_inner_step_never_called_is_said_once(said: Callable[[], int]) -> None:
    """A step of the attached optimizer that is never called is said once."""
    net, optimizer, exchange = attached(LOCAL, inner=hidden)
    train(optimizer.inner, net.loss, 30)
    assert (exchange.step, said()) == (0, 1)
    with pytest.raises(ValueError, match="step.. of the attached optimizer was not called once"):
        exchange.finish()


def test_inner_step_counts_passes_of_kept_gradients(said: Callable[[], int]) -> None:
    """Gradients that are never dropped count by backward passes."""
    p = torch.nn.Parameter(torch.ones(2))
    exchange = fsdp_demo.attach(torch.optim.SGD([p], lr=0.1), FULL)
    for t in range(1000):
        assert (t, said()) == (t, 0)
        p.sum().backward()
    assert said() == 1
    exchange.detach()


def test_inner_step_warning_not_for_micro_batches(said: Callable[[], int]) -> None:
    """Micro-batches followed by steps cause no warning."""
    net, optimizer, exchange = attached(FULL)
    for _ in range(30):
        for t in range(3):
            net.loss(t).backward()
        optimizer.step()
        optimizer.zero_grad()
    for t in range(100):
        net.loss(t).backward()
    assert (exchange.step, said()) == (30, 0)
    optimizer.zero_grad()
    exchange.finish()


def test_inner_step_warning_not_before_the_first_step(said: Callable[[], int]) -> None:
    """Many micro-batches before the first step cause no warning."""
    net, _, exchange = attached(FULL)
    for t in range(100):
        net.loss(t).backward()
    assert said() == 0
    exchange.detach()
