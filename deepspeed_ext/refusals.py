"""What the exchange does not go with: one sentence each, with the cure, before anything is sent.

Two kinds: what cannot work (a partition is stepped as a whole; masters must be fp32), and what was
never tried. Names are those of deepspeed 0.19.8, whose engine answers for its configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from deepspeed import __version__ as VERSION
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from fsdp_demo import ExchangeConfig, Topology
from fsdp_demo.config.channel import EMBEDDINGS, covers, matches
from fsdp_demo.errors import first_few
from fsdp_demo.hosts.base import plain_name

from .all_ranks import replica
from .node_mesh import installed, topology_of

log = logging.getLogger("fsdp_demo")


def refuse(engine: Any, config: ExchangeConfig, topology: Topology) -> None:
    """Raise ValueError for what cannot work or was never tried. engine: what was given to `attach`
    as one.
    """
    _refuse(_others(engine))
    _refuse(_kind(engine))
    _refuse(_offload(engine._config.zero_config))
    _refuse(_precision(engine))
    _refuse(_communication(engine))
    _refuse(_place(engine, topology))
    for text in chain(_inner(engine), _of_muon(engine, config), _channels(engine, config)):
        raise ValueError(f"deepspeed_ext.attach found {text}")


def _refuse(checks: dict[str, Any]) -> None:
    """Raise ValueError with the first of these texts that holds."""
    for text in (text for text, wrong in checks.items() if wrong):
        raise ValueError(f"deepspeed_ext.attach found {text}")


def _others(thing: Any) -> dict[str, Any]:
    """Things that are no engine, and DeepSpeed before 0.19, whose classes lack what the exchange
    hooks into.
    """
    many = isinstance(thing, list | tuple)
    return {
        f"a list of {len(thing) if many else 0}: an exchange counts the steps of one engine, so "
        "pass one engine (modules that train together go into one model, under one engine)": many,
        f"{type(thing).__name__}: pass the engine, the first thing that deepspeed.initialize "
        "returns (under Accelerate the prepared model, under the Trainer trainer.deepspeed)": (
            not isinstance(thing, DeepSpeedEngine)
        ),
        f"deepspeed {VERSION}: take deepspeed>=0.19,<0.20 (tried: 0.19.8)": (
            tuple(map(int, VERSION.split(".")[:2])) < (0, 19)
        ),
    }


def _kind(engine: Any) -> dict[str, Any]:
    """Kinds of engines that step no ZeRO partition, or not by themselves."""
    config = engine._config
    return {
        "ZeRO stage 0: set zero_optimization.stage to 1, 2 or 3 in DeepSpeed's configuration": (
            engine.zero_optimization_stage() == 0
        ),
        "a pipeline engine, which was never tried: train without PipelineModule": (
            getattr(engine, "pipeline_parallelism", False)
        ),
        "the hybrid engine, which was never tried: set hybrid_engine.enabled to false": (
            config.hybrid_engine.enabled
        ),
        "ZenFlow, which steps parts of a partition at times of its own: take "
        "zero_optimization.zenflow out": config.zero_config.zenflow is not None,
        "DeepCompile, which goes around the engine's reduction: set compile.deepcompile to "
        "false": config.compile_config.deepcompile,
        "checkpoint.load_universal, which was never tried: take it out, and load a checkpoint "
        "of as many ranks per replica": engine.load_universal_checkpoint(),
    }


def _offload(config: Any) -> dict[str, Any]:
    """Offloads other than that of the optimizer to host memory, the only one that was tried."""
    optimizer, parameters = config.offload_optimizer, config.offload_param
    ratio = optimizer.ratio if optimizer else 1.0
    return {
        'offload_optimizer to NVMe, which was never tried: set its device to "cpu", or take it '
        "out": optimizer and optimizer.device == OffloadDeviceEnum.nvme,
        "SuperOffload, which was never tried: set offload_optimizer.super_offload to false": (
            optimizer and optimizer.super_offload
        ),
        f"offload_optimizer.ratio={ratio} (Twin-Flow), which splits the optimizer in two: set it "
        "to 1.0": ratio < 1.0,
        "offload_param, which was never tried: take it out (offload_optimizer to the CPU works)": (
            parameters and parameters.device != OffloadDeviceEnum.none
        ),
    }


def _precision(engine: Any) -> dict[str, Any]:
    """Loss scaling, which skips steps on one replica only; masters that are not fp32."""
    zero, half = engine.optimizer, engine.torch_autocast_dtype() == torch.float16
    blind = not getattr(zero, "check_grad_overflow", True) and engine.zero_optimization_stage() < 3
    return {
        "fp16: its loss scaling skips steps on one replica only; set fp16.enabled to false and "
        "bf16.enabled to true, or take fp32": engine.fp16_enabled(),
        "torch_autocast in float16: its loss scaling skips steps on one replica only; set "
        "torch_autocast.dtype to bfloat16": engine.torch_autocast_enabled() and half,
        "gradients that nobody looks at, so that a NaN of one replica would reach all: set "
        "bf16.check_grad_overflow and zero_optimization.compute_grad_norm to true": (
            blind and (zero.dtype == torch.bfloat16 or not zero.compute_grad_norm)
        ),
        "bf16 masters or optimizer states, where the exchange works on fp32: set "
        "bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states to false": (
            engine.bf16_master_weights_and_gradients() or engine.bf16_optimizer_states()
        ),
    }


def _communication(engine: Any) -> dict[str, Any]:
    """Groups beside the data-parallel one, and quantised collectives inside a replica."""
    zero = engine._config.zero_config
    size = zero.zero_hpz_partition_size
    checks: dict[str, Any] = {
        f"zero_hpz_partition_size={size}, with second copies of parameters, which was never "
        "tried: set it to 1": size > 1,
    }
    for name in ("weights", "nontrainable_weights", "gradients"):
        text = "was never tried: set it to false (what crosses nodes is compressed by the exchange)"
        checks[f"zero_quantized_{name}, which {text}"] = getattr(zero, f"zero_quantized_{name}")
    parallel = {
        "tensor_parallel.autotp_size": engine.autotp_size(),
        "sequence parallelism, size": getattr(engine, "sequence_parallel_size", 1),
        "an mpu with model parallelism, size": getattr(engine, "mp_world_size", 1),
    }
    for what, size in parallel.items():
        text = "which was never tried: train with data parallelism alone"
        checks[f"{what} {size}, {text}"] = size > 1
    groups = getattr(engine.optimizer, "param_groups", [])
    experts = getattr(engine, "has_moe_layers", False) or any(g.get("moe") for g in groups)
    text = "MoE layers of DeepSpeed, whose experts have groups of their own, never tried: take a "
    return checks | {f"{text}model of ordinary modules": experts}


def _place(engine: Any, topology: Topology) -> dict[str, Any]:
    """Worlds and meshes that do not fit the engine."""
    mpu, mine, kind = installed(), topology_of(engine.mpu), topology.kind
    first = (
        "call deepspeed_ext.shard_within_node(ranks_per_node) before the model is made and "
        "deepspeed.initialize is called"
    )
    return {
        "an engine that was made before shard_within_node, so that ZeRO reduces over all "
        f"nodes: {first}": mpu is not None and mpu.replicas > 1 and engine.mpu is not mpu,
        f"a mesh, and an engine that reduces over all nodes: {first}": (
            kind == "mesh" and mine is None
        ),
        f"an engine of shard_within_node in a topology of kind {kind!r}: pass no topology; on "
        "islands leave shard_within_node out": (
            mine is not None and mine.kind == "mesh" and kind != "mesh"
        ),
    }


def _inner(engine: Any) -> Iterator[str]:
    """Optimizers that need matrices, where ZeRO has flat partitions. DeepSpeed takes them without a
    word; their first step fails.
    """
    inner = getattr(engine.optimizer, "optimizer", None)
    name = type(inner).__name__
    if inner is None or name == "DummyOptim":
        yield "an engine without an optimizer: give deepspeed.initialize one"
    if name == "LowRankAdamW":
        yield f"{name}, which needs matrices where ZeRO has flat partitions: take AdamW, or FSDP2"
    if name in ("Muon", "MuonAdamW"):
        yield (
            f"{name} as the client optimizer, which needs matrices where ZeRO has flat partitions: "
            f"take DeepSpeed's own, {MUON_LINE} in its configuration"
        )


def _channels(engine: Any, config: ExchangeConfig) -> Iterator[str]:
    """Gradient channels for a part of a partition: ZeRO would step the rest of it on zeros."""
    gradients = [c for c in config.channels if c.before_step]
    schedules = {
        c.name: (c.schedule.sync_every, c.schedule.offset, c.schedule.delay) for c in gradients
    }
    if len(set(schedules.values())) > 1 or any(c.fragments for c in gradients):
        yield (
            f"gradient channels on unlike schedules (sync_every, offset, delay) {schedules}, where "
            "ZeRO steps a whole partition: give "
            "all one schedule and no fragments, or take FSDP2"
        )
    waits = [c for c in gradients if c.schedule.sync_every > 1 or c.schedule.delay]
    trained = (plain_name(n) for n, p in engine.module.named_parameters() if p.requires_grad)
    left = [name for name in trained if not any(covers(c, name) for c in gradients)]
    if waits and left:
        yield (
            "a gradient channel with a period or a delay that does not cover "
            f"{first_few(left, 3)}, where ZeRO steps a whole "
            "partition: let it cover every trained parameter, freeze these, or take FSDP2"
        )


# ---- DeepSpeed's own Muon (`MuonWithAuxAdam`) --------------------------------------------------
#
# ZeRO orthogonalises while it fills the gradients of its partitions, ahead of the step of the inner
# optimizer. A master's gradient holds an update there, which is neither averaged nor clipped as a
# gradient is. `BF16_Optimizer` alone clips before it; all others clip the update. A missing
# gradient is taken for zeros, so that no step can be held back.
#
# Source of the facts: deepspeed 0.19.8, `runtime/zero/stage_1_and_2.py` (`get_flat_partition`,
# `step`), `runtime/zero/stage3.py` (`step`), `runtime/bf16_optimizer.py` (`step`),
# `runtime/zero/muon/muon_optimizer.py`, `runtime/engine.py` (`_muon_param_groups`).

MUON = "MuonWithAuxAdam"
MUON_LINE = '"optimizer": {"type": "Muon", "params": {"lr": ...}}'
"""What asks for it in DeepSpeed's configuration. One `lr` would be that of both halves."""


