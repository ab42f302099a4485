"""Step hooks of a ZeRO engine: one tick is one step that the engine counts (`global_steps`), taken
or skipped.

DeepSpeed calls the inner optimizer once, once per group or once per sub-group, and `engine.step()`
once per micro-batch; none of these is a step. It skips a step on one replica alone, when that one's
gradient norm is not finite. That replica still takes part in the exchange of the tick, with zero
weight. It steps its scheduler, which DeepSpeed leaves behind, so that rates stay equal on all
replicas.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from fsdp_demo.hosts.step_hooks import StepHooks, TickCalls

from .partitions import Partitions

log = logging.getLogger("fsdp_demo")


class EngineStepHooks(StepHooks):
    """Step hooks on `engine.step`.

    Args:
        engine, partitions: the engine and the view of its wrapper.
        calls: `before` runs ahead of the inner step, `after` when `engine.step` is done with a
            step, `skip` in place of both for a step that the engine has skipped.
    """

    def __init__(self, engine: Any, partitions: Partitions, calls: TickCalls):
        super().__init__(calls)
        self._engine, self._partitions, self._run_skip = engine, partitions, calls.skip
        self._wrapped: Any = None
        # the engine's arguments for its scheduler, in a step that it has skipped
        self._skipped: dict[str, Any] | None = None

    def start(self) -> None:
        """Wrap `engine.step`, and the inner step of its wrapper."""
        self._clip = self._partitions.zero.clip_grad
        self._step = self._engine.step
        self._wrapped = functools.wraps(self._step)(functools.partial(self._stepped))
        self._engine.step = self._wrapped
        self._partitions.intercept(self._inner, self._gradients)

    def stop(self) -> None:
        """Undo `start`; the engine clips by itself again."""
        self._off += 1  # for whoever has wrapped it since
        if self._engine.__dict__.get("step") == self._wrapped:  # else somebody else's by now
            del self._engine.step
        if self._partitions.release():
            self._partitions.clip_again()

    def skip(self, base_step: Callable[[], None] | None) -> None:
        """Make a tick of a step that was not taken. One that the engine has not skipped itself is
        counted there, too, and its gradients are dropped. The scheduler steps behind the base step,
        as under DeepSpeed.
        """
        self._refuse()
        engine = self._engine
        if self._skipped is None:
            self._partitions.drop_gradients()
            each = engine.gradient_accumulation_steps()
            engine.micro_steps += each - engine.micro_steps % each
        self._run_before()
        if base_step is not None:
            base_step()
        self._partitions.free_gradients()
        if self._skipped is None:
            engine.global_steps += 1
            engine.skipped_steps += 1
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step(**(self._skipped or {}))
        self._run_after()

    def leave_out(self) -> None:
        """Count a micro-batch that is left out; Accelerate sets the boundary by itself."""
        self._engine.micro_steps += self._engine._is_gradient_accumulation_boundary is None

    def _inner(self) -> None:
        self.aside = self.aside or bool(self._off)
        if not self._off:
            self._run_before()

    def _stepped(self, *args: Any, **kwargs: Any) -> Any:
        """Replacement of `engine.step`, which takes a step at the end of an accumulation only."""
        self._refuse()
        engine, steps = self._engine, self._engine.global_steps
        if not self._off:  # a checkpoint that DeepSpeed has loaded may have brought another norm
            self._partitions.zero.clip_grad = self._clip / self._factor()
        try:
            result = self._step(*args, **kwargs)
        except BaseException:  # the micro-batch is over, and so is its gradient
            if engine._running_engine_step:  # else DeepSpeed has refused the call, as in no_sync
                engine.micro_steps += 1
            engine._running_engine_step = False
            raise
        if engine.global_steps == steps or self._off:
            return result
        if engine.was_step_applied():
            self._run_after()
            return result
        log.warning(
            "step %d was skipped: the gradient norm is not finite. This replica takes part in the "
            "exchange with zero weight",
            steps + 1,
        )
        self._skipped = kwargs.get("lr_kwargs", args[0] if args else None) or {}
        try:
            self._run_skip()
        finally:
            self._skipped = None
        # the step counts: hosts that ask (Accelerate, the Trainer) step their schedulers
        self._partitions.zero.overflow = False
        return result
