"""The clock of plain torch optimizers: one tick is one complete round of the attached optimizers' steps, caught by step hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .island import Island
from .shards import local_part


class TorchTicks:
    """Calls `before` at the first base step of a round and `after` at its end.

    Steps inside `paused()` do not count, nor do those of checkpoint libraries that only make optimizer state.

    Args:
        optimizers: they step in turns, each once per round.
        closures: whether `step(closure)` is allowed; not where gradients are exchanged, since it computes them inside the step.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        island: Island,
        before: Callable[[], None],
        after: Callable[[], None],
        closures: bool,
    ):
        self._optimizers, self._island, self._closures = list(optimizers), island, closures
        self._run_before, self._run_after = before, after
        self._off = 0
        self._forced = self._probing = False
        self._stepped: set[int] = set()
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Register the hooks on the innermost optimizers."""
        for i, optimizer in enumerate(self._optimizers):
            self._hooks += [
                optimizer.register_step_pre_hook(partial(self._before, i)),
                optimizer.register_step_post_hook(lambda o, args, kwargs: self._after()),
            ]

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @property
    def partial(self) -> int:
        """How many optimizers have stepped in a round that is not complete."""
        return len(self._stepped)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context steps do not count."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    def skip(self, base_step: Callable[[], None] | None) -> None:
        """Make a tick of a step that was not taken: `base_step` counts, even with zero gradients and learning rate zero."""
        if base_step is None:
            self._run_before()
            self._run_after()
            return
        self._forced = True
        try:
            base_step()
        finally:
            self._forced = False

    def _before(self, index: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._probing = not self._off and not self._forced and self._is_probe(optimizer)
        if self._off or self._probing:
            return
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None and not self._closures:
            raise ValueError("step(closure) computes gradients inside the step, out of a gradient channel's reach: call backward first")
        if index in self._stepped:
            raise RuntimeError(
                f"optimizer {index} stepped twice in one round while another did not: attached optimizers step in turns, once each. "
                "Where one steps more often (the discriminator of a GAN) attach each alone: two exchanges"
            )
        if not self._stepped:
            self._run_before()
        self._stepped.add(index)

    def _after(self) -> None:
        if not self._off and not self._probing and len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._run_after()

    def _is_probe(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step is a checkpoint library's way to make optimizer state: there is none yet, the learning rate is zero and, on all
        ranks of the island, all gradients are zero."""
        if optimizer.state or any(float(g.get("lr", 1.0)) != 0.0 for g in optimizer.param_groups):
            return False
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        return bool(grads) and not self._island.largest(float(any(bool(local_part(g).any()) for g in grads)))[0]
