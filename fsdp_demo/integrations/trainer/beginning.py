"""How a training of the Trainer begins: anew, from a checkpoint, at the step of islands that hold
one which this island lacks, or at that of a run under way (`joining.py`).

`resume_from_checkpoint` means a checkpoint on each island, so that one command line serves all.
True ("True", "true" on a command line) is the newest checkpoint that all islands hold, or the
newest of each between the same exchanges (`checkpoint/choice.py`). "auto" is the same, and the
beginning where no island holds any. A path `.../checkpoint-N` is that checkpoint in this island's
own folder, if it is there. An island that holds none takes over from the others.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils.constants import FSDP_MODEL_NAME
from packaging.version import Version
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ...attaching import attach
from ...checkpoint.choice import HeldCheckpoint
from ...checkpoint.exchange_state import SavedExchange
from ...checkpoint.manager import CheckpointManager, ResumePoint
from ...checkpoint.registry import CheckpointRegistry
from ...checkpoint.sharded_state import refuse_unsaveable
from ...config.schema import ExchangeConfig
from ...errors import NeedsDecision, see
from ...exchange.exchange import Exchange
from ...files import read_json
from ...rendezvous.topology import Topology
from .clock import begin_at
from .engine import engine_of
from .evaluation import Evaluations
from .joining import KINDS, TakeOver, common_state, load_moments, move_to
from .setup import check_optimizer, warn
from .state import manager_of, open_state, restore_local, saves_tensors, step_of

log = logging.getLogger("fsdp_demo")


@dataclass
class Beginning:
    """How one training begins. All islands find theirs together, before the Trainer trains.

    Attributes:
        given: the Trainer's `resume_from_checkpoint`: a folder, True, or None or False for none.
        taken: step and state of the other islands, where this one takes over without a checkpoint.
        joins: this island joins a run under way, whose state comes with `attach`.
        named: the user has named a checkpoint.
        fresh: the exchange's state begins anew.
        after: undoes, when training is over, what was changed for it.
        manager: the manager of the Trainer's checkpoints.
        exchange: the exchange that `attach` made; None before.
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
    def find(
        cls, trainer: Trainer, topology: Topology, wanted: Any, fresh: bool, remote: str | None
    ) -> Beginning:
        """The beginning that the user asks for by `wanted`, the argument of `Trainer.train`. Raises
        NeedsDecision, ValueError: as `find_checkpoint`.
        """
        joins, manager = topology.under_way(), manager_of(trainer, topology, remote)
        where = None if joins else find_checkpoint(wanted, manager, fresh)
        if isinstance(where, str) and not trainer.is_fsdp_enabled:
            refuse_sharded(Path(where), topology)
        if joins or where is not None:
            warn_of_lost_moments(trainer, topology)
        taken = where if isinstance(where, TakeOver) else None
        after = ExitStack()
        after.callback(manager.close)
        if isinstance(where, str) and not fresh:
            begin_at(trainer, Path(where) / "exchange", topology, after)
        given = None if taken else where
        return cls(given, taken, joins, is_named(wanted), fresh, after, manager)

    def attach(self, trainer: Trainer, config: ExchangeConfig, topology: Topology) -> Exchange:
        """Join the other replicas, once model and optimizer are sharded and, on resume, loaded.
        Raises ValueError: islands at unlike steps, and as `attach`, `open_state`, `restore_local`.
        """
        args: Any = trainer.args
        model: Any = trainer.model
        state, engine = trainer.state, engine_of(trainer)
        check_optimizer(trainer, config)
        self.after.callback(setattr, args, "max_grad_norm", args.max_grad_norm)
        options = {}
        if engine is None:
            config, args.max_grad_norm = config.clipped_once(args.max_grad_norm)
        else:  # clips by itself; the exchange's state is beside what the Trainer saves
            options = {"checkpoints": False}
        schedule = ("lr_scheduler_type", "warmup_steps", "lr_scheduler_kwargs")
        facts: dict[str, Any] = {"max_steps": state.max_steps}
        facts |= {name: str(getattr(args, name)) for name in schedule}
        own = self.joins and not self.fresh and engine is None
        moments = load_moments(trainer, self.manager) if own else None
        # with a state of the exchange islands may stand at unlike steps between two exchanges
        if self.fresh:
            facts["at"] = self.taken.step if self.taken else state.global_step
        self.exchange = exchange = attach(
            trainer.optimizer if engine is None else engine,
            config,
            model=model,
            topology=topology,
            must_match=facts | Evaluations.facts(trainer),
            step=state.global_step,
            state=open_state(moments) if moments else self._state(trainer),
            batch=(args.per_device_train_batch_size, args.gradient_accumulation_steps),
            # questions to the islands come first: one that has to catch up waits for those that it
            # asks
            catch_up=False,
            fresh=self.fresh,
            **options,
        )
        if args.save_strategy != "no" and saves_tensors(exchange, engine is not None):
            refuse_unsaveable(model, exchange.optimizers)
        # after an error the others see at once that this island is gone; else the Trainer may train
        # on with this optimizer
        self.after.callback(exchange.detach)
        if exchange.newcomer or self.taken:
            told = move_to(trainer, exchange, self.taken, self.after, bool(moments))
            warn(trainer, topology, told)
        elif exchange.step != state.global_step:
            raise ValueError(
                f"{topology.name} resumes at step {state.global_step}, another island at "
                f"{exchange.step}: resume all from one step"
            )
        elif state.global_step and not self.fresh:
            self._restore(trainer, exchange)
        return exchange

    def _restore(self, trainer: Trainer, exchange: Exchange) -> None:
        """Load what this island alone has from its checkpoint."""
        folder, engine = self._folder(trainer), engine_of(trainer)
        if engine is None and not any(folder.glob("optimizer*")):
            lost = "the inner optimizer's moments and the schedule of its rate begin anew"
            text = f"{folder} holds no optimizer (save_only_model): {lost}"
            warn(trainer, exchange.topology, text)
        restore_local(
            folder, exchange, trainer.model_wrapped, self.manager.group, engine is not None
        )
        exchange.accept_parameters()

    def _state(self, trainer: Trainer) -> SavedExchange | None:
        """The exchange's saved state for `attach`; None where it begins anew."""
        if self.joins or self.fresh or not trainer.state.global_step:
            return None
        return open_state(self._folder(trainer))

    def _folder(self, trainer: Trainer) -> Path:
        """The folder of the checkpoint that the Trainer has loaded."""
        if isinstance(self.given, str):
            return Path(self.given)
        root = str(trainer.args.output_dir)
        last = get_last_checkpoint(root)
        return Path(last or f"{root}/checkpoint-{trainer.state.global_step}")


