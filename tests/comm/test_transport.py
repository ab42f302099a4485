"""A line of ranks: order of sends and receives, several connections, and what the meter makes of
them.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_demo
from fsdp_demo import PeerLost, preset
from fsdp_demo.comm import peers
from fsdp_demo.comm.collectives import reduce
from fsdp_demo.comm.header import HEADER, PAYLOAD, QUESTION
from fsdp_demo.comm.peers import PeerGroup, streams

from ..support import probe, threaded


def on_lines(fn: Any, count: int, connections: int = 1, timeout: float = 10.0) -> list[Any]:
    """fn(line) on `count` threads, over gloo; what each returned, or the exception it raised."""
    store, results = dist.HashStore(), [None] * count

    def connect(rank: int, k: int) -> Any:
        return dist.ProcessGroupGloo(
            dist.PrefixStore(str(k), store), rank, count, datetime.timedelta(seconds=timeout)
        )

    def work(rank: int) -> None:
        line = PeerGroup(
            connect(rank, 0), rank, count, [f"island{i}" for i in range(count)], timeout
        )
        line.more = [connect(rank, k) for k in range(1, connections)]
        try:
            results[rank] = fn(line)
        except Exception as error:
            results[rank] = error.with_traceback(None)
        finally:
            line.release()

    threaded.at_once(work, count, 3 * timeout)
    return results


class Noting:
    """Stands before a process group and notes what is posted, in order."""

    def __init__(self, group: Any, notes: list[tuple[str, int, int]], name: int = 0):
        self.group, self.notes, self.name = group, notes, name

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.notes.append(("send", rank, self.name))
        return self.group.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.notes.append(("recv", rank, self.name))
        return self.group.recv(tensors, rank, tag)


def exchanges(line: PeerGroup) -> tuple[list[Any], list[int], dict[str, Any]]:
    """A gather, a swap of unequal sizes and a reduce; what came, as lists, and the counts."""
    generator = torch.Generator().manual_seed(line.rank)
    body = torch.randint(0, 256, (2500,), dtype=torch.uint8, generator=generator)
    header = line.header(PAYLOAD, 2)
    _, bodies = line.gather(header, body)
    # sizes[i][j]: what i sends to j
    sizes = [[700 * i + 1300 * j for j in range(line.size)] for i in range(line.size)]
    outgoing = [
        torch.full((HEADER.size + n,), line.rank, dtype=torch.uint8) for n in sizes[line.rank]
    ]
    _, unequal = line.swap(
        line.header(QUESTION, 2), outgoing, [sizes[j][line.rank] for j in range(line.size)]
    )
    vectors = [
        (torch.randn(3001, generator=generator), "fp32"),
        (torch.randn(5000, generator=generator), "int8"),
    ]
    means = reduce(
        line, header, vectors, [[1.0] * line.size, [float(j + 1) for j in range(line.size)]]
    )
    counts = {k: v for k, v in vars(line.meter).items() if not k.startswith("seconds")}
    return (
        [t.tolist() for t in (*bodies, *means)],
        [[len(t), *set(t.tolist())] for t in unequal],
        counts,
    )


@pytest.mark.parametrize("count", [2, 3])
def test_connections_change_neither_a_bit_nor_a_count(run_ranks, everywhere, count) -> None:
    everywhere.setattr(peers, "PIECE", 1000)

    def run(me: Any) -> None:
        one, several = (on_lines(exchanges, count, connections) for connections in (1, 3))
        assert one == several
        for (rows, unequal, counts), first in zip(one, [one[0]] * count, strict=True):
            assert rows == first[0]  # bit-equal on all ranks
            assert (
                counts["messages"] == 4 and counts["bytes_sent"] > 0 and counts["setup_bytes"] == 0
            )
            assert len(unequal) == count
        assert [row[1] for row in one] == [
            [[n, j] if (n := 700 * j + 1300 * i) else [0] for j in range(count)]
            for i in range(count)
        ]  # sizes and senders

    run_ranks(run, 1, 1)


def test_receives_are_posted_before_sends_and_pieces_take_turns(run_ranks, everywhere) -> None:
    everywhere.setattr(peers, "PIECE", 1000)

    def watched(line: PeerGroup) -> list[tuple[str, int, int]]:
        notes: list[tuple[str, int, int]] = []
        line.group, line.more = (
            Noting(line.group, notes),
            [Noting(g, notes, k + 1) for k, g in enumerate(line.more)],
        )
        line.all_gather(torch.zeros(2500, dtype=torch.uint8))
        return notes

    def run(me: Any) -> None:
        for rank, notes in enumerate(on_lines(watched, 3, connections=2)):
            others = [j for j in range(3) if j != rank]
            assert notes == [
                (what, j, k) for what in ("recv", "send") for j in others for k in (0, 1, 0)
            ]

    run_ranks(run, 1, 1)


def test_how_many_connections_follows_from_the_round_trip() -> None:
    assert [streams(s, 1) for s in (0.0, 0.0125, 0.0205, 0.03, 0.0503, 0.1005, 1.0)] == [
        1,
        1,
        1,
        2,
        4,
        8,
        peers.STREAMS,
    ]


def test_all_peers_together_have_a_budget_of_connections() -> None:
    for islands in (2, 3, 5, 8, 16, 24, 32, 48, 128):
        count = streams(1.0, islands - 1)
        assert count == 1 or count * (islands - 1) <= peers.BUDGET
    assert streams(1.0, 4) == peers.STREAMS and streams(1.0, 31) == 1


@pytest.mark.parametrize("late, expected", [(0.0, 1), (0.06, 4)])
def test_all_ranks_take_the_longest_round_trip_that_one_has_seen(run_ranks, late, expected) -> None:
    """One rank's clock sees a longer way than those of the others (which here are near): all open
    the same number.
    """

    def widened(line: PeerGroup) -> tuple[list[int], int, int]:
        if line.rank == 1 and late:
            whole = line.all_gather

            def slow(data: torch.Tensor) -> list[torch.Tensor]:
                out = whole(data)
                if data.numel() == 1:
                    time.sleep(late)  # after the others have what they need
                return out

            line.all_gather = slow  # type: ignore[method-assign]
        made: list[int] = []

        def connect(k: int) -> Any:
            made.append(k)
            return line.group

        line.widen(connect)
        return made, len(line.more), line.meter.bytes_sent

    def run(me: Any) -> None:
        outs = on_lines(widened, 3)
        assert all(out == outs[0] for out in outs)
        made, more, sent = outs[0]
        assert more >= expected - 1 and made == list(range(1, more + 1)) and sent == 0

    run_ranks(run, 1, 1)


def test_a_peer_that_goes_is_named_on_any_connection(run_ranks, everywhere) -> None:
    everywhere.setattr(peers, "PIECE", 1000)

    def goes(line: PeerGroup) -> Any:
        line.all_gather(torch.zeros(5000, dtype=torch.uint8))
        if line.rank == 1:
            return "gone"
        return line.all_gather(torch.zeros(5000, dtype=torch.uint8))

    def run(me: Any) -> None:
        left, gone = on_lines(goes, 2, connections=3, timeout=2.0)
        assert gone == "gone" and isinstance(left, PeerLost) and "island 1 (island1)" in str(left)

    run_ranks(run, 1, 1)


@pytest.mark.parametrize("name", ["demo", "diloco"])
def test_training_over_several_connections_is_the_same_training(
    run_ranks, everywhere, name
) -> None:
    """Real islands whose lines open all connections (every round trip counts as long), against one
    connection.
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
        counts = {
            k: v for k, v in exchange.metrics().items() if k.startswith(("bytes", "messages"))
        }
        connections = exchange._peers._num_connections
        exchange.finish()
        return out, counts, connections

    found = []
    for rtt in (1e9, 1e-9):
        everywhere.setattr(peers, "STREAM_RTT", rtt)
        found.append(run_ranks(run, 2, 1))
    for one, several in zip(*found, strict=True):
        assert (one[2], several[2]) == (1, peers.STREAMS) and one[1] == several[1]
        assert all(torch.equal(one[0][n], several[0][n]) for n in one[0])
