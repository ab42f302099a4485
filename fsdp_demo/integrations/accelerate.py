"""Accelerate inside one island: `accelerator()` returns an `accelerate.Accelerator` that shards
with FSDP2, on GPU and on CPU.

Inside an island nothing of ours runs: it is Accelerate's own FSDP2 path (or DDP, or one plain
process). Three defaults differ from `Accelerator(...)`, because islands of any size must take the
same number of optimizer steps with the same schedule:

* gradient accumulation does not end early at the end of a dataloader (islands reach it at different
  steps);
* a prepared scheduler advances once per call of `step()`, not once per process: call it once per
  optimizer step;
* batches are loaded by every rank (`dispatch_batches=False`), shuffled by a sampler with a seed of
  its own.

Source of the facts: accelerate 1.15, `AcceleratorState.__init__`, `Accelerator._prepare_fsdp2`,
`AcceleratedScheduler.step`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)

from ..errors import counted
from ..exchange.exchange import Exchange
from ..exchange.refusals import REGISTERED
from .mesh import ExchangeParallelismConfig, check_axes, refuse_hsdp

logger = logging.getLogger(__name__)


def accelerator(
    *,
    shard: bool = True,
    mixed_precision: str | None = None,
    reshard_after_forward: bool = True,
    fsdp_transformer_layer_cls_to_wrap: str | Sequence[str] | None = None,
    gradient_accumulation_steps: int = 1,
    cpu: bool | None = None,
    **kwargs: Any,
) -> Accelerator:
    """Make the Accelerator of this island from the launcher's environment (`accelerate launch` or
    `torchrun`).

    Args:
        shard: True: FSDP2 over all ranks of the island. False: the model is whole on every rank
            (DDP). One process: neither.
        mixed_precision: "bf16" computes in bf16 with fp32 parameters, fp32 gradients and an fp32
            mean inside the island; "no". None: `ACCELERATE_MIXED_PRECISION`. fp16 is refused: its
            loss scaler skips steps on one island only.
        reshard_after_forward: True frees gathered layers after their forward (ZeRO-3), False keeps
            them until backward (ZeRO-2).
        fsdp_transformer_layer_cls_to_wrap: class names of the layers that become FSDP units. None:
            the model's `_no_split_modules`, which every transformers model has; a model without it
            is one unit.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: None: CPU if the machine has no accelerator or `ACCELERATE_USE_CPU` is set.
        kwargs: handed to `accelerate.Accelerator` (`fsdp_plugin`, `dataloader_config`,
            `kwargs_handlers`...). With `parallelism_config=ExchangeParallelismConfig(...)` the
            world is a mesh of several replicas (see `mesh.py`).

    Raises:
        ValueError: fp16; more processes than GPUs on this machine; an FSDP1 plugin; a plain HSDP
            mesh; a mesh without FSDP2.
        RuntimeError: Accelerate did not shard although it was asked to (its internals moved).

    Example:
        >>> from fsdp_demo.integrations.accelerate import accelerator
        >>> acc = accelerator(cpu=True)                 # one process here: nothing to shard
        >>> acc.num_processes
        1
    """
    cpu = _use_cpu() if cpu is None else cpu
    mixed_precision = _precision(mixed_precision)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    plugin, axes = kwargs.pop("fsdp_plugin", None), kwargs.pop("parallelism_config", None)
    refuse_hsdp(axes)
    asked = os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")
    used = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    if axes is None and used and asked != "1":
        raise ValueError(
            f"the launcher's configuration asks for dp_replicate_size={asked}, which Accelerate "
            "would make HSDP: pass "
            "parallelism_config=ExchangeParallelismConfig() (recipes/pretrain.py: --mesh)"
        )
    if axes is not None and (not shard or world == 1):
        raise ValueError(
            f"{type(axes).__name__} with shard={shard} and "
            f"{counted(world, 'process', 'processes')}: a mesh needs FSDP2 on its shard axis"
        )
    if shard and world > 1:
        plugin = plugin or _plugin(
            mixed_precision, reshard_after_forward, fsdp_transformer_layer_cls_to_wrap
        )
        if plugin.fsdp_version != 2:
            raise ValueError(
                f"fsdp_plugin.fsdp_version={plugin.fsdp_version}: allowed is 2, since FSDP1 "
                "flattens parameters"
            )
    else:
        plugin = None
        # A yaml of `accelerate config` (or an earlier Accelerator in this process) may have set it;
        # `shard` decides here.
        os.environ["ACCELERATE_USE_FSDP"] = "false"
    if "gradient_accumulation_plugin" not in kwargs:
        kwargs["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
            gradient_accumulation_steps, sync_with_dataloader=False
        )
    kwargs.setdefault("step_scheduler_with_optimizer", False)
    loaders = DataLoaderConfiguration(dispatch_batches=False, use_seedable_sampler=True)
    kwargs.setdefault("dataloader_config", loaders)
    if cpu and plugin is not None:
        allow_fsdp_on_cpu()
        # else the mesh of `fully_shard` is on the GPU where the machine has one
        axes = axes or ExchangeParallelismConfig(dp_replicate_size=1, dp_shard_size=world)
    made = _IslandAccelerator(
        cpu=cpu,
        mixed_precision=mixed_precision,
        fsdp_plugin=plugin,
        parallelism_config=axes,
        **kwargs,
    )
    if made.num_processes != world:
        raise RuntimeError(
            f"Accelerate sees {counted(made.num_processes, 'process', 'processes')}, the launcher "
            f"started {world}: {_versions()}"
        )
    if plugin is not None and not made.is_fsdp2:
        raise RuntimeError(
            f"Accelerate did not turn FSDP2 on ({made.distributed_type}): its internals moved. "
            f"{_versions()}"
        )
    return made


def allow_fsdp_on_cpu() -> None:
    """Let the next `Trainer` (or `Accelerator`) of this process shard with FSDP2 over CPU ranks:
    call it after `TrainingArguments(...)`, which makes Accelerate's state anew, and right before
    `Trainer(...)`.

    For rehearsals and tests; `accelerator()` calls it by itself. `AcceleratorState` turns FSDP on
    for MULTI_GPU, MULTI_XPU..., not for MULTI_CPU, where a plugin silently gives DDP. FSDP2 itself
    runs on CPU with gloo, so this names the world MULTI_XPU.
    """
    PartialState(cpu=True)
    if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


class _IslandAccelerator(Accelerator):
    """An `Accelerator` that checks that `prepare` has sharded the model, since training runs
    without that, too, and refuses to save an exchange.
    """

    def register_for_checkpointing(self, *objects: Any) -> None:
        if any(isinstance(thing, Exchange) for thing in objects):
            raise ValueError(REGISTERED)
        super().register_for_checkpointing(*objects)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        result = super().prepare(*args, **kwargs)
        if self.is_fsdp2:
            axes = self.parallelism_config
            ranks = axes.dp_shard_size if axes else self.num_processes
            for item in result if isinstance(result, tuple | list) else [result]:
                if isinstance(item, torch.nn.Module):
                    check_axes(item, ranks)
        return result


def _plugin(
    mixed_precision: str | None, reshard: bool, layers: str | Sequence[str] | None
) -> FullyShardedDataParallelPlugin:
    policy = None
    names = layers.split(",") if isinstance(layers, str) else list(layers or ())
    if mixed_precision == "bf16":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # Accelerate's own choice reduces in bf16; the mean inside the island is what the exchange
        # reads, so it stays fp32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard,
        mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=names or None,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def _precision(mixed_precision: str | None) -> str | None:
    chosen = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if chosen not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={chosen!r}: allowed are 'no' and 'bf16' (fp16's loss scaler skips "
            "steps on one island only)"
        )
    return chosen


def _use_cpu() -> bool:
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes"):
        return True
    if not torch.accelerator.is_available():
        # Without cpu=True Accelerate ignores the launcher's ranks on such a machine: every process
        # would train alone.
        return True
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if ranks > devices:
        raise ValueError(
            f"{ranks} processes on a machine with {counted(devices, 'GPU')}: start at most "
            f"{devices}, or set ACCELERATE_USE_CPU=true"
        )
    return False


def _versions() -> str:
    return f"accelerate {importlib.metadata.version('accelerate')}, torch {torch.__version__}"
