"""How the replicas of a mesh meet over the store of their world, and how the loss of one ends."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_demo import PeerLost, Topology
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.peers import zeromq
from fsdp_demo.rendezvous.position import ShardPosition
from fsdp_demo.store.client import WorldStore

from ..support.elastic import descriptors, die
from ..support.inside import in_a_process
from ..support.threaded import at_once


class HeldStore:
    """A store of torch that counts what it is asked, and answers nothing while it is `held`, as
    that of a process that has died.
    """

    def __init__(self) -> None:
        self._store, self.asked, self.held = dist.HashStore(), 0, False

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        if self.held:
            threading.Event().wait()
        return getattr(self._store, name)


def met(store: Any, i: int, timeout: float) -> PeerGroup:
    peers, _ = Topology.from_store(store, i, 2, timeout).join(ShardPosition())
    assert peers is not None
    return peers


def swapped(peers: PeerGroup) -> list[int]:
    """What both replicas say: their numbers."""
    return [int(b[0]) for b in peers.all_gather(torch.tensor([peers.slot], dtype=torch.uint8))]


@pytest.mark.parametrize("end", ["killed", "closed", "silent", "stands"])
@in_a_process
def test_mesh_loss_is_told_without_the_store(end: str) -> None:
    """The survivor says who was lost and why within the timeout, though the store of the world
    went with the lost replica; no step asks that store.
    """
    store, found, over = HeldStore(), list[str](), threading.Event()

    def replica(i: int) -> None:
        peers = met(store, i, 2.0)
        assert swapped(peers) == [0, 1]
        store.held, before = True, store.asked
        assert [swapped(peers) for _ in range(3)] == [[0, 1]] * 3
        driver = peers._driver
        assert driver is not None
        if i == 1:
            if end == "killed":
                driver.do(lambda: die(driver))
            if end == "closed":
                peers.release()
            if end == "silent":
                driver.do(lambda: over.wait(20.0))
            assert over.wait(20.0)
            return
        with pytest.raises(PeerLost) as lost:
            swapped(peers)
        found.append(str(lost.value))
        assert store.asked == before
        peers.release()
        over.set()

    at_once(replica, 2, 30.0)
    why = {"silent": "silent for 2 s", "stands": "it is alive, but has not come to message"}
    reason = why.get(end, "closed by peer")
    few = "; 2 must go on together, and 1 of them can"
    told = rf"island 1 \(island1\) is lost: .*{reason}.*{few}.*#island-lost"
    assert re.match(told, found[0]), found


@in_a_process
def test_mesh_replica_that_came_in_vain_is_not_awaited() -> None:
    """Who waits at the address of a replica that has died meets its next life, as soon as that has
    come.
    """
    zeromq.ASK = 0.05
    store, waits = dist.HashStore(), threading.Event()
    below = WorldStore(store, "the test", 5.0).under("fsdp_demo/peers/")
    below.set("life/0", '"of a life that has ended"')
    plain = zeromq.ZeroMQ._notes

    def notes(*args: Any) -> Any:
        waits.set()
        return plain(*args)

    def replica(i: int) -> None:
        assert i == 1 or waits.wait(20.0)
        for _ in range(2):  # the next meeting in one process, too
            peers = met(store, i, 20.0)
            assert swapped(peers) == [0, 1]
            peers.release()

    zeromq.ZeroMQ._notes = notes  # type: ignore[method-assign]
    at_once(replica, 2, 40.0)


def test_single_replica_is_a_record_of_one_member() -> None:
    """A single replica gathers from itself and averages itself, without a thread or a socket."""
    before = descriptors()
    peers, copies = Topology().join(ShardPosition())
    assert peers is not None and (peers.alive, peers.names, copies) == ((0,), ["island0"], 1)
    vector = torch.arange(5, dtype=torch.float32)
    assert swapped(peers) == [0]
    (mean,) = peers.mean(peers.header(0), [(vector, "fp32")])
    assert torch.equal(mean, vector) and peers.wait_stable(0.0)
    # fewer: what an earlier test of this process has left open may end meanwhile
    assert all(now <= then for now, then in zip(descriptors(), before, strict=True))
    peers.release()
    with pytest.raises(PeerLost, match="closed"):
        swapped(peers)
