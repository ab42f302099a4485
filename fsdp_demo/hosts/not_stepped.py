"""Backward passes come and go, and nobody calls `step` of an attached optimizer: somebody else
takes the steps, `Exchange.step` stays where it is, and a loop that waits for it never ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import see
from .round_gradients import version

log = logging.getLogger("fsdp_demo")

DROPPED = 20
"""Gradients that are made and dropped before it is said."""

PASSES = 1000
"""Backward passes before it is said where gradients are never dropped (`set_to_none=False`): no
step has so many micro-batches.
"""


class NotStepped:
    """Counts backward passes until any optimizer steps, and warns once.

    A gradient to which a micro-batch is added is written to, and one that was dropped and made anew
    is not: so the passes of one step count once. Nothing is read from a device.

    Args:
        optimizers: those attached. The last parameter of each is looked at.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers, self._hooks = optimizers, list[Any]()
        self._written = [0] * len(optimizers)
        self._dropped = [0] * len(optimizers)
        self._passes = [0] * len(optimizers)

    def start(self) -> None:
        """Look at gradients from now on."""
        for i, optimizer in enumerate(self._optimizers):
            params = [p for g in optimizer.param_groups for p in g["params"]]
            trained = [p for p in params if p.requires_grad and p.is_leaf]
            if trained:
                hook = trained[-1].register_post_accumulate_grad_hook(partial(self._passed, i))
                self._hooks.append(hook)

    def stop(self) -> None:
        """Somebody steps, or nothing is to be said any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _passed(self, index: int, p: Tensor) -> None:
        before, self._written[index] = self._written[index], version(p.grad)
        self._dropped[index] += self._written[index] <= before
        self._passes[index] += 1
        if self._dropped[index] < DROPPED and self._passes[index] < PASSES:
            return
        name = type(self._optimizers[index]).__name__
        log.warning(
            "step() of the attached %s was not called once in %d backward passes: the exchange "
            "counts its steps alone, so exchange.step stays where it is, and nothing is "
            "exchanged. Attach the optimizer whose step() is called (optimizer.base_optimizer of "
            "SAM and its kin)%s",
            name,
            self._passes[index],
            see("base-optimizer"),
        )
        self.stop()
