"""Step hooks: what the exchange needs of every engine (`StepHooks`), and those of plain torch
optimizers, where one tick is one complete round of the attached optimizers' steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import see
from .closures import CalledOnce, RoundGradients
from .step_checks import NotStepped, makes_state, refuse_scaler


class TickCalls(NamedTuple):
    """What the hooks on an engine's steps call.

    Attributes:
        before, after: run ahead of and behind the base step of every tick. `before` returns True
            where islands have exchanged what it made of the gradients: it is refused in the same
            tick then, so a step that failed is taken again on these.
        skip: run for a step that the engine itself has skipped.
        gradients: whether `before` needs or changes gradients; asked at every step, since the
            method may be chosen later.
        factor: by which `before` scales the gradients: whoever clips them before that divides its
            norm by it.
    """

    before: Callable[[], bool]
    after: Callable[[], None]
    skip: Callable[[], None]
    gradients: Callable[[], bool]
    factor: Callable[[], float] = lambda: 1.0


class StepHooks(ABC):
    """The hooks on an engine's steps. Nothing counts within `paused`.

    Attributes:
        aside: whether a step that can move parameters was taken inside `paused`.
    """

    def __init__(self, calls: TickCalls):
        self._run_before, self._run_after, _, self._gradients, self._factor = calls
        self._off = 0
        self._refusal = ""
        self.aside = False

    @abstractmethod
    def start(self) -> None:
        """Register the hooks on the engine's steps."""

    @abstractmethod
    def stop(self) -> None:
        """Remove the hooks."""

    @abstractmethod
    def skip(self, base_step: Callable[[], None] | None) -> None:
        """Make a tick of a step not taken; `base_step` runs between `before` and `after`."""

    @property
    def partial(self) -> int:
        """How many optimizers have stepped in an incomplete tick; 0 where one has failed."""
        return 0

    @contextmanager
    def paused(self, refusal: str = "") -> Iterator[None]:
        """A context in which steps do not count; with a `refusal` they raise RuntimeError."""
        before = self._refusal
        self._off, self._refusal = self._off + 1, refusal or before
        try:
            yield
        finally:
            self._off, self._refusal = self._off - 1, before

    def leave_out(self) -> None:
        """Count a micro-batch that is left out, where the engine counts them."""
        return  # plain torch does not

    def begin_anew(self) -> None:
        """Forget the tick under way, since the state of another step was loaded."""
        return  # nothing is kept of it here

    def _refuse(self) -> None:
        """Raise RuntimeError in a pause that refuses steps."""
        if self._refusal:
            raise RuntimeError(self._refusal)


class OptimizerStepHooks(StepHooks):
    """Calls `before` at the first base step of a round and `after` at its end.

    Steps inside `paused()` do not count, nor do those of torch's checkpoints that only make
    optimizer state. A step that raised an error is taken once more when it is called again. Where
    `before` needs gradients, a closure given to `step` is called ahead of it, and the optimizer
    gets its loss.

    Args:
        optimizers: they step in turns, each once per round, behind all backward passes of it.
        check: run ahead of each step with the number of the optimizer that takes it; raises where
            that cannot go on.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        calls: TickCalls,
        check: Callable[[int], None],
    ):
        super().__init__(calls)
        self._optimizers, self._check = list(optimizers), check
        self._looked: set[int] = set()
        self._forced = self._probing = False
        self._round = RoundGradients(self._optimizers)
        self._not_stepped = NotStepped(self._optimizers)
        self._begun: set[int] = set()
        self._stepped: set[int] = set()
        self._made = False  # what `before` has said in this round
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Register the hooks on the innermost optimizers. A step that is compiled calls them as
        they are: compiled too, what leaves the accumulators may not be what the others decode, to
        the last bit.
        """
        before, after = map(torch.compiler.disable, (self._before, self._after))
        for i, optimizer in enumerate(self._optimizers):
            self._hooks += [
                optimizer.register_step_pre_hook(partial(before, i)),
                optimizer.register_step_post_hook(partial(after, i)),
            ]
        self._not_stepped.start()

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._not_stepped.stop()
        self.begin_anew()

    @property
    def partial(self) -> int:
        return 0 if self._begun - self._stepped else len(self._stepped)

    def skip(self, base_step: Callable[[], None] | None) -> None:
        """Make a tick of a step that was not taken: `base_step` counts, even with zero gradients
        and learning rate zero. It ends a round in which a step has failed: an optimizer
        that has stepped in it has no gradients, another one gets those of the round.
        """
        self._refuse()
        if base_step is None:
            if not self._stepped and not self._made:
                self._run_before()
            self.begin_anew()
            self._run_after()
            return
        self._forced = True
        try:
            base_step()
        finally:
            self._forced = False

    def _before(
        self,
        index: int,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._probing = (
            (not self._off or bool(self._refusal)) and not self._forced and makes_state(optimizer)
        )
        if self._off and not self._refusal:
            self.aside = self.aside or any(
                float(g.get("lr", 1.0)) != 0.0 for g in optimizer.param_groups
            )
            return None
        if self._probing:
            return None
        self._not_stepped.stop()
        self._refuse()
        if index in self._stepped:
            if self._forced:
                return None
            raise RuntimeError(self._twice(index))
        if index not in self._looked or getattr(optimizer, "found_inf", None) is not None:
            refuse_scaler(optimizer)
            self._looked.add(index)
        self._check(index)
        closure = self._closure(args, kwargs) if self._gradients() else None
        once = None if closure is None else CalledOnce(closure, optimizer)
        self._prepare(index)
        self._begun.add(index)
        if once is None:
            return None
        once.ready()
        if "closure" in kwargs:
            return args, {**kwargs, "closure": once}
        return (args[0], once, *args[2:]), kwargs

    def _prepare(self, index: int) -> None:
        """Have the gradients of an optimizer ready for its step."""
        if self._stepped:
            if self._forced or index in self._begun:
                self._round.put_back(index)
            else:
                self._round.refuse_new(index)
        elif self._made:  # and then a step failed: this is the same round
            for i in range(len(self._optimizers)):
                self._round.put_back(i)
        else:
            self._made = self._run_before()
            if self._made or (len(self._optimizers) > 1 and self._gradients()):
                self._round.note()

    def _twice(self, index: int) -> str:
        """What is wrong where an optimizer has stepped in this round already."""
        failed = sorted(self._begun - self._stepped)
        if failed:
            return (
                f"optimizer {failed[0]} failed in its step, and optimizer {index} has stepped in "
                f"this round already. Call the step of optimizer {failed[0]} once more, or "
                f"exchange.skip(), which ends the round{see('step-failed')}"
            )
        return (
            f"optimizer {index} stepped twice in one round while another did not: attached "
            "optimizers step in turns, once each. "
            "Where one steps more often (the discriminator of a GAN) attach each alone: two "
            "exchanges, to which a single island cannot come back"
        )

    def _closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The closure among the arguments of a step, if there is one."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None and len(self._optimizers) > 1:
            raise ValueError(
                "step(closure) with several optimizers attached: the gradients of the later ones "
                "are not there when the first one steps; "
                "call backward first, or attach each optimizer alone"
            )
        return closure

    def _after(
        self,
        index: int,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self._off or self._probing:
            return
        self._stepped.add(index)
        self._round.forget(index)
        if len(self._stepped) == len(self._optimizers):
            self.begin_anew()
            self._run_after()

    def begin_anew(self) -> None:
        self._begun.clear()
        self._stepped.clear()
        self._round.clear()
        self._made = False
