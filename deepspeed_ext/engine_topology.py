"""Where the ranks of a launch stand: in the mesh of `shard_within_node`, or on the island that
their environment names.

Launchers do not pass every variable on: `deepspeed --hostfile` takes a few prefixes and what stands
in `.deepspeed_env`. A rank without its ISLAND_* variables would train as a single replica beside
others that wait for peers, so ranks compare them first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from fsdp_demo import Topology
from fsdp_demo.errors import see

from .all_ranks import local_ranks, told, world
from .node_mesh import installed, topology_of

NAMES = ("ISLAND_COUNT", "ISLAND_RANK", "ISLAND_ENDPOINT", "ISLAND_RUN", "ISLAND_NAME")


def topology(engine: Any = None) -> Topology:
    """The mesh where `shard_within_node` is in place, else islands from the environment, else a
    single replica.

    All ranks of the world call it together.

    Args:
        engine: where there is one, its mpu counts.

    Raises:
        ValueError: ranks have different ISLAND_* variables; a mesh and islands at once; one world
            over several nodes that is neither, unless ISLAND_COUNT=1 says so; and as
            `Topology.from_env`.
    """
    compare_environment()
    mesh, islands = topology_of(engine or SimpleNamespace(mpu=installed())), Topology.from_env()
    world, local = dist.get_world_size() if dist.is_initialized() else 1, local_ranks()
    if (
        installed() is None
        and mesh is None
        and "ISLAND_COUNT" not in os.environ
        and 0 < local < world
    ):
        raise ValueError(
            f"one world of {world} ranks over nodes of {local}: ZeRO reduces between the nodes, "
            "and there is nobody to exchange with. Call "
            "deepspeed_ext.shard_within_node(ranks_per_node) before the model is made and "
            "deepspeed.initialize is called, or launch each "
            "node as an island (ISLAND_RANK, ISLAND_COUNT); ISLAND_COUNT=1 says that all nodes are "
            "one replica"
            f"{see('one-world')}"
        )
    if mesh is None or mesh.islands == 1:
        return islands
    if islands.islands > 1:
        raise ValueError(
            f"ISLAND_COUNT={islands.islands} and shard_within_node({mesh.world}) at once: leave "
            "shard_within_node out, or launch all nodes "
            "as one world without ISLAND_* variables"
        )
    return mesh


def compare_environment(env: Mapping[str, str] | None = None) -> None:
    """Raise ValueError, on every rank of the world, unless all ranks have the same ISLAND_*
    variables.

    Args:
        env: this rank's, by default `os.environ`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    env = os.environ if env is None else env
    said = world().everyone([env.get(name, "").strip() for name in NAMES])
    for name, values in zip(NAMES, zip(*said, strict=True), strict=True):
        if len(set(values)) == 1:
            continue
        raise ValueError(
            f"ranks of one launch have different {name}: {told(values)}. All need the same "
            "ISLAND_* variables; a hostfile launch passes "
            "them on only if they stand in .deepspeed_env (NAME=value lines, in the home directory "
            "or where `deepspeed` is called)"
            f"{see('hostfile')}"
        )
