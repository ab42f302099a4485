"""The mesh under DeepSpeed: one torch.distributed world over several nodes, in which ZeRO shards
and reduces inside a node only.

`shard_within_node(ranks_per_node)` once, after torch.distributed is up and before the model is
made. DeepSpeed learns of a node through a megatron-like `mpu` whose data-parallel group is the
node. Accelerate and the Trainer have no argument for one, but they look `deepspeed.initialize` up
when they call it, so that is where the mpu enters (and `zero.Init`, where ZeRO-3 cuts parameters
before there is an engine). What does not confine: `mesh_param`, hpZ, a Ulysses-like mpu under
ZeRO-3. MiCS is no more.

Source of the facts: deepspeed 0.19.8, collectives recorded by group and bytes
(`tests/deepspeed/test_zero_mesh.py`).
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from fsdp_demo import Topology
from fsdp_demo.comm.environment import patience

from .all_ranks import told
from .all_ranks import world as all_ranks
from .confinement import Confinement

log = logging.getLogger("fsdp_demo")

_now: Confinement | None = None


class NodeMPU:
    """A megatron-like mpu: data parallel over the ranks of this node, model parallel over this rank
    alone.

    Nodes are runs of `node_size` consecutive ranks. All ranks of the world make one, at the same
    point: it creates process groups.

    Attributes:
        node_size, replicas: ranks per node, and nodes. world: both together.
        rank, place, replica: this rank in the world, in its node, and the index of its node.
        ranks: the ranks of this node, ascending.
        group: process group of the node, on the world's backend. solo: of this rank alone.
        cross: gloo group of the ranks with this place on all nodes, in the order of the replicas:
            the peer group of the exchange.

    Raises:
        ValueError: torch.distributed is not up, or `node_size` does not fit the world or the
            launcher's LOCAL_WORLD_SIZE.
    """

    def __init__(self, node_size: int):
        check_size(node_size)
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
        self.cross = self._mine(lines, backend="gloo")  # payloads of an exchange are host tensors
        # Not None, which torch reads as the world, and DeepSpeed clips and votes over this group.
        self.solo = self._mine([range(i, i + 1) for i in range(self.world)], timeout=limit)

    def _mine(self, sets: list[range], **options: Any) -> Any:
        """Make a group of each set, in one order on all ranks; returns the one that has this
        rank.
        """
        made = [(dist.new_group(list(ranks), **options), ranks) for ranks in sets]
        return next(group for group, ranks in made if self.rank in ranks)

    @property
    def name(self) -> str:
        """The replica's name in logs and paths."""
        return f"island{self.replica}"

    # ---- what DeepSpeed asks for ---------------------------------------------------------------

    def get_data_parallel_group(self) -> Any:
        """The node."""
        return self.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The node's ranks in the world."""
        return list(self.ranks)

    def get_data_parallel_rank(self) -> int:
        """This rank's place in its node."""
        return self.place

    def get_data_parallel_world_size(self) -> int:
        """Ranks per node."""
        return self.node_size

    def get_model_parallel_group(self) -> Any:
        """This rank alone."""
        return self.solo

    def get_model_parallel_rank(self) -> int:
        """Always 0."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """Always 1."""
        return 1

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def take_device() -> None:
    """Make the device of this rank the current one, as DeepSpeed does when it makes an engine: what
    ranks say to each other before would all go through the first device.
    """
    accelerator, text = get_accelerator(), os.environ.get("LOCAL_RANK", "").strip()
    place = int(text) if text.isascii() and text.isdigit() else -1
    if accelerator.device_name() != "cpu" and 0 <= place < accelerator.device_count():
        accelerator.set_device(place)


def check_size(node_size: Any) -> None:
    """Raise ValueError unless a world of torch.distributed is up that consists of nodes of
    `node_size` ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "shard_within_node: torch.distributed is not initialised. Call it after "
            "deepspeed.init_distributed(), under the Trainer after "
            "TrainingArguments(...), and before the model is made"
        )
    # first of all: groups of unlike sizes would wait for each other
    sizes = all_ranks().everyone(repr(node_size))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"shard_within_node was called with different sizes: {told(sizes)}. Give one number on "
            "all ranks"
        )
    world = dist.get_world_size()
    if (
        isinstance(node_size, bool)
        or not isinstance(node_size, int)
        or node_size < 1
        or world % node_size
    ):
        allowed = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ValueError(
            f"shard_within_node({node_size!r}) in a world of {world} ranks: allowed are its "
            f"divisors {allowed}"
        )
    text = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    local = int(text) if text.isascii() and text.isdigit() else 0
    if local and local % node_size:
        allowed = ", ".join(str(n) for n in range(1, local + 1) if local % n == 0)
        raise ValueError(
            f"shard_within_node({node_size}) on nodes of LOCAL_WORLD_SIZE={local} ranks: shards "
            "would cross the slow link. Allowed are "
            f"{allowed}"
        )


def shard_within_node(node_size: int) -> Confinement:
    """Confine ZeRO to nodes of `node_size` consecutive ranks: engines made from now on shard,
    reduce and gather inside a node only.

    Call it on all ranks: after `deepspeed.init_distributed()`, under the Trainer after
    `TrainingArguments(...)`, and before the model is made. Then `deepspeed_ext.attach(engine, ...)`
    exchanges between the nodes. DeepSpeed's own numbers count one node from then on
    (`engine.train_batch_size()`, samples per second); a global `train_batch_size` in the
    configuration is translated.

    Returns:
        What was put in place. `remove()`, or leaving it as a context manager, takes it out again;
        keep it as long as an engine trains. A second call with the same size returns the same.

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
    global _now
    take_device()
    check_size(node_size)
    if (mpu := installed()) is not None and _now is not None:
        if mpu.node_size == node_size:
            return _now
        raise ValueError(
            f"shard_within_node({node_size}): nodes of {mpu.node_size} ranks are in place. Call "
            "remove() on those first"
        )
    if _now is not None:
        _now.remove()  # of a world that has ended
    mpu = NodeMPU(node_size)
    _now = Confinement(mpu)
    if mpu.replicas == 1:
        log.info(
            "shard_within_node(%d): the world is one node, there is nothing to exchange", node_size
        )
    else:
        log.info(
            "ZeRO stays inside nodes of %d ranks; %d replicas, this is rank %d of %s",
            node_size,
            mpu.replicas,
            mpu.place,
            mpu.name,
        )
    return _now


def installed() -> NodeMPU | None:
    """The mpu that `shard_within_node` has put in place in this world, for those who ask before
    there is an engine.
    """
    return _now.mpu if _now is not None and _now.active else None


def topology_of(engine: Any) -> Topology | None:
    """Where an engine's rank stands in the mesh; None if its mpu is not a `NodeMPU`. Of a world
    that is one node: a single replica.

    Raises:
        ValueError: ISLAND_TIMEOUT is no number.
    """
    mpu = getattr(engine, "mpu", None)
    if not isinstance(mpu, NodeMPU):
        return None
    timeout, group = patience(), mpu.group if mpu.node_size > 1 else None
    place: dict[str, Any] = {
        "timeout": timeout,
        "rank": mpu.place,
        "world": mpu.node_size,
        "group": group,
    }
    if mpu.replicas == 1:
        return Topology("single", **place)
    return Topology("mesh", mpu.replica, mpu.replicas, mpu.name, peer_group=mpu.cross, **place)
