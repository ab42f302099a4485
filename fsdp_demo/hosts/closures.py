"""What an optimizer's step does with a closure, and what stands in its place where the exchange has
called it ahead of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import see
from .round_gradients import version


def evaluated(closure: Callable[[], float | Tensor] | None) -> Any:
    """The loss that the closure of a step returns, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CalledOnce:
    """Calls a closure at once, and then stands in its place: gives its loss, to an optimizer that
    asks once, at the parameters and gradients that it has left.

    Args:
        optimizer: the one that will ask.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer):
        self._loss, self._optimizer, self._asked = evaluated(closure), optimizer, False
        self._left: list[tuple[Tensor, int, Tensor | None]] = []

    def ready(self) -> None:
        """The gradients are those that the optimizer is to step with."""
        groups = self._optimizer.param_groups
        self._left = [(p, version(p), p.grad) for g in groups for p in g["params"]]

    def __call__(self) -> Any:
        name = type(self._optimizer).__name__
        if self._asked:
            raise RuntimeError(
                f"{name} calls its closure more than once in a step, but gradients were "
                "clipped or exchanged after the first call: "
                "take an optimizer that calls it once, or clip=None with a preset that exchanges "
                "no gradients"
            )
        if any(version(p) != v or (p.grad is None and g is not None) for p, v, g in self._left):
            raise RuntimeError(
                f"{name} has moved parameters or dropped gradients in its step, and then calls its "
                "closure. It was called ahead of the step, and gradients of there were clipped or "
                "exchanged. Attach the optimizer that takes the step "
                "(optimizer.base_optimizer of SAM and its kin), or set clip=None with a preset "
                f"that exchanges no gradients{see('base-optimizer')}"
            )
        self._asked, self._left = True, []
        return self._loss
