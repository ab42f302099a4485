"""How a training of the Trainer begins: anew, from a checkpoint, at the step of islands that hold
one which this island lacks, or at that of a run under way (`joining.py`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from ...attaching import attach
from ...checkpoint.exchange_state import SavedExchange
from ...checkpoint.manager import CheckpointManager
from ...config.schema import ExchangeConfig
from ...exchange.exchange import Exchange
from ...rendezvous.topology import Topology
from .choosing import TakeOver, find_checkpoint, is_named
from .engine import engine_of
from .evaluation import Evaluations
from .joining import load_moments, move_to
from .setup import check_optimizer, clipping, warn
from .state import manager_of, open_state, restore_local


@dataclass
class Beginning:
    """Found by all islands together, before the Trainer trains.

    Attributes:
        given: what the Trainer is given as `resume_from_checkpoint`: a folder, True, or what it
            takes for none.
        taken: what this island goes on from without a checkpoint.
        joins: the others are under way; what they hold comes with `attach`.
        named: a person named the checkpoint.
        fresh: begin the exchange's state anew.
        after: what must be undone when training is over.
        manager: of the Trainer's checkpoints.
        exchange: what `attach` made; None before.
    """

    given: Any
    taken: TakeOver | None
    joins: bool
    named: bool
    fresh: bool
    after: ExitStack
    manager: CheckpointManager
    exchange: Exchange | None = None

    @classmethod
    def find(cls, trainer: Trainer, topology: Topology, wanted: Any, fresh: bool) -> Beginning:
        """From what the user gave to `train`; what is set up for it is undone by `after`.

        Raises:
            NeedsDecision, ValueError: as `find_checkpoint`.
        """
        joins, manager = topology.under_way(), manager_of(trainer, topology)
        where = None if joins else find_checkpoint(wanted, manager, fresh)
        taken = where if isinstance(where, TakeOver) else None
        after = ExitStack()
        after.callback(manager.close)
        given = None if taken else where
        return cls(given, taken, joins, is_named(wanted), fresh, after, manager)

    def attach(self, trainer: Trainer, config: ExchangeConfig, topology: Topology) -> Exchange:
        """Join the other replicas. Model and optimizer are sharded and, on resume, loaded.

        Raises:
            ValueError: islands at unlike steps, and as `attach`, `open_state`, `restore_local`.
        """
        args: Any = trainer.args
        state, engine = trainer.state, engine_of(trainer)
        check_optimizer(trainer, config)
        self.after.callback(setattr, args, "max_grad_norm", args.max_grad_norm)
        options = {}
        if engine is None:
            config, args.max_grad_norm = clipping(config, args.max_grad_norm)
        else:  # clips by itself; the exchange's state is beside what the Trainer saves
            options = {"checkpoints": False}
        facts = {
            "max_steps": state.max_steps,
            **{name: str(getattr(args, name)) for name in ("lr_scheduler_type", "warmup_steps")},
            "lr_scheduler_kwargs": str(args.lr_scheduler_kwargs),
        }
        own = self.joins and not self.fresh and engine is None
        moments = own and load_moments(trainer, topology)
        # with a state of the exchange islands may stand at unlike steps between two exchanges
        if self.fresh:
            facts["at"] = self.taken.step if self.taken else state.global_step
        self.exchange = exchange = attach(
            trainer.optimizer if engine is None else engine,
            config,
            model=trainer.model,
            topology=topology,
            must_match=facts | Evaluations.facts(trainer),
            step=state.global_step,
            state=self._state(trainer, topology),
            batch=(args.per_device_train_batch_size, args.gradient_accumulation_steps),
            # questions to the islands come first: one that has to catch up waits for those that it
            # asks
            catch_up=False,
            fresh=self.fresh,
            **options,
        )
        # after an error the others see at once that this island is gone; else the Trainer may train
        # on with this optimizer
        self.after.callback(exchange.detach)
        if exchange.newcomer or self.taken:
            told = move_to(trainer, exchange, self.taken, self.after, moments)
            warn(trainer, topology, told)
        elif exchange.step != state.global_step:
            raise ValueError(
                f"{topology.name} resumes at step {state.global_step}, another island at "
                f"{exchange.step}: resume all from one step"
            )
        elif state.global_step and not self.fresh:
            folder = self._folder(trainer)
            restore_local(folder, exchange, trainer.model_wrapped, engine is not None)
            exchange.accept_parameters()
        return exchange

    def _state(self, trainer: Trainer, topology: Topology) -> SavedExchange | None:
        """What `attach` is given to go on from."""
        if self.joins or self.fresh or not trainer.state.global_step:
            return None
        return open_state(self._folder(trainer))

    def _folder(self, trainer: Trainer) -> Path:
        """The one that the Trainer has loaded."""
        if isinstance(self.given, str):
            return Path(self.given)
        root = str(trainer.args.output_dir)
        last = get_last_checkpoint(root)
        return Path(last or f"{root}/checkpoint-{trainer.state.global_step}")
