"""The watch for `load_state_dict` of the attached model or optimizers while an exchange is under
way. Anchors, outer momentum and feedback belong to the values of before, so the next step is
refused, unless the exchange's own state was set with it, or all values are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import first_few, see
from ..hosts.base import plain_parts
from .first_step import Noted, named_tensors
from .runtime import StepRuntime


class LoadHook:
    """A hook of a module or optimizer that calls `note`. A copy of the model (`deepcopy`, pickle),
    which is not attached, gets one of the standard library that does nothing.
    """

    def __init__(self, note: Callable[[], None]):
        self._note = note

    def __call__(self, *args: Any) -> None:
        """Called ahead of a load."""
        self._note()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class LoadWatch:
    """Notes ahead of the first load since a step what parameters and optimizer states are, and
    compares ahead of the next step.

    Args:
        runtime: of this rank.
        model: all its modules are watched, and all optimizers of the host.
        undone: whether what is loaded now will be undone (`Exchange.outer_parameters`).
    """

    def __init__(
        self, runtime: StepRuntime, model: torch.nn.Module | None, undone: Callable[[], bool]
    ):
        self._runtime, self._undone = runtime, undone
        self._before = Noted(self._held, runtime.host.device)
        self._next: Callable[[], None] | None = None  # what else is to be done ahead of the step
        self._accepted_at = -1
        hook, modules = LoadHook(self._note), [] if model is None else list(model.modules())
        self._handles = [
            watched.register_load_state_dict_pre_hook(hook)
            for watched in (*modules, *runtime.host.optimizers)
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def accept(self) -> None:
        """Accept what was loaded since the last step, or will be before the next one."""
        self._accepted_at = self._runtime.step
        if self._runtime.ahead == self._check:
            self._runtime.ahead = self._next

    def _check(self) -> None:
        """Ahead of a step: raise ValueError on all ranks for other values than those before the
        load, but for steps inside `paused()`. All ranks of the island load together.
        """
        runtime = self._runtime
        runtime.host.check_loaded()
        moved = [] if runtime.hooks.aside else self._before.moved()
        if runtime.island.any(bool(moved)):
            raise ValueError(
                f"load_state_dict was called after step {runtime.step} of a run under way "
                f"({first_few(moved, 3) or 'tensors of another rank'} changed): the exchange still "
                "knows the old values, and would bring them back. Load its state of the same step, "
                "too (exchange.load_state_dict), or call exchange.reset(parameters), before the "
                f"next step; detach() and attach again helps now{see('loaded-midway')}"
            )
        self.accept()
        if self._next is not None:
            self._next()

    @torch.no_grad()
    def _note(self) -> None:
        runtime = self._runtime
        known = runtime.ahead == self._check or self._accepted_at == runtime.step
        if not (known or runtime.finished or self._undone()):
            self._before.note()
            self._next, runtime.ahead = runtime.ahead, self._check

    def _held(self) -> Iterable[tuple[str, Tensor | None]]:
        host = self._runtime.host
        yield from named_tensors(host, "parameter")
        for state in host.states():
            for name, t in named_tensors(host, f"state:{state}"):
                for part in [] if t is None else plain_parts(t).values():
                    yield f"{state} of {name}", part
