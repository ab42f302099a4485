"""What the callback changes in a Trainer before the first step, and what it refuses.

Everything here is done once, on the `Trainer` and its `TrainingArguments`, and only where there are
other replicas.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
from typing import Any

import torch
from transformers import Trainer
from transformers.utils import logging as hf_logging

from ...attaching import settled
from ...config.load import preset
from ...config.methods import presets
from ...config.schema import ExchangeConfig
from ...errors import see
from ...exchange import summary
from ...hosts.optimizers import base_optimizer, check_inner, optimizer_kind
from ...hosts.step_checks import callers
from ...rendezvous.topology import Topology
from ..mesh import ExchangeParallelismConfig, mesh_topology, refuse_hsdp
from .clock import problems
from .engine import engine_problems, engine_topology, muon, settings_of

log = logging.getLogger("fsdp_demo")


def has_own_optimizer(config: ExchangeConfig) -> bool:
    """Whether a preset is defined for an optimizer that is not the Trainer's AdamW."""
    return config.inner_optimizers[0] not in ("any", "as_is", "adamw", "adam")


def _keyword(config: ExchangeConfig, lr: float) -> str:
    """The keyword that gives a Trainer the optimizer of `config`, as a cure in an error."""
    known, inner = presets(), config.inner_optimizers[0]
    usual = config.preset not in known or inner in known[config.preset]().inner_optimizers
    more = "" if usual else f'inner_optimizer="{inner}", '
    return (
        f'pass Trainer(..., optimizer_cls_and_kwargs=exchange_optimizer("{config.preset}", '
        f"{more}lr={lr:g}))"
    )


def find_trainer(callback: Any) -> Trainer:
    """The Trainer that is calling `callback` right now.

    A callback is told arguments, state and control, never its Trainer; it stands further up on the
    call stack.

    Raises:
        RuntimeError: nobody up there is a Trainer with this callback.
    """
    trainers = (frame.f_locals.get("self") for frame in callers())
    for found in (found for found in trainers if isinstance(found, Trainer)):
        # one that is being built may have none yet
        handler: Any = getattr(found, "callback_handler", None)
        if callback in getattr(handler, "callbacks", ()):
            return found
    raise RuntimeError(
        "ExchangeCallback works inside a transformers.Trainer: pass it as "
        "Trainer(callbacks=[...]), or call set_trainer()"
    )


def topology_of(trainer: Trainer) -> Topology:
    """The topology of this rank: a mesh where the Trainer was given `ExchangeParallelismConfig`,
    else islands from the environment. Under DeepSpeed its package says it. Raises ValueError: both
    at once, or a plain HSDP mesh.
    """
    if trainer.is_deepspeed_enabled:
        return engine_topology(trainer)
    axes = getattr(trainer.accelerator, "parallelism_config", None)
    refuse_hsdp(axes)
    islands = Topology.from_env()
    if not isinstance(axes, ExchangeParallelismConfig) or axes.dp_replicate_size < 2:
        return islands
    if islands.islands > 1:
        raise ValueError(
            f"ISLAND_COUNT={islands.islands} and {axes} at once: launch islands without a "
            "replicate axis, or a mesh alone"
        )
    return mesh_topology(trainer.accelerator)