# ---- which checkpoint `resume_from_checkpoint` means -------------------------------------------


def is_named(wanted: Any) -> bool:
    """Whether `resume_from_checkpoint` names a checkpoint."""
    return isinstance(wanted, (str, os.PathLike)) and str(wanted).lower() not in ("true", "auto")


def find_checkpoint(wanted: Any, manager: CheckpointManager, fresh: bool) -> Any:
    """The checkpoint that this island resumes from. All ranks of all islands call it together.

    Args:
        wanted: `resume_from_checkpoint`.
        fresh: parts of the exchange do not count.

    Returns:
        A path, a `TakeOver`, or what the Trainer takes for none.

    Raises:
        NeedsDecision: a ValueError: there is none, or none in common; says what each island holds.
        ValueError: a file's checksum does not fit.
    """
    if not is_named(wanted) and wanted is not True and not isinstance(wanted, str):
        return wanted
    manager.adopt()
    if is_named(wanted):
        found = _named(str(wanted), manager, fresh)
    else:
        found = _newest(manager, fresh, auto=str(wanted).lower() == "auto")
    if isinstance(found, str):
        manager.verify(Path(found))
    return found


def _newest(manager: CheckpointManager, fresh: bool, auto: bool) -> Any:
    """The newest checkpoint of all islands that hold any; None with `auto` if none does."""
    topology = manager.topology
    held = [HeldCheckpoint(h.step) if fresh else h for h in manager.held()]
    # the last to end has the newest state
    point = manager.agree(held, "newest" if auto and topology.elastic else "auto")
    if point is not None:
        return _where(point, manager.registry)
    if topology.islands == 1 and not auto:
        return True  # the Trainer's own words
    if not auto:
        raise NeedsDecision(
            "no island holds a checkpoint: start without resume_from_checkpoint, or with "
            "resume_from_checkpoint='auto'"
        )
    if topology.islands == 1 and fresh and (last := get_last_checkpoint(str(manager.root))):
        return last  # of a Trainer without an exchange
    refuse_elsewhere(manager)
    if topology.rank == 0:
        log.warning("%s: no island holds a checkpoint: training begins", topology.name)
    return None


def _where(point: ResumePoint | None, registry: CheckpointRegistry) -> str | TakeOver | None:
    if point is None:
        return None
    path = None if point.folder is None else str(point.folder)
    return _with_others(path, point.step, registry) if point.tells else path