def is_muon(optimizer: Any) -> bool:
    """Whether it is DeepSpeed's Muon, by name: an import of that would compile kernels."""
    return any(c.__name__ == MUON for c in type(optimizer).__mro__)


def _of_muon(engine: Any, config: ExchangeConfig) -> Iterator[str]:
    """What DeepSpeed's Muon does not go with: what was found, and what to do."""
    zero = engine.optimizer
    if not is_muon(getattr(zero, "optimizer", None)):
        return
    norm = engine.gradient_clipping()
    if norm > 0 and type(zero).__name__ != "BF16_Optimizer":
        yield (
            f"{MUON} with gradient_clipping={norm:g} (1.0 where the configuration is silent): "
            f"{type(zero).__name__} clips the update of Muon, not the gradient, and training "
            'hardly moves. Set "gradient_clipping": 0.0 (under the Trainer max_grad_norm=0, too). '
            "To clip gradients take bf16 at ZeRO stage 1 with "
            '"data_types": {"grad_accum_dtype": "fp32"}'
        )
    early = [c.name for c in config.channels if c.before_step]
    if early:
        yield (
            f"{MUON} under {config.preset!r}, with {_named(early)} of gradients: ZeRO has "
            "made Muon's update of them by then. Take a preset that exchanges after the step "
            "(muloco), AdamW inside, or train without DeepSpeed"
        )
    elif config.clip_scope == "islands":
        yield (
            f"{MUON} with clip_scope='islands', which would clip Muon's update, not the gradient: "
            "take clip_scope='replica', AdamW inside, or train without DeepSpeed"
        )
    kept = [c.name for c in config.channels if c.state_name]
    if kept:
        yield (
            f"{MUON} under {config.preset!r}, with {_named(kept)} of optimizer states: "
            "DeepSpeed makes those of Muon at its first step and keeps some elsewhere. Take a "
            "preset that exchanges none (muloco, diloco), or AdamW inside"
        )


def _named(channels: list[str]) -> str:
    return f"channel {channels[0]!r}" if len(channels) == 1 else f"channels {', '.join(channels)}"


def warn(engine: Any) -> None:
    """Warn, once per replica, of embeddings and heads that DeepSpeed's Muon steps."""
    if replica(engine).rank or not is_muon(engine.optimizer.optimizer):
        return
    trained = ((plain_name(n), p) for n, p in engine.module.named_parameters() if p.requires_grad)
    names = [n for n, p in trained if getattr(p, "use_muon", False) and matches(n, EMBEDDINGS)]
    if names:
        log.warning(
            "deepspeed_ext.attach found DeepSpeed's Muon at %s, which fsdp_demo leaves to AdamW: "
            "embeddings and heads. DeepSpeed goes by names with 'embed' or 'lm_head': call the "
            "module so, or pass a MuonWithAuxAdam with groups of your own",
            first_few(names, 3),
        )
