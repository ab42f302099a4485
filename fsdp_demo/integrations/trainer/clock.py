"""The Trainer's clock where islands take unlike steps (`local_steps`): `global_step` and the
learning rate follow the exchange, the place in the data the island's own steps.

A step may be followed by ticks that this island leaves out. What the Trainer would do in them it
does once, behind them; it saves and evaluates at the end of a round, where all islands stand.
Facts: transformers 5.23, `Trainer._run_epoch`, `_init_training_state`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import transformers
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import Trainer

from ...checkpoint.exchange_state import load_exchange
from ...config.local_steps import round_of
from ...exchange.exchange import Exchange
from ...rendezvous.topology import Topology


class Clock:
    """Keeps the Trainer at the step of its exchange, and its counts at what was trained on."""

    def __init__(self, trainer: Trainer, exchange: Exchange):
        self._trainer, self._exchange = trainer, exchange
        self._left_out, self._before = self._left_out_so_far(), exchange.step
        self._owed: set[str] = set()
        self._counted: tuple[Any, ...] = ()  # ahead of a micro-batch that is dropped
        if exchange.config.by_speed:  # `auto` does not choose it for a clock that nobody moves
            exchange.on_left_out(self._step_rate)

    def _left_out_so_far(self) -> int:
        return self._exchange.step - self._exchange.steps_taken

    def _step_rate(self) -> None:
        scheduler = self._trainer.lr_scheduler  # DeepSpeed's is the engine's
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()

    def follow(self) -> None:
        """Behind the optimizer's step, which the Trainer counts: count the ticks left out, too."""
        before, self._left_out = self._left_out, self._left_out_so_far()
        ticks, trained = self._left_out - before, self._trainer
        trained.state.global_step += ticks
        # by these it divides the sum of the losses of own steps
        trained._globalstep_last_logged += ticks
        trained._initial_global_step += ticks

    def take_back(self, dropped: bool) -> bool:
        """Ahead of a micro-batch, which may be `dropped` (the answer): take back what the Trainer
        has counted of the one before, if that was. The last one of a step never is."""
        trained: Any = self._trainer
        if self._counted:
            trained.state.num_input_tokens_seen, trained.current_flos = self._counted
        now = trained.state.num_input_tokens_seen, trained.current_flos
        self._counted = now if dropped else ()
        return dropped

    def settle(self, args: Any, state: Any, control: Any) -> None:
        """At the end of a step ask for what was due in the ticks since the last one."""
        before, self._before = self._before, state.global_step
        if not self._exchange.config.by_speed:
            return
        for name, strategy, every in (
            ("should_log", args.logging_strategy, state.logging_steps),
            ("should_evaluate", args.eval_strategy, state.eval_steps),
            ("should_save", args.save_strategy, state.save_steps),
        ):
            if strategy == "steps" and every and before // every < state.global_step // every:
                early = name == "should_evaluate" and state.global_step < args.eval_delay
                setattr(control, name, not early)
        together = state.global_step % round_of(self._exchange.config.channels) == 0
        for name in ("should_evaluate", "should_save"):
            self._owed |= {name} if getattr(control, name) else set()
            setattr(control, name, name in self._owed)
            if not (together or state.global_step >= state.max_steps):
                setattr(control, name, False)
            else:
                self._owed.discard(name)


def problems(trainer: Trainer, topology: Topology) -> Iterator[tuple[bool, str]]:
    """Pairs for what does not go with unlike steps: whether it is so, and a text with the cure."""
    what = "beside local_steps='by_speed'"
    yield (
        topology.one_world,
        f"a mesh {what}: its ranks log and save in collectives; start the nodes as islands",
    )
    yield (
        not hasattr(trainer, "_init_training_state"),
        f"transformers {transformers.__version__} {what}: take 5.23, for which it was written",
    )
    strategies: Any = trainer.args
    epochs = [n for n in ("eval_strategy", "save_strategy") if getattr(strategies, n) == "epoch"]
    yield (
        bool(epochs),
        f"{' and '.join(epochs)}='epoch' {what}: islands end their epochs at unlike steps; set "
        "'steps'",
    )


def begin_at(trainer: Any, saved: Path, topology: Topology, undo: ExitStack) -> None:
    """Have the Trainer skip the rows of this island's own steps on a resume, not those of all
    ticks, by the `saved` exchange. undo: gets what must be undone when training is over.
    """
    left_out = load_exchange(saved).left_out(topology) if saved.is_dir() else 0
    if not left_out:
        return
    original = trainer._init_training_state

    @functools.wraps(original)
    def own(max_steps: int, per_epoch: int, *rest: Any) -> tuple[int, int]:
        original(max_steps, per_epoch, *rest)
        epochs, behind = divmod(trainer.state.global_step - left_out, per_epoch)
        skips = 0 if trainer.args.ignore_data_skip else behind
        return epochs, skips * trainer.args.gradient_accumulation_steps

    trainer._init_training_state = own
    undo.callback(vars(trainer).pop, "_init_training_state", None)
