"""Mesh topology under Accelerate and the Trainer: one world, nodes on the replicate axis, FSDP2 on
the shard axis alone.

Accelerate's own `ParallelismConfig(dp_replicate_size=R)` is HSDP: FSDP2 gets both axes and
all-reduces every gradient between nodes. `ExchangeParallelismConfig` differs in one thing, the axes
that it hands to FSDP2; the mesh, the data loaders and the launcher see the same (dp_replicate,
dp_shard) world.

Source of the facts: accelerate 1.15, `ParallelismConfig.fsdp_dim_names`, whose only user is
`fsdp2_prepare_model`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import ParallelismConfig

from ..errors import counted
from ..hosts.base import is_dtensor
from ..rendezvous.environment import patience
from ..rendezvous.topology import Topology


@dataclass
class ExchangeParallelismConfig(ParallelismConfig):
    """`dp_replicate_size` nodes (or groups of ranks) exchange; inside each, `dp_shard_size` ranks
    shard the model with FSDP2.

    Sizes that are not given come from the environment of `accelerate launch`
    (PARALLELISM_CONFIG_DP_REPLICATE_SIZE, ..._DP_SHARD_SIZE).

    Raises:
        ValueError: other axes (tp, cp, sp) are set; replicas of one rank (nothing is left that
            FSDP2 could shard: DDP would all-reduce between nodes); shards that do not fit into a
            node.

    Example:
        >>> from fsdp_demo.integrations.mesh import ExchangeParallelismConfig
        >>> ExchangeParallelismConfig(dp_replicate_size=2, dp_shard_size=4).fsdp_dim_names
        ['dp_shard']
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {name: getattr(self, name, 1) for name in ("tp_size", "cp_size", "sp_size")}
        if other := {name: size for name, size in sizes.items() if size > 1}:
            raise ValueError(
                f"{other} beside an exchange was never tried: allowed are dp_replicate_size and "
                "dp_shard_size"
            )
        if self.dp_replicate_size > 1 and self.dp_shard_size < 2:
            raise ValueError(
                f"dp_replicate_size={self.dp_replicate_size} with "
                f"dp_shard_size={self.dp_shard_size}: Accelerate would take DDP, which "
                "all-reduces between nodes. Launch each node as an island (ISLAND_RANK, "
                "ISLAND_COUNT) where the model is not sharded"
            )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if local and self.dp_shard_size > 1 and local % self.dp_shard_size:
            raise ValueError(
                f"dp_shard_size={self.dp_shard_size} on nodes of {counted(local, 'rank')}: shards "
                "would cross the slow link. Allowed are its divisors"
            )

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes that FSDP2 shards over. The stock class names a flattened copy of the shard
        axis, whose slicing torch deprecates.
        """
        return ["dp_shard"]


def mesh_topology(accelerator: Any) -> Topology:
    """The topology of an Accelerator that was made with `ExchangeParallelismConfig`.

    Raises:
        ValueError: the accelerator has no replicate axis, or a plain HSDP one; ISLAND_TIMEOUT is no
            number of seconds.
    """
    config = accelerator.parallelism_config
    refuse_hsdp(config)
    if not isinstance(config, ExchangeParallelismConfig) or config.dp_replicate_size < 2:
        raise ValueError(
            f"found parallelism_config={config}: a mesh needs "
            "ExchangeParallelismConfig(dp_replicate_size=NODES, dp_shard_size=RANKS)"
        )
    return Topology.from_mesh(accelerator.torch_device_mesh, timeout=patience())


def refuse_hsdp(config: Any) -> None:
    """Raise ValueError for Accelerate's replicate axis, which all-reduces at every step."""
    ours = config is None or isinstance(config, ExchangeParallelismConfig)
    if not ours and config.dp_replicate_size > 1:
        raise ValueError(
            f"ParallelismConfig(dp_replicate_size={config.dp_replicate_size}) is HSDP: it "
            "all-reduces every gradient between nodes. Give "
            "fsdp_demo.integrations.mesh.ExchangeParallelismConfig(...) with the same sizes as "
            "parallelism_config instead"
        )


def check_axes(model: torch.nn.Module, ranks: int) -> None:
    """Check that every trainable parameter is a DTensor on one mesh axis over `ranks` ranks.

    Raises:
        RuntimeError: it is not (FSDP2 is not there, or has the replicate axis).
    """
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if not is_dtensor(param):
            raise RuntimeError(
                f"{name} is not sharded although FSDP2 is on: Accelerate's internals moved"
            )
        if param.device_mesh.ndim != 1 or param.device_mesh.size() != ranks:
            raise RuntimeError(
                f"{name} is sharded on {param.device_mesh}, expected one axis over "
                f"{counted(ranks, 'rank')}"
            )