def refuse(trainer: Trainer, config: ExchangeConfig) -> None:
    """Raise ValueError for what cannot work, one sentence each."""
    args, model = trainer.args, trainer.model
    line = f"{_keyword(config, args.learning_rate)} too"
    if trainer.is_deepspeed_enabled and config.inner_optimizers[0] == "muonadamw":
        line = muon(trainer)
    handed = (
        trainer.optimizer is not None
        or trainer.optimizer_cls_and_kwargs is not None
        or "optimizer" in settings_of(trainer)
    )
    native = getattr(model, "is_distributed_loading_by_transformers", False)
    half = args.fp16 or trainer.accelerator.mixed_precision == "fp16"
    unsharded = bool(args.fsdp) and not trainer.is_fsdp_enabled and args.world_size > 1
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    clip, usual = config.clip, preset(config.preset).clip if config.preset in presets() else None
    wanted = bool(args.deepspeed) or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    checks = {
        "a DeepSpeed configuration that Accelerate has left out, since ACCELERATE_USE_CPU is set: "
        "unset it, and give TrainingArguments(use_cpu=True), which works": (
            wanted and not trainer.is_deepspeed_enabled
        ),
        "fp16: its loss scaler skips steps on one island only; take bf16=True, or fp32": half,
        "a model sharded at load time (DistributedConfig): it is all-reduced over all ranks; load "
        "it whole, with fsdp=True": native,
        "fsdp on CPU ranks, where Accelerate takes DDP instead: call "
        "fsdp_demo.integrations.accelerate.allow_fsdp_on_cpu() after TrainingArguments(...), right "
        "before Trainer(...)": unsharded,
        f"clip={clip} beside max_grad_norm={args.max_grad_norm}: set max_grad_norm alone": (
            clip not in (None, usual, args.max_grad_norm)
        ),
        "auto_find_batch_size=True: islands would take different steps; set "
        "per_device_train_batch_size": args.auto_find_batch_size,
        f"preset {config.preset!r} has an optimizer of its own: {line}": (
            has_own_optimizer(config) and not handed
        ),
        f"drop with gradient_accumulation_steps={args.gradient_accumulation_steps}: the first and "
        "the last micro-batch of a step are always taken; set 3 or more, or leave drop out": (
            config.drop is not None and args.gradient_accumulation_steps < 3
        ),
        f"fsdp_version={plugin and plugin.fsdp_version}: allowed is 2, since FSDP1 flattens "
        "parameters": plugin is not None and plugin.fsdp_version != 2,
    }
    checks |= engine_problems(trainer, config)
    if config.by_speed:
        checks |= {text: wrong for wrong, text in problems(trainer, topology_of(trainer))}
    for text in (text for text, wrong in checks.items() if wrong):
        says = ":" if text.startswith("preset") else " found"
        raise ValueError(f"ExchangeCallback{says} {text}")


def separate(trainer: Any, topology: Topology) -> None:
    """Give each island its own folder, run name, data seed; only island 0 pushes to the hub."""
    args: Any = trainer.args
    if getattr(args, "_island_of", None) is None:  # else a second Trainer with the same arguments
        args._island_of = (args.hub_model_id or os.path.normpath(args.output_dir)).split("/")[-1]
        _separate_arguments(args, topology)
    name, trainer.accelerator.dataloader_config.data_seed = args._island_of, args.data_seed
    for callback in trainer.callback_handler.callbacks:
        # TENSORBOARD_LOGGING_DIR, which the same launch file gives to all islands
        if getattr(callback, "logging_dir", None):
            callback.logging_dir = os.path.join(callback.logging_dir, topology.name)
    if topology.island:
        trainer.push_to_hub = lambda *_, **__: log.info(
            "%s does not push to the hub: island 0 does", topology.name
        )
    else:  # the card would be named after the folder
        trainer.push_to_hub = functools.partial(trainer.push_to_hub, model_name=name)
    trainer.create_model_card = functools.partial(trainer.create_model_card, model_name=name)


def _separate_arguments(args: Any, topology: Topology) -> None:
    name = args._island_of
    base = args.run_name or name
    args.output_dir = os.path.join(args.output_dir, topology.name)
    args.run_name = f"{base}-{topology.run}-{topology.name}"
    os.environ.setdefault("WANDB_RUN_GROUP", topology.run)
    args.data_seed = (args.data_seed if args.data_seed is not None else args.seed) + topology.island
    args.push_to_hub = args.push_to_hub and topology.island == 0
    if args.should_save:
        os.makedirs(args.output_dir, exist_ok=True)
    if args.process_index == 0:
        text = "%s: output_dir is %s, run_name %s, data_seed %d"
        log.info(text, topology.name, args.output_dir, args.run_name, args.data_seed)


def quieten(trainer: Trainer) -> None:
    """In a mesh, switch off what the Trainer sends between nodes at every step."""
    args, loader = trainer.args, trainer.accelerator.dataloader_config
    if args.average_tokens_across_devices:
        args.average_tokens_across_devices = False
        log.info(
            "average_tokens_across_devices=False: its gather over all nodes makes every step wait "
            "for the slowest"
        )
    if loader.dispatch_batches is None:
        # an iterable data set would be read by rank 0 and broadcast, batch by batch
        loader.dispatch_batches = False


