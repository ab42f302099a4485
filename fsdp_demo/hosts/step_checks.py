"""Checks of who takes an optimizer's steps: a loss scaler, which is refused; torch's checkpoints,
which make optimizer state by a step; or nobody (`NotStepped`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..errors import see
from .closures import version

log = logging.getLogger("fsdp_demo")

SCALED = (
    "a GradScaler (fp16) steps this optimizer: it would skip steps on one island alone, and "
    "clipping would see scaled gradients; use bf16 "
    "(torch.autocast(..., dtype=torch.bfloat16), mixed_precision='bf16'), which needs no scaler"
)

DEEP = 16
"""Frames above a step in which hooks, wrappers and scalers stand."""

DROPPED = 20
"""Gradients that are made and dropped before it is said."""

PASSES = 1000
"""Backward passes before it is said where gradients are never dropped (`set_to_none=False`): no
step has so many micro-batches.
"""


def makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this very step is torch's way to make optimizer state for a checkpoint. It has
    learning rate zero and zero gradients, as a step of training may have, too: the caller tells.
    """
    if optimizer.state or any(float(g.get("lr", 1.0)) != 0.0 for g in optimizer.param_groups):
        return False
    return any(
        frame.f_code.co_name == "_init_optim_state"
        and frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint")
        for frame in islice(callers(), DEEP)
    )


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a loss scaler is at work in this very step."""
    if getattr(optimizer, "found_inf", None) is not None or any(
        scales(frame.f_locals.get("self")) for frame in islice(callers(), DEEP)
    ):
        raise ValueError(SCALED)


def callers() -> Iterator[FrameType]:
    """The frames of what has called, the innermost first."""
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def scales(scaler: Any) -> bool:
    """Whether this is a `GradScaler` that is not switched off."""
    return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()


class NotStepped:
    """Counts backward passes until any optimizer steps, and warns once: where nobody calls `step`
    of an attached optimizer `Exchange.step` stays where it is, and a loop that waits for it never
    ends.

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
        """Stop looking, since an optimizer has stepped or the warning was given."""
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
        text = (
            "step() of the attached %s was not called once in %d backward passes: the exchange "
            "counts its steps alone, so exchange.step stays where it is, and nothing is "
            "exchanged. Attach the optimizer whose step() is called (optimizer.base_optimizer of "
            "SAM and its kin)%s"
        )
        log.warning(text, name, self._passes[index], see("base-optimizer"))
        self.stop()
