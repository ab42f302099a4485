"""An island joins a run under way, or takes over where it holds no checkpoint: its Trainer goes to
the step of the others after `attach`, as if it had trained so far.

The Trainer works out epoch and place in the data before its callbacks hear that training begins,
and gives both to `_run_epoch`. The step is known only then. So that method is wrapped on this one
object: epochs that are over are left out, and the first one that is not skips its rows as on a
resume. Facts: transformers 5.23, `Trainer._inner_training_loop`, `_run_epoch`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer

from ...checkpoint.manager import CheckpointManager
from ...checkpoint.taking_over import begins_anew, forward, moments_in, small
from ...exchange.exchange import Exchange
from .engine import engine_module_of, engine_of
from .evaluation import Evaluations

KINDS: dict[str, tuple[type, ...]] = {
    "epoch": (int, float),
    "best_metric": (int, float, type(None)),
    "best_global_step": (int, type(None)),
    "num_input_tokens_seen": (int, float),
    "total_flos": (int, float),
    "stateful_callbacks": (dict,),
}
"""What the donor's `trainer_state.json` says of all islands; its log and its paths are its own."""


@dataclass(frozen=True)
class TakeOver:
    """The step and state of the other islands, for one that has no checkpoint to load.

    Attributes:
        step: the optimizer step of the other islands.
        donor: name of the island that has told its state, for the log.
        state: the Trainer's state there (`KINDS`); empty where the donor could not read it.
    """

    step: int
    donor: str
    state: dict[str, Any] = field(default_factory=dict)


def load_moments(trainer: Trainer, manager: CheckpointManager) -> Path | None:
    """Load the newest checkpoint of this island with the Trainer's own methods, if there is one
    that `moments_in` accepts; its folder, or None. Before `attach`, which replaces what replicas
    share; all ranks of the island call it together.
    """
    trained: Any = trainer

    def newest() -> int:  # `save_only_model` leaves the optimizer out
        kept = (step for step, at in manager.whole().items() if any(at.glob("optimizer*")))
        return max(kept, default=-1)

    manager.fetch_newest()
    step = manager.ranks.from_first(newest)
    folder = manager.path(step)
    if step < 0 or moments_in(folder, manager.topology, manager.ranks) is None:
        return None
    wrapped = [trained.model_wrapped] if trained.is_fsdp_enabled else []
    trained._load_from_checkpoint(str(folder), *wrapped)
    trained._load_optimizer_and_scheduler(str(folder))
    return folder


def move_to(
    trainer: Trainer, exchange: Exchange, taken: TakeOver | None, undo: ExitStack, moments: bool
) -> str:
    """Set scheduler, sampler and counters of the Trainer to `exchange.step`, after `attach` in
    `on_train_begin`; returns the sentence for the log.

    Args:
        taken: of an island that takes over at the start; None for one that joins a run.
        undo: gets what must be undone when training is over.
        moments: whether `load_moments` has found some.
    """
    trained: Any = trainer
    step, args = exchange.step, trainer.args
    loader = trained.callback_handler.train_dataloader
    values: Any = trainer.set_initial_training_values(args, loader)
    per_epoch, in_epoch = values[1], values[5]
    epochs, behind = divmod(exchange.steps_taken, per_epoch)
    told = taken.state if taken is not None else exchange.told.get("state")
    batches = behind * args.gradient_accumulation_steps
    epoch = epochs + min(batches, in_epoch) / in_epoch
    _count(trainer, exchange, told if isinstance(told, dict) else {}, epoch)
    engine, module = engine_of(trainer), engine_module_of(trainer)
    if engine is not None and module is not None:
        module.advance(engine, step)
    # else the engine's, or one that goes by a metric
    if isinstance(trained.lr_scheduler, LRScheduler):
        forward(trained.lr_scheduler, step - trained.lr_scheduler.last_epoch)
    skipped = 0 if args.ignore_data_skip else batches
    trained._run_epoch = functools.partial(
        _run_epoch, trained._run_epoch, epochs, skipped, str(args.output_dir)
    )
    undo.callback(vars(trainer).pop, "_run_epoch", None)
    return sentence(trainer, exchange, taken, moments)


def sentence(trainer: Any, exchange: Exchange, taken: TakeOver | None, moments: bool) -> str:
    """The sentence for the log: what was taken over, and what begins anew."""
    args, step = trainer.args, exchange.step
    there = "there" if exchange.steps_taken == step else f"its own step {exchange.steps_taken}"
    rows = "" if args.ignore_data_skip else f", rows are skipped up to {there}"
    text = (
        f"joined the others at step {step}{rows}"
        if taken is None
        else f"nothing of step {step} here: took over from {taken.donor}{rows}"
    )
    if args.load_best_model_at_end and trainer.state.best_metric is not None:
        text += (
            ". The best model so far is on the other islands only: without a better one, this "
            "island ends with its last"
        )
    return f"{text}; {begins_anew(exchange.config.at(exchange.step), not moments)}"


def _count(trainer: Any, exchange: Exchange, told: dict[str, Any], epoch: float) -> None:
    """Set the Trainer's counters for `exchange.step`, with the values that a donor has told."""
    state = trainer.state
    for name, value in told.items():
        if isinstance(value, KINDS.get(name, ())):
            setattr(state, name, value)
    if state.stateful_callbacks and told:
        trainer._load_callback_state()
    state.global_step, state.epoch = exchange.step, epoch
    trainer._initial_global_step = trainer._globalstep_last_logged = exchange.step
    trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen


def _run_epoch(
    original: Callable[..., Any], epochs: int, skipped: int, folder: str, **given: Any
) -> None:
    """Run an epoch by the Trainer's method (`original`), if it is not over.

    Args:
        epochs, skipped: number of the first epoch to run, and of the batches left out in it.
        folder: one without random states, which the Trainer would restore.
    """
    if given["epoch"] < epochs:
        return
    if given["epoch"] == epochs:
        given |= {"epochs_trained": epochs, "steps_trained_in_current_epoch": skipped}
        given["resume_from_checkpoint"] = folder
    original(**given)


def tells(trainer: Trainer, evaluations: Evaluations) -> dict[str, Any]:
    """The note of this island to one that joins later (`Exchange.tells`)."""
    return {"state": common_state(vars(trainer.state)), "evaluations": evaluations.plan}


def common_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the Trainer's state that hold on all islands (`KINDS`) and fit a note."""
    known = {name: state[name] for name in KINDS if name in state}
    return small({name: v for name, v in known.items() if isinstance(v, KINDS[name])})
