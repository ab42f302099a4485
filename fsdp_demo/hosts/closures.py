"""Closures that the exchange calls ahead of an optimizer's step, and the gradients of a round of
several optimizers' steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import see


class RoundGradients:
    """Remembers the gradients of each optimizer, as they were when the exchange had acted on them,
    until the optimizer has stepped: in a round of several optimizers' steps, or where a step
    failed. Nothing is read from a device: a tensor that was written to has another version.

    Args:
        optimizers: of the round.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
        self._noted: dict[int, list[tuple[Tensor, Tensor | None, int]]] = {}

    def note(self) -> None:
        """Note the gradients as they are now as those of this round."""
        self._noted = {
            i: [(p, p.grad, version(p.grad)) for g in o.param_groups for p in g["params"]]
            for i, o in enumerate(self._optimizers)
        }

    def forget(self, index: int) -> None:
        """Drop the gradients of an optimizer that has stepped."""
        self._noted.pop(index, None)

    def clear(self) -> None:
        """Drop all gradients: the round is over."""
        self._noted.clear()

    def refuse_new(self, index: int) -> None:
        """Raise RuntimeError if an optimizer has gradients that `note` has not seen."""
        for p, noted, then in self._noted.get(index, ()):
            if p.grad is not None and (p.grad is not noted or version(noted) != then):
                raise RuntimeError(
                    f"the gradients of optimizer {index} are new, or were changed, since another "
                    "optimizer of this round stepped. Gradients of all are clipped and exchanged "
                    "ahead of the first step, so these would be neither. Run all backward passes "
                    f"first, then step each optimizer; or attach each alone{see('late-gradients')}"
                )

    def put_back(self, index: int) -> None:
        """Give an optimizer the gradients of this round, for a step that is taken once more. Raises
        RuntimeError: they were written to.
        """
        noted = self._noted.get(index, ())
        if any(version(gradient) != then for _, gradient, then in noted):
            raise RuntimeError(
                f"optimizer {index} failed in its step, and its gradients of that step were "
                "overwritten since. They hold what the islands have exchanged. Before another "
                "backward pass call zero_grad(), which sets them to None. This island cannot take "
                f"the step any more: end it, and resume from a checkpoint{see('step-failed')}"
            )
        for p, gradient, _ in noted:
            p.grad = gradient


def version(t: Tensor | None) -> int:
    """The number of writes to the local part of a tensor, as torch counts them; 0 for None."""
    return 0 if t is None else getattr(t, "_local_tensor", t)._version


def evaluated(closure: Callable[[], float | Tensor] | None) -> Any:
    """The loss that the closure of a step returns, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CalledOnce:
    """The stand-in for a closure, which is called when this is made, ahead of the optimizer's step.
    It returns the loss of that call to an optimizer that asks once, while parameters and gradients
    are as `ready` has noted them.

    Args:
        optimizer: that is to step with the closure.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer):
        self._loss, self._optimizer, self._asked = evaluated(closure), optimizer, False
        self._left: list[tuple[Tensor, int, Tensor | None]] = []

    def ready(self) -> None:
        """Note the parameters and gradients with which the optimizer is to step."""
        groups = self._optimizer.param_groups
        self._left = [(p, version(p), p.grad) for g in groups for p in g["params"]]

    def __call__(self) -> Any:
        name = type(self._optimizer).__name__
        if self._asked:
            raise RuntimeError(
                f"{name} calls its closure more than once in a step, but gradients were clipped "
                "or exchanged after the first call: take an optimizer that calls it once, or "
                "clip=None with a preset that exchanges no gradients"
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
