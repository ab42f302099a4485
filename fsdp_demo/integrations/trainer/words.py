"""What the callback says in the words of a Trainer script: how much it says, and which optimizer a
preset wants.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer
from transformers.utils import logging as hf_logging

from ...config.schema import ExchangeConfig
from ...errors import see
from ...exchange import summary
from ...hosts.optimizers import check_inner, optimizer_kind
from ...rendezvous.topology import Topology
from .setup import has_own_optimizer

log = logging.getLogger("fsdp_demo")


def talk(trainer: Trainer, topology: Topology) -> None:
    """Once per island as talkative as transformers in this script. Where nobody has set up logging
    its level says nothing: information goes to stderr then, unless transformers was told to be
    quiet."""
    first, level = trainer.args.process_index == 0, hf_logging.get_verbosity()
    if log.level == logging.NOTSET and (log.hasHandlers() or level > logging.WARNING or not first):
        log.setLevel(level if first else logging.ERROR)
    summary.speak(topology)


def warn(trainer: Trainer, topology: Topology, text: str) -> None:
    """Once per island."""
    if trainer.args.process_index == 0:
        log.warning("%s: %s", topology.name, text)


def check_optimizer(trainer: Trainer, config: ExchangeConfig) -> None:
    """Raise ValueError if the preset is not defined for the optimizer that the Trainer has made,
    with what to write instead.
    """
    inner: Any = trainer.optimizer
    while hasattr(inner, "optimizer"):  # wrappers of Accelerate, of ZeRO
        inner = inner.optimizer
    try:
        check_inner(config, [optimizer_kind(inner)], [inner])
    except ValueError as error:
        optim = getattr(trainer.args.optim, "value", trainer.args.optim)
        found, cure = f"--optim {optim}", "take --optim adamw_torch"
        if not _by_flag(trainer, inner):
            found = "the script's own"
            cure = "leave it out, with --optim adamw_torch"
        if has_own_optimizer(config):
            cure = (
                f'pass Trainer(..., optimizer_cls_and_kwargs=exchange_optimizer("{config.preset}", '
                f"lr={trainer.args.learning_rate:g}))"
            )
        wanted = " or ".join(config.inner_optimizers)
        raise ValueError(
            f"ExchangeCallback: preset {config.preset!r} is defined for {wanted}, found "
            f"{type(inner).__name__} ({found}): "
            f"{cure}, or insist with ExchangeCallback(..., "
            f"inner_optimizers='as_is'){see('wrong-optimizer')}"
        ) from error


def _by_flag(trainer: Trainer, inner: Any) -> bool:
    """Whether `--optim` has made this optimizer. Else the script did, as `optimizers=` or in a
    `create_optimizer` of its own, and the flag has no effect.
    """
    if trainer.optimizer_cls_and_kwargs is not None:
        return False
    if trainer.is_deepspeed_enabled:  # has classes of its own for what the flag names
        return True
    model: Any = trainer.model
    try:
        made, _ = trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    except (ImportError, ValueError):  # its package is not there: nobody has made it
        return False
    return type(inner) is made
