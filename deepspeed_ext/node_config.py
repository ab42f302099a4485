"""A DeepSpeed configuration as the engine of one node of a mesh must see it: batch arithmetic, and
what cannot be confined.
"""

from __future__ import annotations

from typing import Any

import deepspeed

TOTAL, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def node_config(
    config: dict[str, Any] | str, node_size: int, replicas: int, batch: bool = True
) -> dict[str, Any]:
    """A copy of `config` (dict, path, or base64 as DeepSpeed takes them) whose `train_batch_size`
    counts one node, as DeepSpeed then does.

    Args:
        batch: whether the numbers matter; without (`zero.Init`, where the Trainer's may still say
            "auto") any that fit are put in.

    Raises:
        ValueError: `train_batch_size` does not fit the ranks, the micro-batch and the accumulation.
    """
    config = dict(_read(config))
    # beside sequence_parallel_size=1 DeepSpeed would make a mesh of the whole world
    config.pop("data_parallel_size", None)
    config.pop("sequence_parallel_size", None)
    if not batch:
        config.pop(TOTAL, None)
        return {**config, MICRO: 1, ACCUMULATION: 1}
    total, micro, steps = config.get(TOTAL), config.get(MICRO), config.get(ACCUMULATION)
    if not isinstance(total, int):
        return config
    world, given = node_size * replicas, f"{MICRO}={micro}, {ACCUMULATION}={steps}"
    if micro is not None and steps is not None:
        if total not in (micro * steps * node_size, micro * steps * world):
            raise ValueError(
                f"{TOTAL}={total} with {given}: {world} ranks make {micro * steps * world}. "
                f"Correct one of them, or leave {TOTAL} out"
            )
        return {**config, TOTAL: micro * steps * node_size}
    parts = (micro or 1) * (steps or 1) * world
    if total % parts:
        raise ValueError(
            f"{TOTAL}={total} with {given} does not divide over {replicas} replicas of {node_size} "
            f"ranks: allowed are multiples of {parts}"
        )
    return {**config, TOTAL: total // replicas}


def refuse_beside(
    config: dict[str, Any] | str | None, mesh_param: Any = None, model: Any = None
) -> None:
    """Raise ValueError for what builds its own groups over the world, beside
    `shard_within_node`.
    """
    config = {} if config is None else _read(config)
    zero, tensor = config.get("zero_optimization") or {}, config.get("tensor_parallel") or {}
    autotp = max(
        _number(tensor.get("autotp_size")), _number((tensor.get("tp") or {}).get("tp_size"))
    )
    sequence = _number(config.get("sequence_parallel_size"))
    secondary = _number(zero.get("zero_hpz_partition_size"))
    found = {
        f"mesh_param={mesh_param}": bool(mesh_param),
        f"sequence_parallel_size={sequence}": sequence > 1,
        f"zero_hpz_partition_size={secondary}": secondary > 1,
        "zero_quantized_gradients": bool(zero.get("zero_quantized_gradients")),
        f"autotp_size={autotp}": autotp > 1,
        "a PipelineModule": isinstance(model, deepspeed.PipelineModule),
    }
    for what, present in found.items():
        if present:
            raise ValueError(
                f"{what} beside shard_within_node: it makes process groups of its own over the "
                "whole world, so ZeRO would reduce between "
                "nodes. Leave it out, or launch each node as an island (ISLAND_RANK, "
                "ISLAND_COUNT), where DeepSpeed runs unmodified"
            )


def _read(config: dict[str, Any] | str) -> dict[str, Any]:
    return dict(deepspeed.load_ds_config(config))


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
