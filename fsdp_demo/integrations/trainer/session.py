"""One training of the Trainer beside an exchange, from when the islands are joined to its end.

What the exchange must see or show passes partly through events, partly through methods of the
Trainer that `callback.py` wraps. Facts: transformers 5.23, `Trainer._run_epoch`,
`_maybe_log_save_evaluate`, `_finalize_training`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ...errors import PeerLost, Stopped, WireError
from ...exchange.exchange import Exchange
from ...peers.votes import VotePace
from ...runlog.record import tracked
from ..data import tokens_in, warn_of_same_rows
from ..record import TrainingRecord, of_trainer
from .beginning import Beginning
from .clock import Clock
from .engine import before_steps, engine_of
from .evaluation import Evaluations
from .joining import tells
from .setup import warn
from .state import save_all
from .stop import Stops


class Session(TrainerCallback):
    """The last of the Trainer's callbacks in one training: it sees what those before it ask for.

    All ranks of all islands make one together, since its constructor asks the other islands.

    Args:
        trainer: of this rank. exchange: attached.
        beginning: how this training began; what must be undone goes to its `after`.
        stops: wishes to stop this training.

    Raises:
        ValueError: as `Evaluations`.
        PeerLost: another island, while it is asked.
        Superseded: the output folder belongs to a later life of this island.
    """

    def __init__(self, trainer: Trainer, exchange: Exchange, beginning: Beginning, stops: Stops):
        self.exchange, self._trainer, self._stops = exchange, trainer, stops
        args: Any = trainer.args
        self._after = after = beginning.after
        self._engine_steps = engine_of(trainer) is not None  # before the Trainer's events of a step
        self._loss: Any = 0.0
        self._numbers: dict[str, float] = {}
        self._steps_in_epoch, self._weighed = 0, -1
        self._drops, self._micro, self._left = exchange.config.drop is not None, 0, 0.0
        self._taken: list[Any] = []  # micro-batches of the step under way
        self._pace: VotePace | None = None  # of an evaluation that can be left
        if self._engine_steps:
            after.callback(before_steps(trainer.accelerator, self._hear))
        else:  # DeepSpeed looks by itself
            exchange.watch_gradients()
        beginning.manager.own(trainer.state.global_step or None, beginning.named)
        self._manager = beginning.manager
        after.callback(setattr, args, "save_total_limit", args.save_total_limit)
        args.save_total_limit = None  # the manager rotates
        self._evaluations = Evaluations(exchange, trainer)
        self._clock = Clock(trainer, exchange)
        exchange.raise_stopped(False)
        exchange.tell_newcomers(functools.partial(tells, trainer, self._evaluations))
        warn_of_same_rows(exchange, trainer.train_dataset)
        self._record: TrainingRecord | None = None
        counted = int(exchange.totals()["global_tokens"])
        if args.process_index == 0:
            self._record = of_trainer(trainer, exchange, counted)
            after.callback(self._close_record)
        handler = trainer.callback_handler
        # a new list: the old one is being walked
        handler.callbacks = [*handler.callbacks, self]
        after.callback(self._leave_handler)

    @property
    def live(self) -> Exchange | None:
        """The exchange while it runs."""
        return None if self.exchange.finished else self.exchange

    def _close_record(self) -> None:
        if self._record is not None:
            self._record.close()
            self._record = None

    def _leave_handler(self) -> None:
        handler = self._trainer.callback_handler
        handler.callbacks = [callback for callback in handler.callbacks if callback is not self]

    # ---- events --------------------------------------------------------------------------------

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the step's loss, for the next header."""
        if not self._engine_steps:
            self._note()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the step and its exchange, before the Trainer counts it."""
        self._clock.follow()

    def _note(self) -> None:
        if (exchange := self.live) is not None:
            exchange.report(loss=self._loss)
            self._loss = 0.0

    def _hear(self, loss: torch.Tensor, last: bool) -> None:
        """Add a micro-batch's loss, before the engine steps."""
        self._loss = self._loss + loss
        if last:
            self._make_up()
            self._note()

    def _make_up(self) -> None:
        """Make the loss of the step the mean over those micro-batches that were taken."""
        if (ratio := self.exchange.drop.ratio) != 1.0:
            self._left = (ratio - 1.0) * self._loss
            self._loss = self._loss + self._left

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the exchange of this step: compare clocks, take part in a stop, gather numbers for
        the log, end at the last step.
        """
        if (exchange := self.live) is None:
            return
        if exchange.step != state.global_step:
            raise RuntimeError(
                f"the optimizer has stepped {exchange.step} times, the Trainer counts "
                f"{state.global_step}: replicas would lose each other; "
                "step the optimizer once per step of the Trainer"
            )
        self._steps_in_epoch += 1
        self._clock.settle(args, state, control)
        if self._record is not None:
            self._record.step()
        if state.global_step >= state.max_steps:
            self._finish()
        elif exchange.stopped:
            self._stops.end(exchange, args, state, control)
        self._stops.hold(control)
        if control.should_log:
            self._count()

    def _count(self) -> None:
        """Gather numbers for the log; all ranks of the island come here together."""
        if not self.exchange.closed:
            self._numbers = tracked(self.exchange)
            self._numbers["exchange/failed_saves"] = float(self._manager.failed_saves)

    def _finish(self) -> None:
        """Take the last exchange: what follows has the model that all islands hold."""
        self._stops.ending = True
        self.exchange.finish(close=False)
        self._count()
        if not self._evaluations.agreed:
            self.exchange.finish()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops.hold(control)

    on_log = on_evaluate = on_substep_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave_if_told()

    def _leave_if_told(self, now: bool = False) -> None:
        """Leave the Trainer's evaluation, on all ranks after the same batch, if one of them is told
        to end: they vote about once a second, or `now`. Raises Stopped: they leave.
        """
        pace, ranks = self._pace, self._manager.ranks
        if pace is not None and pace.due(now or ranks.world == 1):
            told, slowest = ranks.max(float(self._stops.told), pace.seconds())
            pace.agreed(slowest)
            if told:
                raise Stopped("an evaluation is left: this island is told to end")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._record is not None:
            self._record.saved()
        self._stops.hold(control)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps_in_epoch = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an agreed stop, whose checkpoint is written, the islands part with one model."""
        if self.live is None:
            return
        if control.should_log:
            self._count()
        if self._stops.ending:
            # the checkpoint of this step, before the last exchange, is the one to resume from
            control.should_save = False
            control.should_evaluate &= not self._stops.left
            if self._stops.left:
                self.exchange.detach()
            else:
                self._finish()
        elif self._steps_in_epoch:
            # an epoch without steps: the data are at their end, nothing will be exchanged any more
            self._stops.hold(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Part from the others: with one model where all have come here at the same step, as they
        do but for data that end early.
        """
        exchange = self.exchange
        # loaded by now: not to be averaged with anything
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        try:
            if (
                self.live is None
                or not best
                and exchange.across_islands.all_equal(["end", state.global_step])
            ):
                exchange.finish()
        except (PeerLost, WireError) as error:
            text = f"training ended at step {state.global_step} of {state.max_steps} without the "
            warn(self._trainer, exchange.topology, f"{text}other islands: {error}")
        if self._record is not None and exchange.finished and not self._stops.left:
            self._record.end(self._numbers)
        self._after.close()

    def save_lost(self) -> None:
        """Save a checkpoint of the step at which a peer was lost, with the messages under way as
        they were sent. All ranks of this island call it together.
        """
        trainer: Any = self._trainer
        args, state = trainer.args, trainer.state
        if args.save_strategy == "no" or self.exchange.topology.one_world:
            return
        self._clock.follow()
        # the local step was taken: end it as the Trainer would have
        if self.exchange.step == state.global_step + 1:
            trainer.lr_scheduler.step()
            state.global_step += 1
        manager = self._manager
        if not manager.ranks.from_first(lambda: state.global_step in manager.whole()):
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
            trainer.control = trainer.callback_handler.on_save(args, state, trainer.control)

    # ---- around methods of the Trainer ---------------------------------------------------------

    def maybe_log_save_evaluate(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Log, evaluate and save by `original`. An island that is told to end meanwhile stops at
        this step: an evaluation is left, and a save is the last one.
        """
        trainer, manager, state = self._trainer, self._manager, self._trainer.state
        ends = self.live is None and self._evaluations.agreed  # the others wait for its metrics
        lasts = trainer.control.should_evaluate or trainer.control.should_save
        self._pace = VotePace() if lasts and not ends else None
        try:
            original(*args, **kwargs)
            self._leave_if_told(now=True)
        except Stopped:
            control = trainer.control
            control.should_evaluate = False
            if not self._stops.ending:
                self.exchange.stop_here()
                if self.exchange.stopped:
                    saved = manager.ranks.from_first(lambda: state.global_step in manager.whole())
                    self._stops.end(self.exchange, trainer.args, state, control, saved)
            if control.should_save:
                original(*args, **kwargs)
        finally:
            self._pace = None

    def save_checkpoint(self, original: Callable[..., Any], model: Any, trial: Any = None) -> None:
        self._stops.unsaved = True  # also where it raises
        made = save_all(self._trainer, self.exchange, self._manager, original, model, trial)
        self._stops.unsaved = not made

    def training_step(
        self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if (exchange := self.live) is None:
            return original(model, inputs, *args, **kwargs)
        exchange.catch_up()
        items = next(iter(args), kwargs.get("num_items_in_batch"))
        if self._drops and self._left_out(exchange, inputs, items):
            return torch.zeros((), device=self._trainer.args.device)
        weight = self._weight(inputs, None if self._drops else items)
        exchange.report(tokens=tokens_in(inputs), weight=weight)
        loss = original(model, inputs, *args, **kwargs)
        if not self._engine_steps and isinstance(loss, torch.Tensor):
            self._loss = self._loss + loss.detach()
            if self._drops and not self._micro:
                self._make_up()
                exchange.drop.scale()  # ahead of the Trainer's clipping
        return loss + self._left if self._drops else loss

    def _left_out(self, exchange: Exchange, inputs: Any, items: Any) -> bool:
        """Whether a micro-batch is dropped. Of the `items` of a step, by which the Trainer divides,
        those of the micro-batches taken are the exact divisor."""
        trainer: Any = self._trainer
        of, micro = trainer.current_gradient_accumulation_steps, self._micro
        self._micro, self._left = (micro + 1) % of, 0.0
        if self._clock.take_back(exchange.time_is_up(micro, of)):
            return True
        self._taken = [*self._taken, inputs] if micro else [inputs]
        if not self._micro and items is not None and len(self._taken) < of:
            taken = trainer._get_num_items_in_batch(self._taken, trainer.args.device)
            both = (float(torch.as_tensor(each).sum()) for each in (items, taken))
            whole, left = exchange.island.sum(*both)
            exchange.drop.ratio = whole / max(left, 1.0)
        self._taken = self._taken if self._micro else []
        return False

    def _weight(self, inputs: Any, items: Any) -> int | torch.Tensor:
        """What a micro-batch adds to the weight of this island: labels, else tokens. `items`, by
        which the Trainer divides, are those of a step, and of all ranks where they are added up."""
        args, step = self._trainer.args, self._trainer.state.global_step
        if items is not None:
            again, self._weighed = self._weighed == step, step
            counted = again or (args.average_tokens_across_devices and args.process_index > 0)
            return 0 if counted else torch.as_tensor(items).sum().round().long()
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        if not isinstance(labels, torch.Tensor):
            return tokens_in(inputs)
        shifts = labels.ndim > 1 and getattr(self._trainer, "_loss_shifts_labels", False)
        return (labels[..., 1:] if shifts else labels).ne(-100).sum()

    def evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")

        def loop() -> Any:
            output = original(*args, **kwargs)
            self._leave_if_told(now=True)  # the others wait for its metrics
            return output

        return self._evaluations.run(loop, prefix)

    def log(
        self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        if "loss" in logs and self._numbers:
            logs.update(self._numbers)
            if self._record is not None:
                self._record.line(logs["loss"], self._numbers)
        elif "eval_loss" in logs and self._record is not None:
            self._record.evaluated(logs["eval_loss"])
        return original(logs, *args, **kwargs)
