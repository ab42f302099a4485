"""One line for a script that uses `transformers.Trainer`.

    Trainer(..., callbacks=[ExchangeCallback("diloco", period=100)])

Launched as islands (ISLAND_* variables) or as a mesh (`ExchangeParallelismConfig`), the Trainer
then trains one model on all of them. Alone, a preset that keeps the user's optimizer leaves the
Trainer as if the line were not there; a preset with an optimizer of its own acts as its method does
with one replica.

The callback finds its Trainer and wraps methods of that one object (`train`, `training_step`,
`evaluation_loop`, `log`, `_save_checkpoint`, `_maybe_log_save_evaluate`; for the hub `push_to_hub`,
`create_model_card`; on the way in that of `joining.py`): what it must see or show there passes
through no event. Facts: transformers 5.23, `CallbackHandler.call_event`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ...attaching import settled
from ...config.schema import ExchangeConfig
from ...errors import Mismatch, PeerLost, WireError
from ...exchange.exchange import Exchange
from ...exchange.guard import start_again
from ...rendezvous.topology import Topology
from ...status import DECIDE, SAVED, end_within, tell_launcher
from .beginning import Beginning, refuse_elsewhere
from .session import Session
from .setup import (
    find_trainer,
    has_own_optimizer,
    quieten,
    refuse,
    separate,
    take_sigterm,
    talk,
    topology_of,
    warn,
)
from .state import manager_of, refuse_alone
from .stop import Stops

log = logging.getLogger("fsdp_demo")


class ExchangeCallback(TrainerCallback):
    """A callback that joins the Trainers of all islands to train one model.

    It attaches to the optimizer when training begins, logs `exchange/*` with the Trainer's training
    logs, evaluates under the parameters that the method calls its model, keeps islands apart in
    folders and trackers, saves and loads its state with every checkpoint, and lets a wish to stop
    take effect on all islands at the same step. Gradients are clipped by `max_grad_norm`.

    Args:
        config: preset name, yaml file or `ExchangeConfig`.
        fresh: when resuming, start the exchange's state anew, for checkpoints without one (which
            are refused otherwise).
        remote: as for `CheckpointManager`.
        kept_energy: log `exchange/kept_energy/CHANNEL`, too: the share of what a channel had to
            send that was sent (`Exchange.kept_energy`).
        changes: of the preset, as in `fsdp_demo.preset(name, **changes)`.

    Raises:
        ValueError: at `Trainer(...)` or `train()`, for what cannot work; the sentence says what was
            found and what to do.

    Example:
        >>> from fsdp_demo.integrations.trainer import ExchangeCallback
        >>> ExchangeCallback("diloco", period=100).config.channels[0].schedule.sync_every
        100
    """

    _resume = "resume_from_checkpoint=True (auto)"  # what a start again needs, for the log

    def __init__(
        self,
        config: ExchangeConfig | str,
        *,
        fresh: bool = False,
        kept_energy: bool = False,
        remote: str | None = None,
        **changes: Any,
    ):
        self.config = settled(config, changes)
        if "clip" in changes:
            raise ValueError(
                f"clip={changes['clip']}: under the Trainer the norm that clips is "
                "TrainingArguments(max_grad_norm=...)"
            )
        self._fresh, self._watch_energy, self._remote = fresh, kept_energy, remote
        self._trainer: Trainer | None = None
        self._topology = Topology()
        self._active = False
        self._beginning: Beginning | None = None
        self._stops: Stops
        self._session: Session | None = None

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of the last training; None before it, and where there was none."""
        return None if self._beginning is None else self._beginning.exchange

    @property
    def _live(self) -> Exchange | None:
        """The exchange while it runs."""
        exchange = self.exchange
        return None if exchange is None or exchange.finished else exchange

    def _warn(self, text: str) -> None:
        if self._trainer is not None:
            warn(self._trainer, self._topology, text)

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
        self._wrap("train", self._train)
        if not self._active:
            log.info(
                "no peers: preset %r has nothing to exchange, the Trainer runs as it would without "
                "it",
                self.config.preset,
            )
            return
        refuse(trainer, self.config)
        if self._topology.elastic:
            separate(trainer, self._topology)
        if self._topology.one_world:
            quieten(trainer)
        steps = ("training_step", "evaluation_loop", "log")
        for name in (*steps, "_save_checkpoint", "_maybe_log_save_evaluate"):
            self._wrap(name, functools.partial(self._in_session, name.lstrip("_")))
        take_sigterm(trainer)

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        original = getattr(self._trainer, name)
        setattr(self._trainer, name, functools.wraps(original)(functools.partial(around, original)))

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the Trainer, which is built now, and keep this island's files apart."""
        self.set_trainer(find_trainer(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join the other replicas: model and optimizer are sharded and, on resume, loaded."""
        if self._trainer is None:
            self.set_trainer(find_trainer(self))
            if self._active:
                raise RuntimeError(
                    "after trainer.add_callback(callback) call callback.set_trainer(trainer), or "
                    "pass it as Trainer(callbacks=[...])"
                )
        if not self._active:
            return
        trainer, beginning = self._trainer, self._beginning
        assert trainer is not None and beginning is not None
        self._topology = topology_of(trainer)
        # this list is being walked, and who joins a run restores callbacks in it
        trainer.callback_handler.callbacks = [*trainer.callback_handler.callbacks]
        exchange = beginning.attach(trainer, self.config, self._topology)
        exchange.watch_energy(self._watch_energy)
        self._session = Session(trainer, exchange, beginning, self._stops)

    def _resume_alone(self, trainer: Trainer, wanted: Any) -> Any:
        """`resume_from_checkpoint` for the Trainer where nothing is exchanged."""
        word, found = str(wanted).lower(), wanted
        if word in ("true", "auto"):
            found = get_last_checkpoint(str(trainer.args.output_dir))
        if word == "auto" and found is None:
            refuse_elsewhere(manager_of(trainer, self._topology, remote=""))
        if not self._fresh:
            refuse_alone(found, self.config.preset)
        return found if word == "auto" else wanted

    def _train(
        self,
        original: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        trainer = self._trainer
        assert trainer is not None
        if not self._active:
            return original(self._resume_alone(trainer, resume_from_checkpoint), *args, **kwargs)
        if next(iter(args), kwargs.get("trial")) is not None:
            raise ValueError(
                "hyperparameter_search beside an exchange: trials of islands would differ; search "
                "on one island, without the callback"
            )
        self._session = self._beginning = None  # of the last training
        self._stops = Stops(lambda: self._live, self._warn, lambda: self._to_resume(SAVED))
        wish = resume_from_checkpoint, self._fresh, self._remote
        beginning = Beginning.find(trainer, self._topology, *wish)
        self._beginning = beginning
        with beginning.after:
            try:
                with self._stops.signals():
                    result = original(beginning.given, *args, **kwargs)
                    if self._stops.left:
                        beginning.manager.upload_rest()
            except (PeerLost, WireError) as error:
                self._lost(trainer, error)
                raise
        if self._stops.left:
            self._stops.leave(trainer.args.process_index)
        if self._stops.cut_off:
            self._warn(self._to_resume(SAVED))
        return result

    def _lost(self, trainer: Trainer, error: PeerLost | WireError) -> None:
        """Save where this island stands after `error`, which ends the training, and tell its
        launcher. Before the first step there is nothing to be saved. Raises SystemExit: this rank
        was told to end, so the end is no error.
        """
        self._warn(f"{error}")
        if self.exchange is not None:
            self.exchange.leave(stopped=False)
        self._stops.unsaved, beginning = False, self._beginning
        if self._session is not None and beginning is not None:
            self._session.save_lost()
            if self._topology.elastic:  # in a mesh the lost rank is one of those that vote
                end_within(self._topology.stop_timeout)
                beginning.manager.upload_rest()
        if self._stops.told and not isinstance(error, Mismatch):
            self._stops.leave(trainer.args.process_index)
        self._warn(self._to_resume(DECIDE if isinstance(error, Mismatch) else SAVED))
        if isinstance(error, PeerLost):
            error.unsaved = self._stops.unsaved
        if not isinstance(error, Mismatch) and not self._stops.unsaved:
            tell_launcher(trainer.args.process_index, SAVED)

    def _to_resume(self, status: int) -> str:
        """What is saved, and how training goes on after `status`; empty where nothing is logged."""
        trainer, beginning = self._trainer, self._beginning
        if trainer is None or beginning is None or trainer.args.process_index != 0:
            return ""  # it may lack the folder
        last = next(reversed(beginning.manager.whole().values()), "none")
        again = start_again(self._topology, f"the same command, with {self._resume}", status)
        return f"the last checkpoint here is {last}; {again}"

    def _in_session(
        self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a method of the Trainer (`original`) by that of the session, if there is one."""
        if self._session is None:
            return original(*args, **kwargs)
        return getattr(self._session, name)(original, *args, **kwargs)
