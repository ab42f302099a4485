"""One line for a script that uses PyTorch Lightning, from `lightning` or `pytorch_lightning`:

    Trainer(..., callbacks=[LightningExchange("diloco", period=100)])

Launched as islands (ISLAND_* variables) the Trainers train one model. What no hook sees is wrapped
on the Trainer's own objects. A run resumes from what `RunState` saves; the place in loops, rows and
schedules is counted from the step of the exchange. Facts: lightning 2.6, `_FitLoop.run`,
`_TrainingEpochLoop.reset`, `_DataConnector._prepare_dataloader`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Sized
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ..attaching import attach, settled
from ..checkpoint.manager import CheckpointManager
from ..checkpoint.run_state import RunState
from ..checkpoint.taking_over import forward
from ..config.schema import ExchangeConfig
from ..errors import NeedsDecision, Stopped
from ..exchange import summary
from ..exchange.exchange import Exchange
from ..exchange.guard import guard
from ..hosts.optimizers import check_inner, optimizer_kind
from ..rendezvous import environment
from ..rendezvous.topology import Topology
from ..runlog.record import tracked
from ..status import tell_of_training
from .data import tokens_in
from .record import TrainingRecord

log = logging.getLogger("fsdp_demo")

# a Trainer takes callbacks of its own package alone, so this one is of each that is installed
_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_FOUND = [module for package, module in _PACKAGES.items() if importlib.util.find_spec(package)]
_Callback: Any = type("_Callback", tuple(importlib.import_module(m).Callback for m in _FOUND), {})


class LightningExchange(_Callback):
    """A callback that joins the Trainers of all islands to train one model.

    Args:
        config: preset name, yaml file or `ExchangeConfig`.
        resume: as for `RunState.restore`; None: "auto" where the launcher or `ckpt_path` says so.
        fresh: when resuming, start the exchange's state anew.
        changes: of the preset, as in `fsdp_demo.preset(name, **changes)`.

    Attributes:
        exchange: that of the last training; None before it.
        added: what a launch says that has added it; a callback of the script goes before it.

    Raises:
        ValueError: in `Trainer.fit`, for what cannot work; says what was found and what to do.
    """

    exchange: Exchange | None = None
    added = ""

    def __init__(
        self,
        config: ExchangeConfig | str,
        *,
        resume: bool | str | None = None,
        fresh: bool = False,
        **changes: Any,
    ):
        self.config, self._resume, self._fresh = settled(config, changes), resume, fresh
        self._trainer: Any = None
        self._state: Any = None
        self._active, self._saved = False, -1
        self._losses: list[Any] = []  # of micro-batches since the last line
        self._numbers: dict[str, float] = {}
        self._record: TrainingRecord | None = None  # in one process
        self._shown, self._guarded = ExitStack(), ExitStack()

    @property
    def _live(self) -> Exchange | None:
        return None if self.exchange is None or self.exchange.finished else self.exchange

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the Trainer, once, and keep this island's files and rows apart."""
        if stage != "fit" or self._trainer is trainer:
            return
        self._trainer, topology = trainer, Topology.from_env()
        summary.speak(topology)
        other = [c for c in trainer.callbacks if isinstance(c, LightningExchange) and c is not self]
        if self.added and topology.rank == 0:
            text = "not: this Trainer has a callback of its script" if other else "to this Trainer"
            log.warning("%s: %s %s", topology.name, self.added, text)
        if self.added and other:
            return
        self._active = True
        self._refuse(trainer, pl_module, sum(not c.added for c in other))
        if topology.islands > 1:
            self._separate(trainer, topology.name)
            data = trainer._data_connector
            data._prepare_dataloader = partial(self._split, topology, data._prepare_dataloader)
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
            loop.on_advance_end = partial(self._hold, loop.on_advance_end)
        trainer.save_checkpoint = partial(self._save, trainer.save_checkpoint)

    def _refuse(self, trainer: Any, module: Any, others: int) -> None:
        kinds = {kind.__name__ for kind in type(trainer.strategy).__mro__}
        works = kinds & {"SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"}
        works -= {"DDPStrategy"} if "DeepSpeedStrategy" in kinds else set()
        works = works if getattr(trainer.strategy, "_tensor_parallel_size", 1) == 1 else set()
        checks = {
            "two LightningExchanges: take one of them out": others,
            f"{type(trainer.strategy).__name__}: take DDPStrategy or, which is FSDP2, "
            "ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)": not works,
            "automatic_optimization=False: call fsdp_demo.attach in on_train_start and finish() in "
            "on_train_end (docs/torch.md)": not module.automatic_optimization,
            f"precision={trainer.precision!r}, whose loss scaler skips steps on one island only: "
            "take 'bf16-mixed'": str(trainer.precision).startswith("16"),
            "local_steps='by_speed': its Trainer counts steps and rows by its own batches; leave "
            "it 'equal', or take transformers' Trainer, or your own loop": self.config.by_speed,
            "drop: Lightning accumulates in a loop of its own; leave it out": self.config.drop,
            "GradientAccumulationScheduler: set Trainer(accumulate_grad_batches=N)": any(
                "GradientAccumulation" in type(c).__name__ for c in trainer.callbacks
            ),
        }
        for text in (text for text, wrong in checks.items() if wrong):
            raise ValueError(f"LightningExchange found {text}")

    def _separate(self, trainer: Any, name: str) -> None:
        """Let the folders of this island end with its name."""
        trainer._default_root_dir = os.path.join(trainer.default_root_dir, name)
        for saver in trainer.checkpoint_callbacks:
            if getattr(saver, "dirpath", None):
                saver.dirpath = os.path.join(saver.dirpath, name)
        for logger in trainer.loggers:
            if hasattr(logger, "_root_dir"):  # CSV, TensorBoard; they had opened a file
                logger._experiment = None
                for at in {"_root_dir", "_save_dir"} & vars(logger).keys():
                    setattr(logger, at, os.path.join(getattr(logger, at), name))

    def _split(
        self, topology: Topology, original: Any, loader: Any, shuffle: bool, mode: Any
    ) -> Any:
        """Deal the rows of a loader to train on to all ranks of all islands."""
        trainer = self._trainer
        if mode != "train" or not isinstance(loader, DataLoader):
            return original(loader, shuffle=shuffle, mode=mode)
        given = isinstance(loader.sampler, DistributedSampler)
        given |= not trainer._accelerator_connector.use_distributed_sampler
        if given or isinstance(loader.dataset, IterableDataset):
            text = "%s: its rows are NOT split by island (a stream, a DistributedSampler, or "
            text += "use_distributed_sampler=False): give it split_dataset_by_island(dataset)"
            log.warning(text, topology.name)
            return original(loader, shuffle=shuffle, mode=mode)
        inside = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        parts, rows = topology.islands * inside["num_replicas"], cast(Sized, loader.dataset)
        if len(rows) < parts:
            raise ValueError(f"{len(rows)} rows for {parts} ranks of all islands: give more rows")
        shuffle = not isinstance(loader.sampler, SequentialSampler)
        place = {"rank": topology.island + topology.islands * inside["rank"], "drop_last": True}
        place |= {"num_replicas": parts, "overfit_batches": trainer.overfit_batches}
        module = sys.modules[type(trainer._data_connector).__module__]
        sampler = module._get_distributed_sampler(loader, shuffle, mode=mode, **place)
        return module._update_dataloader(loader, sampler, mode=mode)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the other islands: model and optimizer are set up and, with `ckpt_path`, loaded."""
        if not self._active:
            return
        tell_of_training()
        (optimizer,), model, topology = trainer.optimizers, trainer.model, Topology.from_env()
        loop, config, norm = trainer.fit_loop, self.config, trainer.gradient_clip_val
        steps = trainer.estimated_stepping_batches
        facts: dict[str, Any] = {"seed_everything": os.environ.get("PL_GLOBAL_SEED", "0")}
        facts["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        try:
            check_inner(config, [optimizer_kind(optimizer)], [optimizer])
        except ValueError as error:
            cure = f'(fsdp_demo.preset("{config.preset}"), self.named_parameters(), lr=...)'
            text = f"{error}. Let configure_optimizers return fsdp_demo.base_optimizer{cure}"
            raise ValueError(text) from None
        if norm and trainer.gradient_clip_algorithm != "value":
            config, trainer.gradient_clip_val = config.clipped_once(norm)
            self._guarded.callback(setattr, trainer, "gradient_clip_val", norm)
        saves = CheckpointManager(trainer.default_root_dir, topology)
        self._state = state = RunState(saves, model, optimizer)
        step, named, joins = trainer.global_step, bool(trainer.ckpt_path), topology.under_way()
        if joins or not (named and self._fresh):
            auto = "auto" if named or environment.resumes(os.environ) else False
            state.restore(auto if self._resume is None else self._resume, fresh=self._fresh)
            if named and not joins and state.step != step:
                text = f"ckpt_path is of step {step}, the newest in {saves.root} that fits is of "
                text += f"step {state.step}: leave ckpt_path out and give LightningExchange(..., "
                text += "resume='auto'), or take it with fresh=True, without the exchange's state"
                raise NeedsDecision(text)
        must_match = facts | {"max_steps": steps, "batches": str(loop.max_batches)}
        how: dict[str, Any] = {"step": state.step or step, "state": state.saved}
        how |= {"model": model, "topology": topology, "fresh": self._fresh}
        self.exchange = exchange = attach(optimizer, config, must_match=must_match, **how)
        exchange.raise_stopped(False)
        self._saved = exchange.step
        if exchange.step:
            log.info("%s goes on from step %d", topology.name, exchange.step)
            self._move_to(loop, exchange.step)
        state.restore_random()
        counted = int(exchange.totals()["global_tokens"])  # which all ranks of the island ask for
        if topology.rank == 0:
            how = {"facts": facts | {"model": type(pl_module).__name__}, "counted": counted}
            how |= {"steps": None if steps == math.inf else steps}
            how |= {"bar": trainer.progress_bar_callback}
            self._record = TrainingRecord(exchange, trainer.default_root_dir, model, **how)
        again = "the same command, under ISLAND_RESUME=auto or with resume='auto'"
        save = partial(state.save, exchange, last=True)
        self._guarded.enter_context(guard(exchange, save, again))

    def _move_to(self, loop: Any, step: int) -> None:
        """Set loops, rows and schedules of the Trainer to `step`, as if it had trained so far."""
        trainer, epoch, most = self._trainer, loop.epoch_loop, loop.max_batches
        group = trainer.accumulate_grad_batches
        per_epoch = sys.maxsize if most == math.inf else math.ceil(most / group)
        epochs, batches = step // per_epoch, step % per_epoch * group
        for count in (loop.epoch_progress.total, loop.epoch_progress.current):
            count.ready = count.started = epochs + bool(batches)
            count.processed = count.completed = epochs
        seen, progress = epochs and epochs * most, epoch.batch_progress
        for count, done in ((progress.total, seen + batches), (progress.current, batches)):
            count.ready = count.started = count.processed = done
            count.completed = done - bool(batches)  # as saved in on_train_batch_end: it is added
        progress.is_last_batch = False
        epoch._batches_that_stepped = step - bool(batches)
        steps = epoch.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready = steps.completed = step
        loop.on_iteration_done()
        loop.restarting = bool(batches)
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        loop.reset()
        for loader in loop._combined_loader.flattened:
            sys.modules[type(loop).__module__]._set_sampler_epoch(loader, epochs)
        fetcher = iter(loop._data_fetcher)
        for _ in range(batches):
            next(fetcher)
        fetcher.fetched -= batches  # the loop adds them
        for plan in trainer.lr_scheduler_configs:
            places = [min((s % per_epoch + 1) * group, most) for s in range(step)]
            if plan.interval == "epoch":
                places = [*range(1, epochs + 1)]
            due = sum(place % plan.frequency == 0 for place in places)
            if due != plan.scheduler.last_epoch:
                forward(plan.scheduler, due - plan.scheduler.last_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        if self._live is not None:
            self._live.report(tokens=tokens_in(batch))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._live is not None:
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
            self._live.report(loss=self._losses[-1])

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """After a step and its exchange: stop, end at the last step, log."""
        exchange, loop = self._live, trainer.fit_loop
        if exchange is None or loop._should_accumulate():
            return
        if exchange.step != trainer.global_step:
            text = f"the optimizer has stepped {exchange.step} times, the Trainer counts "
            raise RuntimeError(f"{text}{trainer.global_step}: step it once per step")
        if self._record is not None:
            self._record.step()
        epochs = trainer.current_epoch + loop.epoch_loop._num_ready_batches_reached()
        ends = 0 <= trainer.max_steps <= exchange.step or 0 <= trainer.max_epochs <= epochs
        leaves = exchange.stopped and exchange.leaving
        if not leaves and (exchange.stopped or ends):
            exchange.finish(close=False)  # what is validated and saved now is the common model
        if self._losses and (exchange.finished or exchange.step % trainer.log_every_n_steps == 0):
            self._numbers, self._losses = tracked(exchange), [torch.stack(self._losses).mean()]
            self.log_dict(self._numbers)
            loss = float(trainer.strategy.reduce(self._losses.pop()))
            if self._record is not None:
                self._record.line(loss, self._numbers)
        if leaves:
            raise Stopped("this island is told to end")

    def _hold(self, original: Callable[..., Any], *args: Any) -> None:
        """Behind each batch and epoch (`original`) send a wish to stop to all islands first."""
        original(*args)
        trainer = self._trainer
        if self.exchange is not None and self.exchange.stopped:
            trainer.should_stop = True
        elif self._live is not None and trainer.should_stop and trainer.fit_loop._can_stop_early:
            trainer.should_stop = False
            self._live.request_stop(together=True)

    def on_validation_start(self, trainer: Any, *args: Any) -> None:
        """Validate what the method calls its model."""
        if self._live is not None:
            self._shown.enter_context(self._live.outer_parameters(trainer.model))

    def on_validation_batch_end(self, *args: Any) -> None:
        """Leave a validation where this island, of one process, is told to end."""
        if (exchange := self._live) and exchange.topology.world == 1 and exchange.stop_requested:
            raise Stopped("a validation is left: this island is told to end")

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        self._shown.close()
        if self._record is not None and "val_loss" in trainer.callback_metrics:
            self._record.evaluated(float(trainer.callback_metrics["val_loss"]))

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Save by the Trainer (`original`) and, once at a step, what a resume needs."""
        original(*args, **kwargs)
        exchange = self.exchange
        if exchange is None or exchange.closed or self._trainer.interrupted:
            return
        if self._saved != exchange.step:
            self._saved = exchange.step
            self._state.save(exchange)
            if self._record is not None:
                self._record.saved()

    def on_train_end(self, *args: Any) -> None:
        """Part from the others, with one model."""
        if self.exchange is not None and not self.exchange.closed:
            self.exchange.finish()
            if self._record is not None:
                self._record.end(self._numbers)
            self._guarded.close()
            self._state.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save and end this process after SIGTERM or a lost peer; else leave the others."""
        if self.exchange is not None and not self.exchange.closed:
            self._shown.close()
            if self._record is not None:
                self._record.close()
            for logger in trainer.loggers:
                logger.save()
            self._guarded.__exit__(type(exception), exception, exception.__traceback__)
            self.exchange.detach()
