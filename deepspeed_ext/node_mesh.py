"""Where the ranks of a launch stand: on the island that their environment names, or in a mesh, one
torch.distributed world over several nodes, in which ZeRO shards and reduces inside a node only.

`shard_within_node(ranks_per_node)` once, after torch.distributed is up and before the model is
made. DeepSpeed learns of a node through a megatron-like `mpu` whose data-parallel group is the
node. Accelerate and the Trainer have no argument for one, but they look `deepspeed.initialize` up
when they call it, so that is where the mpu enters (`confinement.py`).

Launchers do not pass every variable on: `deepspeed --hostfile` takes a few prefixes and what stands
in `.deepspeed_env`. A rank without its ISLAND_* variables would train as a single replica beside
others that wait for peers, so ranks compare them first.

Source of the facts: deepspeed 0.19.8, collectives recorded by group and bytes
(`tests/deepspeed/test_zero_mesh.py`).
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from fsdp_demo import Topology
from fsdp_demo.rendezvous.environment import patience
from fsdp_demo.rendezvous.mesh import meeting_place

from .all_ranks import by_value, local_ranks
from .all_ranks import world as all_ranks
from .confinement import replace

log = logging.getLogger("fsdp_demo")

NAMES = ("ISLAND_COUNT", "ISLAND_RANK", "ISLAND_ENDPOINT", "ISLAND_RUN", "ISLAND_NAME")

_nodes: NodeMPU | None = None


class NodeMPU:
    """A megatron-like mpu: data parallel over the ranks of this node, model parallel over this rank
    alone.

    All ranks of the world make one, at the same point: it creates process groups.

    Attributes:
        node_size, replicas: ranks per node, and nodes. world: both together.
        rank, place, replica: this rank in the world, in its node, and the index of its node.
        ranks: the ranks of this node, ascending.
        group: process group of the node, on the world's backend. solo: of this rank alone.
        cross: gloo group of the ranks with this place on all nodes, in the order of the replicas;
            meets_at: where they meet, to exchange.
    """

    def __init__(self, node_size: int):
        self.of = dist.group.WORLD
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.node_size, self.replicas = node_size, self.world // node_size
        self.replica, self.place = divmod(self.rank, node_size)
        self.ranks = tuple(range(self.replica * node_size, (self.replica + 1) * node_size))
        # In a node, ranks wait for the one whose line is slowest: for longer than the line itself
        # waits for a peer.
        limit = timedelta(seconds=max(1800.0, patience() + 60))
        nodes = [range(i * node_size, (i + 1) * node_size) for i in range(self.replicas)]
        lines = [range(j, self.world, node_size) for j in range(node_size)]
        self.group = self._mine(nodes, timeout=limit)
        self.cross = self._mine(lines, backend="gloo")  # what is broadcast are host tensors
        self.meets_at = meeting_place(lines[self.place])
        # Not None, which torch reads as the world, and DeepSpeed clips and votes over this group.
        self.solo = self._mine([range(i, i + 1) for i in range(self.world)], timeout=limit)

    def _mine(self, sets: list[range], **options: Any) -> Any:
        """Make a process group of each set of ranks; returns the one that holds this rank."""
        made = [(dist.new_group(list(ranks), **options), ranks) for ranks in sets]
        return next(group for group, ranks in made if self.rank in ranks)

    @property
    def name(self) -> str:
        """The replica's name in logs and paths."""
        return f"island{self.replica}"

    # What DeepSpeed asks for: the node is data parallel, this rank alone model parallel.

    def get_data_parallel_group(self) -> Any:
        return self.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self.ranks)

    def get_data_parallel_rank(self) -> int:
        return self.place

    def get_data_parallel_world_size(self) -> int:
        return self.node_size

    def get_model_parallel_group(self) -> Any:
        return self.solo

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def check_size(node_size: Any) -> None:
    """Raise ValueError unless torch.distributed is up with whole nodes of `node_size` ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "shard_within_node: torch.distributed is not initialised. Call it after deepspeed."
            "init_distributed(), under the Trainer after TrainingArguments(...), and before the "
            "model is made"
        )
    # first of all: groups of unlike sizes would wait for each other
    sizes = all_ranks().everyone(repr(node_size))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"shard_within_node was called with different sizes: {by_value(sizes)}. Give one "
            "number on all ranks"
        )
    # a shard over two machines would cross the slow link
    ranks = {"the world": dist.get_world_size(), "a machine (LOCAL_WORLD_SIZE)": local_ranks()}
    for where, count in ranks.items():
        allowed = [n for n in range(1, count + 1) if count % n == 0]
        if count and (type(node_size) is not int or node_size not in allowed):
            raise ValueError(
                f"shard_within_node({node_size!r}), where {where} has {count} ranks: {allowed} are "
                "allowed"
            )


def shard_within_node(node_size: int) -> NodeMPU:
    """Confine ZeRO to nodes of `node_size` consecutive ranks: engines made from now on shard,
    reduce and gather inside a node only.

    Call it on all ranks: after `deepspeed.init_distributed()`, under the Trainer after
    `TrainingArguments(...)`, and before the model is made. Then `deepspeed_ext.attach(engine, ...)`
    exchanges between the nodes. DeepSpeed's own numbers count one node from then on
    (`engine.train_batch_size()`, samples per second); a global `train_batch_size` in the
    configuration is translated.

    Returns:
        The nodes, which stay as long as torch's world. A second call returns the same.

    Raises:
        ValueError: torch.distributed is not up; the size does not fit; another size is in place.
        RuntimeError: this DeepSpeed lacks what has to be replaced. Later, from
            `deepspeed.initialize`: an engine is not confined.

    Example:
        >>> import deepspeed_ext
        >>> deepspeed_ext.shard_within_node(8)
        Traceback (most recent call last):
        ...
        ValueError: shard_within_node: torch.distributed is not initialised. Call it after deepspeed.init_distributed(), ...
    """  # noqa: E501
    global _nodes
    # DeepSpeed takes it only when it makes an engine: ranks would all speak through the first
    accelerator, text = get_accelerator(), os.environ.get("LOCAL_RANK", "").strip()
    place = int(text) if text.isascii() and text.isdigit() else -1
    if accelerator.device_name() != "cpu" and 0 <= place < accelerator.device_count():
        accelerator.set_device(place)
    check_size(node_size)
    if (nodes := installed()) is not None:
        if nodes.node_size == node_size:
            return nodes
        raise ValueError(
            f"shard_within_node({node_size}): nodes of {nodes.node_size} ranks are in place, for "
            "as long as this process group"
        )
    # torch's group was not made by DeepSpeed: its own layer does not know of it yet
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)
    replace(installed)
    _nodes = nodes = NodeMPU(node_size)
    alone = ": nothing to exchange" if nodes.replicas == 1 else ""
    log.info("ZeRO stays inside %s of %d nodes%s", nodes.name, nodes.replicas, alone)
    return nodes


def installed() -> NodeMPU | None:
    """The mpu of `shard_within_node` in this world, also before the engine; None without one."""
    here = _nodes is not None and dist.is_initialized() and dist.group.WORLD is _nodes.of
    return _nodes if here else None


def topology_of(mpu: Any) -> Topology | None:
    """Where the rank of an engine with this mpu stands in the mesh, in a world of one node as a
    single replica; None if it is no `NodeMPU`. Raises ValueError: ISLAND_TIMEOUT is no number.
    """
    if not isinstance(mpu, NodeMPU):
        return None
    node: dict[str, Any] = {
        "timeout": patience(),
        "rank": mpu.place,
        "world": mpu.node_size,
        "group": mpu.group if mpu.node_size > 1 else None,
    }
    if mpu.replicas == 1:
        return Topology("single", **node)
    return Topology("mesh", mpu.replica, mpu.replicas, mpu.name, meets_at=mpu.meets_at, **node)


# ---- a mesh, islands, or a single replica ------------------------------------------------------


def topology(engine: Any = None) -> Topology:
    """The topology of this rank: a mesh where `shard_within_node` is in place, else islands from
    the environment, else a single replica.

    All ranks of the world call it together.

    Args:
        engine: where there is one, its mpu counts.

    Raises:
        ValueError: ranks have different ISLAND_* variables; a mesh and islands at once; one world
            over several nodes that is neither, unless ISLAND_COUNT=1 says so; and as
            `Topology.from_env`.
    """
    compare_environment()
    mpu = installed() if engine is None else getattr(engine, "mpu", None)
    mesh, islands = topology_of(mpu), Topology.from_env()
    world, local = dist.get_world_size() if dist.is_initialized() else 1, local_ranks()
    said = installed() is not None or mesh is not None or "ISLAND_COUNT" in os.environ
    if not said and 0 < local < world:
        raise ValueError(
            f"one world of {world} ranks over nodes of {local}: ZeRO reduces between the nodes, "
            "and there is nobody to exchange with. Call "
            "deepspeed_ext.shard_within_node(ranks_per_node) before the model is made and "
            "deepspeed.initialize is called, or launch each node as an island (ISLAND_RANK, "
            "ISLAND_COUNT); ISLAND_COUNT=1 says that all nodes are one replica"
        )
    if mesh is None or mesh.islands == 1:
        return islands
    if islands.islands > 1:
        raise ValueError(
            f"ISLAND_COUNT={islands.islands} and shard_within_node({mesh.world}) at once: leave "
            "shard_within_node out, or launch all nodes as one world without ISLAND_* variables"
        )
    return mesh


def compare_environment() -> None:
    """Raise ValueError on all ranks of the world unless their ISLAND_* variables are equal."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    said = all_ranks().everyone([os.environ.get(name, "").strip() for name in NAMES])
    for name, values in zip(NAMES, zip(*said, strict=True), strict=True):
        if len(set(values)) == 1:
            continue
        raise ValueError(
            f"ranks of one launch have different {name}: {by_value(values)}. All need the same "
            "ISLAND_* variables; a hostfile launch passes them on only if they stand in "
            ".deepspeed_env (NAME=value lines, in the home directory or where `deepspeed` is "
            "called). Write that file anew before every start: env | grep ^ISLAND_ > .deepspeed_env"
        )