def take_sigterm(trainer: Trainer) -> None:
    """Take `enable_jit_checkpoint` out of a Trainer: its handler of SIGTERM would end the training
    of all islands, with status 0. `Stops` saves and ends with 75 instead.
    """
    handler: Any = trainer.callback_handler
    for jit in [c for c in handler.callbacks if type(c).__name__ == "JITCheckpointCallback"]:
        handler.callbacks = [c for c in handler.callbacks if c is not jit]  # it is being walked
        signal.signal(signal.SIGTERM, jit.jit_manager._original_sigterm_handler)
        log.info("enable_jit_checkpoint: the exchange takes SIGTERM, saves and ends with 75")


# ---- the inner optimizer of presets that have one of their own, as the Trainer takes it ----------


def exchange_optimizer(
    config: ExchangeConfig | str, lr: float | None = None, **changes: Any
) -> tuple[type, dict[str, Any]]:
    """The optimizer a preset is defined for, as
    `Trainer(optimizer_cls_and_kwargs=exchange_optimizer("demo", lr=1e-3))`.

    Vectors (biases, norms) get no weight decay, as the Trainer does it; the rate follows the
    Trainer's schedule.

    Args:
        config: as for `ExchangeCallback`.
        lr: default the preset's published one.
        changes: of the preset; and `weight_decay` of the optimizer, by default that of
            `fsdp_demo.base_optimizer`.

    Raises:
        ValueError: no learning rate is given and the preset has none.

    Example:
        >>> from fsdp_demo.integrations.trainer import exchange_optimizer
        >>> exchange_optimizer("demo", lr=1e-3)[1]["lr"]
        0.001
    """
    decay = changes.pop("weight_decay", None)
    config = settled(config, changes)
    lr = config.lr if lr is None else lr
    if lr is None:
        raise ValueError(
            f"preset {config.preset!r} has no published learning rate: pass "
            "lr=training_args.learning_rate"
        )
    return _Factory, {"config": config, "lr": lr, "weight_decay": decay}


class _Factory:
    """An optimizer factory as the Trainer takes it: `_Factory()(model, **keywords)`. The Trainers
    of axolotl hand it their arguments as well.
    """

    def __call__(
        self,
        model: torch.nn.Module,
        *_: Any,
        config: ExchangeConfig,
        lr: float,
        weight_decay: float | None,
    ) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        options = {} if weight_decay is None else {"weight_decay": weight_decay}
        if config.inner_optimizers[0] == "muonadamw":  # sorts parameters by itself
            return base_optimizer(config, named, lr, **options)
        # ZeRO-3 may have cut it already
        dims = {name: len(getattr(p, "ds_shape", p.shape)) for name, p in named}
        matrices = {"params": [pair for pair in named if dims[pair[0]] >= 2]}
        vectors = {"params": [pair for pair in named if dims[pair[0]] < 2], "weight_decay": 0.0}
        return base_optimizer(
            config, [group for group in (matrices, vectors) if group["params"]], lr, **options
        )


def talk(trainer: Trainer, topology: Topology) -> None:
    """Set the level of this package's log: that of transformers on the first rank of an island,
    errors on the others. Where the script has set up no logging, information goes to stderr, unless
    transformers was told to be quiet.
    """
    summary.hush()  # what was set up before the Trainer was there
    first, level = trainer.args.process_index == 0, hf_logging.get_verbosity()
    if log.level == logging.NOTSET and (log.hasHandlers() or level > logging.WARNING or not first):
        log.setLevel(level if first else logging.ERROR)
    summary.speak(topology)


def warn(trainer: Trainer, topology: Topology, text: str) -> None:
    """Log a warning once per island, with its name."""
    if trainer.args.process_index == 0:
        log.warning("%s: %s", topology.name, text)


def check_optimizer(trainer: Trainer, config: ExchangeConfig) -> None:
    """Raise ValueError, with the cure, if the preset is not defined for the optimizer."""
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
            cure = _keyword(config, trainer.args.learning_rate)
        wanted = " or ".join(config.inner_optimizers)
        raise ValueError(
            f"ExchangeCallback: preset {config.preset!r} is defined for {wanted}, found "
            f"{type(inner).__name__} ({found}): {cure}, or insist with ExchangeCallback(..., "
            f"inner_optimizers='as_is'){see('wrong-optimizer')}"
        ) from error


def _by_flag(trainer: Trainer, inner: Any) -> bool:
    """Whether `--optim` has made this optimizer, not the script."""
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
