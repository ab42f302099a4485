"""An island without a checkpoint goes on under the Trainer with what `attach` brings from the
others, at their step.

The Trainer reads `trainer_state.json` of the folder that it resumes from, and all the rest in two
methods: `_load_from_checkpoint` (models that are loaded before they are prepared) and
`_prepare_for_training` (sharded models, DeepSpeed's engine, optimizer, scheduler). An island that
takes over gets a folder with that one file, and both methods of its Trainer read nothing else; the
scheduler is stepped to its place, and rows are skipped by the Trainer itself, as if this island had
trained so far. Facts: transformers 5.23, `Trainer.train`, `_init_training_state`, `_run_epoch`.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from ...checkpoint.choice import Held
from ...checkpoint.taking_over import begins_anew, forward, small
from ...exchange.exchange import Exchange
from .engine import door_of, engine_of

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
    """What an island goes on from that has no folder to load.

    Attributes:
        step: of the others.
        donor: their name, for the log.
        state: see `KINDS`; empty where the donor could not tell.
    """

    step: int
    donor: str
    state: dict[str, Any] = field(default_factory=dict)

    def begin(self, trainer: Trainer, undo: ExitStack) -> str:
        """The folder that this Trainer resumes from; what must be undone afterwards goes to
        `undo`.
        """
        place = undo.enter_context(tempfile.TemporaryDirectory(prefix="take-over-"))
        state = TrainerState(**self.state, global_step=self.step, max_steps=trainer.args.max_steps)
        state.train_batch_size = trainer._train_batch_size
        # once more where the number of steps is known
        state.compute_steps(trainer.args, max(trainer.args.max_steps, 0))
        state.save_to_json(str(Path(place) / TRAINER_STATE_NAME))
        for name, around in (
            ("_load_from_checkpoint", self._load),
            ("_prepare_for_training", self._prepare),
        ):
            undo.callback(_put_back, trainer, name, vars(trainer).get(name))
            setattr(
                trainer,
                name,
                functools.partial(around, trainer, place, getattr(trainer, name)),
            )
        return place

    def sentence(self, exchange: Exchange, args: Any) -> str:
        """What was taken over and what was not, for the log."""
        rows = "" if args.ignore_data_skip else ", rows are skipped up to there"
        text = f"no checkpoint here: took over step {self.step} from {self.donor}{rows}"
        if args.load_best_model_at_end and self.state.get("best_metric") is not None:
            text += (
                ". The best model so far is on the other islands only: without a better one, this "
                "island ends with its last"
            )
        return f"{text}; {begins_anew(exchange.config)}"

    def _load(
        self,
        trainer: Trainer,
        folder: str,
        original: Callable[..., Any],
        checkpoint: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if checkpoint != folder:
            original(checkpoint, *args, **kwargs)

    def _prepare(
        self,
        trainer: Trainer,
        folder: str,
        original: Callable[..., Any],
        max_steps: int,
        loader: Any,
        checkpoint: str | None,
    ) -> Any:
        out = original(max_steps, loader, None if checkpoint == folder else checkpoint)
        if checkpoint == folder:
            trainer.state.compute_steps(trainer.args, max_steps)
            engine, door = engine_of(trainer), door_of(trainer)
            if engine is not None and door is not None:
                door.advance(engine, self.step)
            # else the engine's, or one that goes by a metric
            if isinstance(trainer.lr_scheduler, LRScheduler):
                forward(trainer.lr_scheduler, self.step - trainer.lr_scheduler.last_epoch)
        return out


def _put_back(trainer: Trainer, name: str, before: Any) -> None:
    vars(trainer).pop(name, None)
    if before is not None:
        setattr(trainer, name, before)


def told(checkpoint: Path) -> dict[str, Any]:
    """What islands that take over need of the Trainer's own state in a checkpoint; empty where it
    cannot be read.
    """
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        return small(
            {
                name: state[name]
                for name, kinds in KINDS.items()
                if name in state and isinstance(state[name], kinds)
            }
        )
    except (OSError, ValueError, RecursionError, TypeError):
        return {}


def heard(step: int, notes: Sequence[dict[str, Any]]) -> TakeOver:
    """What to go on from, from the notes {"name", "state"} of all islands; those that load nothing
    tell no state.

    Raises:
        ValueError: a note of another form.
    """
    state, name = next(
        ((n["state"], str(n["name"])) for n in notes if n.get("state") is not None),
        ({}, "the other islands"),
    )
    if not isinstance(state, dict) or any(
        not isinstance(v, KINDS.get(k, ())) for k, v in state.items()
    ):
        raise ValueError(
            f"{name} has left a note of another form ({state!r:.80}): use one release everywhere"
        )
    return TakeOver(step, name, state)


def sources(chosen: Sequence[Held | None]) -> list[int | None]:
    """The step of the checkpoint that each island loads, None for those that take over.

    Where some take over, those of the furthest step are the ones to take from: the others' own
    steps after it would be lost in any case.
    """
    steps = [None if h is None else h.step for h in chosen]
    furthest = max(s for s in steps if s is not None)
    return [s if s == furthest else None for s in steps] if None in steps else steps
