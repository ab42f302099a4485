"""A peer group: its round trip, two groups of one mesh; how many connections are opened."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import Link, preset
from fsdp_demo.elastic import chunks as streams_of
from fsdp_demo.elastic import peer_group
from fsdp_demo.elastic.agreement import round_trip
from fsdp_demo.elastic.chunks import streams
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.membership.protocol_types import Member
from fsdp_demo.net.link import TCP_SHARE
from fsdp_demo.peers import header as frame
from fsdp_demo.rendezvous.position import ShardPosition

from ..peers.test_header import uint8
from ..support import probe, threaded
from ..support.elastic import Islands
from ..support.inside import in_a_process, in_ranks, in_threads


def on_lines(fn: Any, count: int, timeout: float = 10.0) -> list[Any]:
    """fn(line) on `count` threads, each a replica of a mesh; what each returned, or the exception
    it raised.
    """

    def island(i: int, topology: fsdp_demo.Topology) -> Any:
        line, _ = topology.join(ShardPosition())
        assert line is not None
        try:
            return fn(line)
        finally:
            line.release()

    return threaded.islands(island, count, timeout)


def test_streams_follow_from_the_round_trip() -> None:
    """The number of connections to a peer grows with the round trip."""
    seconds = (0.0, 0.0125, 0.0205, 0.03, 0.0503, 0.1005, 1.0)
    assert [streams(s, 1) for s in seconds] == [1, 1, 1, 2, 4, 8, streams_of.STREAMS]


def test_streams_have_a_budget_over_all_peers() -> None:
    """All peers together have a budget of connections."""
    for islands in (2, 3, 5, 8, 16, 24, 32, 48, 128):
        count = streams(1.0, islands - 1)
        assert count == 1 or count * (islands - 1) <= streams_of.BUDGET
    assert streams(1.0, 4) == streams_of.STREAMS and streams(1.0, 31) == 1


@pytest.mark.parametrize("late, expected", [(0.0, 1), (0.06, 4)])
@in_ranks(1, 1)
def test_round_trip_is_the_longest_that_one_rank_has_seen(late, expected) -> None:
    """One rank's kernel has seen a longer way than those of the others (which here are near): all
    open the same number of connections.
    """

    def counted(line: PeerGroup) -> tuple[int, int]:
        if line.rank == 1 and late:
            line.seen_round_trip = lambda: late  # type: ignore[method-assign]
        return streams(round_trip(line), 2), line.meter.bytes_sent

    outs = on_lines(counted, 3)
    assert all(out == outs[0] for out in outs)
    count, sent = outs[0]
    assert count >= expected and sent == 0


@pytest.mark.parametrize("name", ["demo", "diloco"])
def test_streams_do_not_change_training(run_ranks, everywhere, name) -> None:
    """Real islands train alike over all connections (every round trip counts as long) and over
    one.
    """
    config = preset(name) if name == "demo" else preset(name, period=2, momentum_warmup=0)
    config = config.changed({"clip": None, "inner_optimizers": ["as_is"]})

    def run(me: Any) -> Any:
        model = probe.Probe()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        exchange = fsdp_demo.attach(optimizer, config, model=model)
        for t in range(4):
            probe.backward(model, me, t, 0, False)
            optimizer.step()
            optimizer.zero_grad()
        out = {n: p.detach().clone() for n, p in model.named_parameters()}
        found = exchange.metrics().items()
        counts = {k: v for k, v in found if k.startswith(("bytes", "messages"))}
        connections = exchange.peers.num_connections
        exchange.finish()
        return out, counts, connections

    found = []
    for rtt in (1e9, 1e-9):
        everywhere.setattr(streams_of, "STREAM_RTT", rtt)
        found.append(run_ranks(run, 2, 1))
    for one, several in zip(*found, strict=True):
        assert (one[2], several[2]) == (1, streams_of.STREAMS) and one[1] == several[1]
        assert all(torch.equal(one[0][n], several[0][n]) for n in one[0])


@in_threads(2)
def test_peer_groups_of_one_mesh_keep_messages_apart(island, topology) -> None:
    """Two exchanges share a mesh and keep their messages apart, though on one island the second is
    first to speak.
    """
    both = [topology.join(ShardPosition())[0] for _ in range(2)]
    found: list[list[int]] = [[], []]

    def speak(k: int) -> None:
        if k == island:
            time.sleep(0.3)
        line = both[k]
        _, bodies = line.gather(line.header(frame.PAYLOAD), uint8(bytes([10 * k + island] * 4)))
        found[k] = [int(b[0]) for b in bodies]

    threaded.at_once(speak, 2, 10)
    assert found == [[0, 1], [10, 11]]


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO of Linux")
@in_a_process
def test_round_trip_is_not_that_of_slow_processes() -> None:
    """Slow processes make no round trip longer: on busy cores a message takes as long as if the
    islands were far apart.
    """
    islands = Islands(3)

    def fn(line: Any) -> float:
        whole = line.all_gather

        def slow(*args: Any) -> Any:
            time.sleep(0.2)
            out = whole(*args)
            time.sleep(0.2)
            return out

        line.all_gather = slow
        return float(round_trip(line))

    found = set(islands.run(fn).values())
    (seconds,) = found  # the same on all
    assert 0 < seconds < 0.1


def test_rehearsed_link_takes_half_a_round_trip_per_leg(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsed link takes half a round trip for each leg of a message."""
    slept: list[float] = []
    monkeypatch.setattr(peer_group.time, "sleep", slept.append)
    line = peer_group.PeerGroup(
        Member(0), {0: "a", 1: "b"}, [0, 1], 60.0, Link(8e6 / TCP_SHARE, 0.04)
    )
    line._account(1000, 500, False, False)
    line._account(1000, 2000, True, False)
    line._account(7, 7, False, True)
    assert slept == pytest.approx([0.021, 0.042])
    assert (line.meter.messages, line.meter.bytes_sent, line.meter.setup_bytes) == (4, 2000, 7)
