"""The exchange of Trainers in scripts that know nothing of it:

    python -m fsdp_demo.launch --exchange diloco torchrun --nproc-per-node 2 train.py

`launch/site/sitecustomize.py` puts `train` in the place of `Trainer.train`, in every process below
the launcher. So a Trainer that only scores is left alone, and what a Trainer has done to its
training set (tokenised, packed) is done. Facts: transformers 5.23, `Trainer.train`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from transformers import Trainer

from ...config.load import load_config
from ...config.schema import ExchangeConfig
from ...rendezvous import environment
from ...rendezvous.topology import Topology
from ...status import tell_of_training
from ..data import split_dataset_by_island
from .callback import ExchangeCallback
from .engine import settings_of
from .setup import exchange_optimizer, has_own_optimizer, topology_of, warn

_folders: set[str] = set()  # of the trainings that this process has begun


class AddedCallback(ExchangeCallback):
    """The callback that `train` adds. It is called by `train`, so it does not wrap that."""

    _resume = "--resume auto beside --exchange"

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        if name != "train":
            super()._wrap(name, around)

    run = ExchangeCallback._train


def train(
    original: Callable[..., Any],
    trainer: Trainer,
    resume_from_checkpoint: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Train by `Trainer.train` (`original`) beside the exchange that ISLAND_EXCHANGE asks for.

    A Trainer that has an `ExchangeCallback` of its script keeps it. "auto" is handed on as
    `resume_from_checkpoint` where the island resumes by itself (`environment.resumes`) and the
    script names nothing.

    Raises:
        ValueError: what `ExchangeCallback` and `split_dataset_by_island` refuse; data without a
            length and no `max_steps`; variables that cannot be read.
    """
    tell_of_training()
    found = [c for c in trainer.callback_handler.callbacks if isinstance(c, ExchangeCallback)]
    if found and not isinstance(found[0], AddedCallback):
        text = "this Trainer has an ExchangeCallback of its script, which it keeps"
        warn(trainer, topology_of(trainer), f"{text}: ISLAND_EXCHANGE changes nothing")
        return original(trainer, resume_from_checkpoint, *args, **kwargs)
    exchange = environment.exchange(os.environ)
    callback, said = (found[0], "") if found else added(trainer, *exchange, AddedCallback)
    assert isinstance(callback, AddedCallback)
    folder = str(trainer.args.output_dir)
    if resume_from_checkpoint is None and environment.resumes(os.environ):
        if folder in _folders:
            said += f"; not resumed, since an earlier training of this process wrote to {folder}"
        else:
            resume_from_checkpoint = "auto"
            said += "; resumes from the newest checkpoint, if there is one"
    _folders.add(folder)
    warn(trainer, topology_of(trainer), said.removeprefix("; "))
    return callback.run(
        functools.partial(original, trainer), resume_from_checkpoint, *args, **kwargs
    )


def added(
    trainer: Trainer,
    source: str,
    changes: list[str],
    kind: type[ExchangeCallback] = ExchangeCallback,
) -> tuple[ExchangeCallback, str]:
    """The callback, a `kind` with `load_config(source, changes)`, which the Trainer has now, and
    words for all that was changed in it. Raises ValueError as `train` does.
    """
    config, own = load_config(source, changes), ""
    if has_own_optimizer(config) and _takes_optimizer(trainer, config):
        lr = trainer.args.learning_rate
        trainer.optimizer_cls_and_kwargs = exchange_optimizer(config, lr=lr)
        own = f"; the optimizer is that of the preset, learning_rate {lr:g}"
    callback = kind(config)
    trainer.add_callback(callback)
    callback.set_trainer(trainer)
    rows = _split(trainer, topology_of(trainer))
    name = type(trainer).__name__
    return callback, f"exchange {' '.join([source, *changes])} added to {name}{own}; {rows}"


def _takes_optimizer(trainer: Trainer, config: ExchangeConfig) -> bool:
    """Whether nobody else has chosen the optimizer, and one by `exchange_optimizer` works."""
    given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    partitions = trainer.is_deepspeed_enabled and config.inner_optimizers[0] == "muonadamw"
    return not (given or partitions or "optimizer" in settings_of(trainer))


def _split(trainer: Trainer, topology: Topology) -> str:
    """Give the Trainer this island's part of its training set; returns words for it. Raises
    ValueError: the part has no length, and `max_steps` is not set.
    """
    whole: Any = trainer.train_dataset
    if whole is None:
        return "its rows are NOT split by island: it has no train_dataset"
    sets = whole if isinstance(whole, dict) else {"": whole}
    parts = {name: split_dataset_by_island(one, topology) for name, one in sets.items()}
    endless = any(not hasattr(part, "__len__") for part in parts.values())
    if endless and trainer.args.max_steps <= 0:
        raise ValueError(
            f"the training set ({type(next(iter(sets.values()))).__name__}) has no length, so that "
            "islands cannot know how many steps an epoch has: set max_steps"
        )
    trainer.train_dataset = type(whole)(parts) if isinstance(whole, dict) else parts[""]
    if topology.islands == 1 or topology.one_world:
        return "its rows are not split: there is one replica, or a mesh, which splits them"
    if endless:
        return f"one in {topology.islands} of the rows, or files, of its stream is this island's"
    rows = [sum(map(len, of.values())) for of in (parts, sets)]
    return f"{rows[0]} of its {rows[1]} rows are this island's"
