"""Replicas as ranks of one torch.distributed world, as in a mesh, in tests that play islands
elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from fsdp_demo import Topology

from .ranks import Rank


def replica(me: Rank, procs: int = 1, timeout: float = 60.0) -> tuple[Rank, Topology, Any]:
    """For `run_ranks(fn, 1, replicas * procs)`: who this rank is among replicas of `procs` ranks,
    its topology, and the mesh of its replica for `fully_shard`.
    """
    replicas = me.procs // procs
    here = replace(me, island=me.proc // procs, proc=me.proc % procs, islands=replicas, procs=procs)
    mesh = init_device_mesh("cpu", (replicas, procs), mesh_dim_names=("dp_replicate", "dp_shard"))
    return here, Topology.from_mesh(mesh, timeout=timeout), mesh["dp_shard"]
