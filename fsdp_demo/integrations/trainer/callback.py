"""One line for a script that uses `transformers.Trainer`.

    Trainer(..., callbacks=[ExchangeCallback("diloco", period=100)])

Launched as islands (ISLAND_* variables) or as a mesh (`ExchangeParallelismConfig`), the Trainer
then trains one model on all of them. Alone, a preset that keeps the user's optimizer leaves the
Trainer as if the line were not there; a preset with an optimizer of its own acts as its method does
with one replica.

The callback finds its Trainer and wraps methods of that one object (`train`, `training_step`,
`evaluation_loop`, `log`; for the hub `push_to_hub`, `create_model_card`; on the way in those of
`take_over.py`): what it must see or show there passes through no event. Facts: transformers 5.23,
`Trainer._run_epoch`, `_maybe_log_save_evaluate`, `_finalize_training`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ...attaching import attach
from ...checkpoint.exchange_state import SavedExchange
from ...comm.topology import Topology
from ...config.load import changed, load_config
from ...config.schema import ExchangeConfig
from ...errors import Mismatch, PeerLost, WireError
from ...exchange.exchange import Exchange
from ...exchange.startup import OwnCheckpoint
from ...report.metrics import tracked
from ...status import SAVED, tell_launcher
from .batches import FirstBatches, tokens_in
from .engine import before_steps, engine_of
from .evaluation import Evaluations
from .joining import move_to, tells
from .optimizer import exchange_optimizer
from .record import TrainerRecord
from .returning import own_checkpoint
from .saves import Saves
from .setup import clipping, find_trainer, has_own_optimizer, quieten, refuse, separate, topology_of
from .state import Rotation, find_checkpoint, open_state, refuse_alone, restore_local
from .stop import Stops
from .take_over import TakeOver
from .words import check_optimizer, talk

log = logging.getLogger("fsdp_demo")

__all__ = ["ExchangeCallback", "exchange_optimizer", "has_own_optimizer"]


class ExchangeCallback(TrainerCallback):
    """Joins the Trainers of all islands.

    It attaches to the optimizer when training begins, logs `exchange/*` with the Trainer's training
    logs, evaluates under the parameters that the method calls its model, keeps islands apart in
    folders and trackers, saves and loads its state with every checkpoint, and lets a wish to stop
    take effect on all islands at the same step. Gradients are clipped by `max_grad_norm`.

    Args:
        config: preset name, yaml file or `ExchangeConfig`.
        fresh: when resuming, start the exchange's state anew, for checkpoints without one (which
            are refused otherwise).
        kept_energy: log `exchange/kept_energy/CHANNEL`, too: the share of what a channel had to
            send that was sent (`Exchange.kept_energy`).
        changes: of the preset, as in `fsdp_demo.preset(name, **changes)`.

    Attributes:
        exchange: the `Exchange` of the last training, None before it and where there was none.

    Raises:
        ValueError: at `Trainer(...)` or `train()`, for what cannot work; the sentence says what was
            found and what to do.

    Example:
        >>> from fsdp_demo.integrations.trainer import ExchangeCallback
        >>> ExchangeCallback("diloco", period=100).config.channels[0].schedule.sync_every
        100
    """

    def __init__(
        self,
        config: ExchangeConfig | str,
        *,
        fresh: bool = False,
        kept_energy: bool = False,
        **changes: Any,
    ):
        self.config = (
            load_config(config, changes) if isinstance(config, str) else changed(config, changes)
        )
        if "clip" in changes:
            raise ValueError(
                f"clip={changes['clip']}: under the Trainer the norm that clips is "
                "TrainingArguments(max_grad_norm=...)"
            )
        self.exchange: Exchange | None = None
        self._fresh, self._topology, self._watch_energy = fresh, Topology(), kept_energy
        self._trainer: Trainer | None = None
        self._active = False
        self._engine: Any = None  # DeepSpeed's, while it trains
        self._undo: list[Callable[[], None]] = []
        self._limit: float | None = None
        self._kept_total: int | None = None
        self._rotation: Rotation | None = None
        self._saves: Saves | None = None
        self._record: TrainerRecord | None = None
        self._resume: str | bool | None = None
        self._taken: TakeOver | None = None
        self._joins = False
        self._named = False  # a person named the checkpoint to resume from
        self._stops = Stops(lambda: self._live, self._warn)
        self._reset()

    def _reset(self) -> None:
        self._loss: Any = 0.0
        self._numbers: dict[str, float] = {}
        self._steps_in_epoch = 0

    # ---- before training -----------------------------------------------------------------------

    def set_trainer(self, trainer: Trainer) -> None:
        """Bind to a Trainer; happens by itself at the first event."""
        if self._trainer is trainer:
            return
        if self._trainer is not None:
            raise ValueError("this ExchangeCallback belongs to another Trainer: make one for each")
        if sum(isinstance(c, ExchangeCallback) for c in trainer.callback_handler.callbacks) > 1:
            raise ValueError(
                "this Trainer has two ExchangeCallbacks: a model can be exchanged by one method "
                "only, take one of them out"
            )
        self._trainer, self._topology = trainer, topology_of(trainer)
        alone = self._topology.islands == 1
        self._active = not alone or has_own_optimizer(self.config)
        talk(trainer, self._topology)
        if not self._active:
            log.info(
                "no peers: preset %r has nothing to exchange, the Trainer runs as it would without "
                "it",
                self.config.preset,
            )
            self._wrap("train", self._train_alone)
            return
        refuse(trainer, self.config)
        if self._topology.kind == "islands":
            separate(trainer, self._topology)
        if self._topology.kind == "mesh":
            quieten(trainer)
        for name in ("train", "training_step", "evaluation_loop", "log", "_save_checkpoint"):
            self._wrap(name, getattr(self, f"_{name.lstrip('_')}"))

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        original = getattr(self._trainer, name)
        setattr(self._trainer, name, functools.wraps(original)(functools.partial(around, original)))

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer is built: check it, keep this island's files apart."""
        self.set_trainer(find_trainer(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Model and optimizer are sharded and, on resume, loaded: join the other replicas."""
        if self._trainer is None:
            self.set_trainer(find_trainer(self))
            if self._active:
                raise RuntimeError(
                    "after trainer.add_callback(callback) call callback.set_trainer(trainer), or "
                    "pass it as Trainer(callbacks=[...])"
                )
        if not self._active:
            return
        assert self._trainer is not None
        self._reset()
        # last in a new list (the old one is being walked): sees what every other callback wishes
        handler = self._trainer.callback_handler
        handler.callbacks = sorted(handler.callbacks, key=lambda callback: callback is self)
        trainer, self._topology = self._trainer, topology_of(self._trainer)
        check_optimizer(trainer, self.config)
        self._limit = args.max_grad_norm
        self._engine = engine_of(trainer)
        config = self.config
        options = {}
        if self._engine is None:
            config, args.max_grad_norm = clipping(config, args.max_grad_norm)
        else:  # clips by itself; the exchange's state is beside what the Trainer saves
            options = {"checkpoints": False}
            self._undo.append(before_steps(trainer.accelerator, self._hear))
        facts = {
            "max_steps": state.max_steps,
            **{name: str(getattr(args, name)) for name in ("lr_scheduler_type", "warmup_steps")},
        }
        facts |= {"lr_scheduler_kwargs": str(args.lr_scheduler_kwargs)}
        # with a state of the exchange islands may stand at unlike steps between two exchanges
        if self._fresh:
            facts["at"] = state.global_step
        self.exchange = exchange = attach(
            trainer.optimizer if self._engine is None else self._engine,
            config,
            model=trainer.model,
            topology=self._topology,
            must_match=facts | Evaluations.facts(trainer),
            step=0 if self._taken else state.global_step,
            state=self._state(args, state),
            batch=(args.per_device_train_batch_size, args.gradient_accumulation_steps),
            # questions to the islands come first: one that has to catch up waits for those that it
            # asks
            catch_up=False,
            **options,
        )
        if exchange.newcomer:
            self._warn(move_to(trainer, exchange, self._undo))
        elif exchange.step != state.global_step:
            raise ValueError(
                f"{self._topology.name} resumes at step {state.global_step}, another island at "
                f"{exchange.step}: resume all from one step"
            )
        if self._taken:
            self._warn(self._taken.sentence(exchange, args))
        elif state.global_step and not self._fresh:
            restore_local(self._checkpoint(args, state), exchange, self._engine is not None)
            exchange.accept_parameters()
        self._saves = saves = Saves(trainer, exchange, self._engine is not None)
        saves.begin(state.global_step, self._named)
        if self._topology.kind == "islands" and args.process_index == 0:
            self._rotation = Rotation(Path(args.output_dir), self._topology, args.save_total_limit)
        self._kept_total = args.save_total_limit
        args.save_total_limit = None if self._topology.kind == "islands" else args.save_total_limit
        exchange.raises_stopped = False
        if self._engine is None:  # DeepSpeed looks by itself
            exchange.watch_gradients()
        self._evaluations = Evaluations(exchange, trainer)
        exchange.tells = functools.partial(tells, trainer, self._evaluations)
        self._first = FirstBatches(exchange, trainer.train_dataset)
        exchange.watch_energy(self._watch_energy)
        if args.process_index == 0:
            self._record = TrainerRecord(trainer, exchange)

    def _state(self, args: Any, state: Any) -> SavedExchange | OwnCheckpoint | None:
        """What `attach` is given to go on from."""
        assert self._trainer is not None
        if self._joins:
            return (
                None
                if self._fresh or self._engine is not None
                else own_checkpoint(self._trainer, self._topology)
            )
        return (
            open_state(self._checkpoint(args, state), self._topology, self._fresh)
            if state.global_step and not self._taken
            else None
        )

    def _checkpoint(self, args: Any, state: Any) -> Path:
        """The folder that the Trainer has loaded."""
        last = (
            get_last_checkpoint(args.output_dir)
            or f"{args.output_dir}/checkpoint-{state.global_step}"
        )
        return Path(self._resume if isinstance(self._resume, str) else last)

    # ---- steps ---------------------------------------------------------------------------------

    @property
    def _live(self) -> Exchange | None:
        """The exchange while it runs."""
        return self.exchange if self.exchange is not None and not self.exchange.finished else None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step's loss goes into the next header."""
        if self._engine is None:
            self._note()

    def _note(self) -> None:
        if (exchange := self._live) is not None:
            exchange.report(loss=self._loss)
            self._loss = 0.0

    def _hear(self, loss: torch.Tensor, last: bool) -> None:
        """A micro-batch's loss, before the engine steps."""
        self._loss = self._loss + loss
        if last:
            self._note()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the exchange of this step: compare clocks, take part in a stop, gather numbers for
        the log, end at the last step.
        """
        if (exchange := self._live) is None:
            return
        if exchange.step != state.global_step:
            raise RuntimeError(
                f"the optimizer has stepped {exchange.step} times, the Trainer counts "
                f"{state.global_step}: replicas would lose each other; "
                "step the optimizer once per step of the Trainer"
            )
        self._steps_in_epoch += 1
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
        """Numbers for the log. All ranks of the island come here together: the Trainer logs on all
        of them or on none.
        """
        if self.exchange is not None and not self.exchange.closed:
            self._numbers = tracked(self.exchange)
            if self._saves is not None:
                self._numbers["exchange/failed_saves"] = float(self._saves.failed)

    def _finish(self) -> None:
        """The last exchange: from here on evaluation, checkpoints and `save_model` have the model
        that all islands hold.
        """
        assert self.exchange is not None
        self._stops.ending = True
        self.exchange.finish(close=False)
        self._count()
        if not self._evaluations.agreed:
            self.exchange.finish()

    def _warn(self, text: str) -> None:
        if self._trainer is not None and self._trainer.args.process_index == 0:
            log.warning("%s: %s", self._topology.name, text)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops.hold(control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops.hold(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops.hold(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """This rank's part of the exchange, beside the Trainer's own files, and the manifest over
        all.
        """
        if self._saves is not None:
            saved = self._saves.seal(state.global_step, kwargs.get("model"))
            self._stops.unsaved = not saved
            if saved and self._rotation is not None:
                self._rotation.saved(state.global_step, state.best_model_checkpoint)
        if self._record is not None:
            self._record.saved()
        self._stops.hold(control)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps_in_epoch = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an agreed stop, whose checkpoint is written by now, the islands part with one
        model.
        """
        if self._live is None:
            return
        if control.should_log:
            self._count()
        if self._stops.ending:
            # the checkpoint of this step, before the last exchange, is the one to resume from
            control.should_save = False
            if self._stops.left:
                self._live.detach()
            else:
                self._finish()
        elif self._steps_in_epoch:
            # an epoch without steps: the data are at their end, nothing will be exchanged any more
            self._stops.hold(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Part from the others: with one model where all have come here at the same step, as they
        do but for data that end early.
        """
        if self.exchange is None:
            return
        # loaded by now: not to be averaged with anything
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        try:
            if (
                self._live is None
                or not best
                and self._live.across_islands.all_equal(["end", state.global_step])
            ):
                self.exchange.finish()
        except (PeerLost, WireError) as error:
            self._warn(
                f"training ended at step {state.global_step} of {state.max_steps} without the "
                f"other islands: {error}"
            )
        if self._record is not None and self.exchange.finished and not self._stops.left:
            self._record.end(self._numbers)
        self.exchange.detach()  # the Trainer may train on with this optimizer
        self._give_back(args)

    def _give_back(self, args: Any) -> None:
        if self._limit is not None:
            args.max_grad_norm, self._limit = self._limit, None
            args.save_total_limit = self._kept_total
        if self._rotation is not None:
            self._rotation.close()
            self._rotation = None
        if self._record is not None:
            self._record.close()
            self._record = None
        while self._undo:
            self._undo.pop()()

    # ---- methods of the Trainer, wrapped -------------------------------------------------------

    def _train_alone(
        self,
        original: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._trainer is not None and str(resume_from_checkpoint).lower() == "auto":
            resume_from_checkpoint = get_last_checkpoint(self._trainer.args.output_dir)
        if not self._fresh and self._trainer is not None:
            last = resume_from_checkpoint is True and get_last_checkpoint(
                self._trainer.args.output_dir
            )
            refuse_alone(last or resume_from_checkpoint, self.config.preset)
        return original(resume_from_checkpoint, *args, **kwargs)

    def _train(
        self,
        original: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        trainer = self._trainer
        assert trainer is not None
        if next(iter(args), kwargs.get("trial")) is not None:
            raise ValueError(
                "hyperparameter_search beside an exchange: trials of islands would differ; search "
                "on one island, without the callback"
            )
        self._named = isinstance(resume_from_checkpoint, (str, os.PathLike)) and str(
            resume_from_checkpoint
        ).lower() not in ("true", "auto")
        self._joins = joins = self._topology.under_way()  # what the others hold comes with attach
        where = (
            None
            if joins
            else find_checkpoint(
                resume_from_checkpoint,
                Path(str(trainer.args.output_dir)),
                self._topology,
                self._fresh,
            )
        )
        self._taken = where if isinstance(where, TakeOver) else None
        resume_from_checkpoint = self._resume = (
            self._taken.begin(trainer, self._undo) if self._taken else where
        )
        self._stops = Stops(lambda: self._live, self._warn)
        try:
            with self._stops.sigterm(trainer.args):
                result = original(resume_from_checkpoint, *args, **kwargs)
        except (PeerLost, WireError) as error:
            self._warn(f"{error}")
            if self.exchange is not None:
                self.exchange.leave(stopped=False)
            self._stops.unsaved = False
            self._save_lost(trainer)
            last = get_last_checkpoint(trainer.args.output_dir) or "none"
            self._warn(
                f"the last checkpoint here is {last}; start all islands again with "
                "resume_from_checkpoint=True (auto)"
            )
            if not isinstance(error, Mismatch) and not self._stops.unsaved:
                tell_launcher(trainer.args.process_index, SAVED)
            raise
        finally:
            self._give_back(trainer.args)
            # an error: let the others see at once that this island is gone
            if self.exchange is not None and not self.exchange.closed:
                self.exchange.detach()
        if self._stops.left:
            self._stops.leave(trainer.args.process_index)
        return result

    def _save_lost(self, trainer: Any) -> None:
        """A checkpoint of where a peer was lost: all ranks of this island are here, and what was
        under way is saved as it was sent.
        """
        args, state, exchange = trainer.args, trainer.state, self.exchange
        if exchange is None or args.save_strategy == "no" or self._topology.kind == "mesh":
            return
        # the local step was taken: end it as the Trainer would have
        if exchange.step == state.global_step + 1:
            trainer.lr_scheduler.step()
            state.global_step += 1
        if not (
            Path(args.output_dir) / f"checkpoint-{state.global_step}" / "trainer_state.json"
        ).exists():
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
            trainer.control = trainer.callback_handler.on_save(args, state, trainer.control)

    def _save_checkpoint(self, original: Callable[..., Any], model: Any, trial: Any = None) -> None:
        if self._saves is None:
            original(model, trial)
        else:
            self._saves.write(original, model, trial)

    def _training_step(
        self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if (exchange := self._live) is None:
            return original(model, inputs, *args, **kwargs)
        self._first.look(inputs)
        exchange.catch_up()
        exchange.report(tokens=tokens_in(inputs))
        loss = original(model, inputs, *args, **kwargs)
        if self._engine is None and isinstance(loss, torch.Tensor):
            self._loss = self._loss + loss.detach()
        return loss

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.exchange is None:
            return original(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        return self._evaluations.run(lambda: original(*args, **kwargs), prefix)

    def _log(
        self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        if "loss" in logs and self._numbers:
            logs.update(self._numbers)
            if self._record is not None:
                self._record.line(logs["loss"], self._numbers)
        elif "eval_loss" in logs and self._record is not None:
            self._record.evaluated(logs["eval_loss"])
        return original(logs, *args, **kwargs)