def _named(wanted: str, manager: CheckpointManager, fresh: bool) -> Any:
    """The checkpoint of the name `wanted` in this island's folder, else that very path. Of those
    with unlike histories one goes on, and the other islands take over.
    """
    topology, name = manager.topology, Path(wanted).name
    manager.fetch_newest(name)
    if topology.islands == 1:
        return wanted

    def look() -> str | None:
        if (manager.root / name).is_dir():
            return str(manager.root / name)
        return wanted if not name.startswith("checkpoint-") or Path(wanted).is_dir() else None

    found, held = manager.ranks.from_first(look), manager.held(name)
    note = {"checkpoint": name, "found": found is not None, "held": bool(held) and not fresh}
    notes = manager.registry.meet(note)
    one = len({n.get("checkpoint") for n in notes}) == 1
    if one and all(n.get("held") for n in notes):
        return _where(manager.agree(held, "take_over", name), manager.registry)
    if all(n.get("found") for n in notes):
        return found
    have = ", ".join(
        f"{n.get('name')}: {n.get('checkpoint')}{'' if n.get('found') else ' (not there)'}"
        for n in notes
    )
    step = re.fullmatch(r"checkpoint-(\d+)", name)
    if step is None or not one or not any(n.get("found") for n in notes):
        cure = f"name on all the same one, which an island holds{see('no-common-checkpoint')}"
        raise NeedsDecision(f"not every island sees a checkpoint that was named ({have}): {cure}")
    return _with_others(found, int(step[1]), manager.registry)


def refuse_sharded(checkpoint: Path, topology: Topology) -> None:
    """Raise NeedsDecision for a checkpoint that the Trainer loads with FSDP alone, as transformers
    does with a ValueError, and for one that DeepSpeed loads with as many ranks alone.
    """
    saved = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    if not topology.one_world and saved not in (0, topology.world):
        raise NeedsDecision(
            f"{checkpoint} was saved by {saved} ranks with ZeRO, and {topology.world} load it: "
            f"start {saved} ranks per island, or begin anew from the model "
            "(`fsdp-demo export RUN OUT`)"
        )
    if any(FSDP_MODEL_NAME in path.name for path in checkpoint.iterdir()):
        raise NeedsDecision(
            f"{checkpoint} was saved by ranks with FSDP2, and the Trainer does not shard here: "
            "start two ranks per island or more, with fsdp=True, or begin anew from the model "
            "(`fsdp-demo export RUN OUT`)"
        )


def _with_others(found: str | None, step: int, registry: CheckpointRegistry) -> str | TakeOver:
    """Tell islands without a checkpoint the Trainer's state in `found`; None: hear it."""
    note = registry.tell(None if found is None else {"state": told(Path(found))})
    if found is not None:
        return found
    state = note.get("state", {})
    if not isinstance(state, dict) or any(
        not isinstance(v, KINDS.get(k, ())) for k, v in state.items()
    ):
        raise ValueError(
            f"{note['name']} has left a note of another form ({state!r:.80}): use one release "
            "everywhere"
        )
    return TakeOver(step, note["name"], state)


def told(checkpoint: Path) -> dict[str, Any]:
    """The Trainer's state of a checkpoint for others (`common_state`); empty: it cannot be read."""
    try:
        return common_state(read_json(checkpoint / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError):
        return {}


def refuse_elsewhere(manager: CheckpointManager) -> None:
    """Raise where "auto" would begin anew although `output_dir` holds checkpoints of another number
    of islands: several have a folder each in it, one has none. All islands call it together. Raises
    NeedsDecision: names the newest of them.
    """
    root, several = manager.root, manager.topology.islands > 1
    beside = (
        {root.parent} if several else {part.parent.parent for part in root.glob("*/*/exchange")}
    )
    last = [get_last_checkpoint(str(folder)) for folder in beside if folder.is_dir()]
    mine = manager.ranks.from_first(
        lambda: max(filter(None, last), key=lambda path: step_of(path) or 0, default="")
    )
    notes = manager.registry.meet({"elsewhere": mine})  # another machine may not see it
    if seen := [str(n["elsewhere"]) for n in notes if n.get("elsewhere")]:
        raise NeedsDecision(
            f"resume_from_checkpoint='auto' finds no checkpoint in {root}, but "
            f"{'one island' if several else 'several islands'} saved {seen[-1]}. Go on from its "
            f"parameters and optimizer state with resume_from_checkpoint='{seen[-1]}' and "
            "ExchangeCallback(..., fresh=True), or begin in another output_dir"
            f"{see('no-common-checkpoint')}"
        )


def warn_of_lost_moments(trainer: Trainer, topology: Topology) -> None:
    """Say so where Accelerate loads nothing into the optimizer (1.12, `load_fsdp_optimizer`)."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    old = Version(accelerate.__version__) < Version("1.13")
    if old and plugin is not None and "SHARDED" in str(plugin.state_dict_type):
        text = f"Accelerate {accelerate.__version__} loads no optimizer states under FSDP2: moments"
        warn(trainer, topology, f"{text} begin at zero; 1.13 and newer load them")
