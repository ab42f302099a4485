"""Votes inside an island, and the norm of its gradients: on the host and, played on the CPU,
without reading it.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import fsdp_demo
from fsdp_demo import Topology, preset
from fsdp_demo.rendezvous.island import IslandGroup
from fsdp_demo.rendezvous.position import ShardPosition

from ..support import accelerator as there
from ..support import probe
from ..support.accelerator import Accelerator, plug_in
from ..support.inside import in_ranks
from ..support.joining import same

DEVICE = torch.device("cuda", 0)


def joined(me: Any, backend: str) -> Any:
    """The 2 x 2 mesh of this rank's world on a backend; "cpu:gloo" is not gloo by name, as NCCL is
    not, and works on a CPU.
    """
    dist.init_process_group(
        backend, init_method=f"file://{me.folder}/world", rank=me.rank, world_size=4
    )
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


# ---- votes -------------------------------------------------------------------------------------


@in_ranks(1, 4, group=False)
def test_island_group_votes_over_gloo_beside_another_backend(me) -> None:
    """A mesh on another backend votes over gloo, each replica by itself: the second one makes its
    group when the first has voted, and has come and gone.
    """
    topology = Topology.from_mesh(joined(me, "cpu:gloo"), timeout=100.0)
    mark = me.folder / "voted"
    if topology.island == 1:
        while not mark.exists():
            time.sleep(0.01)
    island = IslandGroup(topology, ShardPosition(2, topology.rank), DEVICE)
    first = me.rank // 2 * 2
    assert island.max(float(me.rank), 1.0) == [first + 1.0, 1.0]
    assert island.sum(float(me.rank)) == [2 * first + 1.0]
    assert dist.get_process_group_ranks(island.group) == [first, first + 1]
    assert dist.get_backend(island.group) == "gloo"
    options = island.group._get_backend(torch.device("cpu")).options
    assert options._timeout.total_seconds() == 160.0
    assert island.group is not topology.group and island.copies is topology.group
    island.release()
    mark.touch()
    assert island.group is None


@in_ranks(1, 4, group=False)
def test_island_group_on_gloo_votes_over_its_own_group(me) -> None:
    """A mesh on gloo votes over its own group."""
    topology = Topology.from_mesh(joined(me, "gloo"))
    assert IslandGroup(topology, ShardPosition(2, topology.rank)).group is topology.group


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_island_group_exchange_in_a_mesh(run_ranks, backend) -> None:
    """Replicas of a mesh stay equal in an exchange, on either backend."""

    def train(me):
        mesh = joined(me, backend)
        model = probe.Probe(0)
        probe.shard(model, mesh["dp_shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = fsdp_demo.attach(
            optimizer, preset("demo"), model=model, topology=Topology.from_mesh(mesh)
        )
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.ones_like(p) * (1 + me.rank // 2)
            optimizer.step()
        exchange.finish()
        return exchange.digests_equal(), [p.detach().full_tensor() for p in model.parameters()]

    found = run_ranks(train, 1, 4, group=False)
    assert all(equal and same(values, found[0][1]) for equal, values in found)


@in_ranks(1, 4)
def test_island_group_broadcasts_among_copies(me) -> None:
    """Each shard hears its own first copy; where there are no copies nothing is sent."""
    topology = Topology(world=4, rank=me.proc)
    for shards, first in ((1, 0), (2, me.proc % 2), (4, me.proc)):
        place = ShardPosition(shards, me.proc % shards, 4 // shards, me.proc // shards)
        work = torch.tensor([me.proc], dtype=torch.uint8)
        IslandGroup(topology, place).broadcast(work)
        assert int(work) == first


# ---- the norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards, limit", [(1, 0.5), (2, 0.5), (4, 0.5), (2, 1e3)])
@in_ranks(1, 4)
def test_island_group_norm_on_a_device_is_that_of_the_host(me, shards, limit) -> None:
    """The norm over 4 ranks that hold `shards` shards, one of which has no gradient, is on a device
    as on the host, and as torch clips the whole.
    """
    position = ShardPosition(shards, me.proc % shards, 4 // shards, me.proc // shards)
    island = IslandGroup(Topology(world=4, rank=me.proc), position)
    gradients = [
        [torch.randn(n, generator=torch.Generator().manual_seed(10 * s + n)) for n in (5, 70)]
        for s in range(shards)
    ]
    gradients[-1] = gradients[-1] if shards < 4 else []
    mine = gradients[position.shard]
    host, there = [g.clone() for g in mine], [g.clone() for g in mine]
    whole = [torch.nn.Parameter(g) for part in gradients for g in part]
    island.clip([*host, None], limit)
    IslandGroup._on_device = lambda self: True
    IslandGroup.sum = lambda *_: pytest.fail("a number of the host")
    island.clip([*there, None], limit)
    for p in whole:
        p.grad = p.detach().clone()
    torch.nn.utils.clip_grad_norm_(whole, limit)
    before = sum(len(part) for part in gradients[: position.shard])
    for a, b, g, p in zip(host, there, mine, whole[before:], strict=False):
        torch.testing.assert_close(a, p.grad, rtol=1e-6, atol=0)
        assert torch.equal(a, g) == (limit > 1)
        assert torch.equal(a, b)


@in_ranks(1, 4, group=False)
def test_island_group_norm_is_reduced_where_the_group_reaches(me) -> None:
    """A norm is reduced on the device if the group that training uses reaches it; alone always; on
    a CPU never.
    """
    topology = Topology.from_mesh(joined(me, "cpu:gloo"))
    sharded, whole = ShardPosition(2, me.rank % 2), ShardPosition(1, 0, 2, me.rank % 2)
    islands = [
        IslandGroup(topology, place, device)
        for place in (sharded, whole)
        for device in (DEVICE, torch.device("cpu"))
    ]
    islands[0]._ranks = dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert islands[0]._on_device()
    islands[0]._ranks = topology.group
    assert [i._on_device() for i in islands] == [False, False, True, False]


def test_island_group_norm_over_two_devices() -> None:
    """A norm over two devices is on that of the masters: buffers stay on the GPU where an engine
    has its masters on the host.
    """
    with FakeTensorMode():
        square = IslandGroup(Topology(), ShardPosition())._square(
            [torch.ones(3, device="cuda"), torch.ones(4)]
        )
        assert square.device.type == "cpu"


def test_island_group_norm_of_shared_parameters_needs_no_wait() -> None:
    """The shares of parameters that ranks hold together are made on the device: what comes from a
    list of the host would come behind the whole backward.
    """
    with plug_in(), Accelerator() as mode:
        held = [torch.full((4,), 3.0, device=there.DEVICE), torch.ones(2, device=there.DEVICE)]
        square = IslandGroup(Topology(), ShardPosition(), there.DEVICE)._square(held, [3, 1])
        with mode.waiting():
            assert float(square) == 36.0 / 3 + 2.0
