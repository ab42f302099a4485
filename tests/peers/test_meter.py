"""The meter: what an exchange hands over to the connections, counted to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.compression import sparse
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.elastic import chunks

from ..support import threaded
from ..support.cases import named
from ..support.inside import in_ranks
from ..support.threaded import Tap, values

OURS = {"period": 3, "inner_optimizers": "as_is"}
METERED = {
    "full": (preset("full"), 1),
    "demo": (preset("demo"), 1),
    "diloco-bf16": (preset("diloco", value_dtype="bf16", **OURS), 3),
    "diloco-int8": (preset("diloco", value_dtype="int8", **OURS), 3),
    "consensus": (preset("decoupled_momentum", transform=True, value_dtype="bf16", **OURS), 3),
    "released": (preset("decoupled_momentum", transform=True, rule="released", **OURS), 3),
    "delayed": (preset("demo", **{"schedule.delay": 2}), 1),
}


def metered(config: fsdp_demo.ExchangeConfig, count: int, steps: int = 7) -> list[Any]:
    def island(i: int, topology: fsdp_demo.Topology) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.Linear(130, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology)
        before, tap = exchange.metrics(), Tap(exchange)

        def to(rank: int) -> int:
            return sum(n for r, n in tap.all_left() if r == rank)

        for t in range(steps):
            for p in model.parameters():
                p.grad = torch.full_like(p, float(i - t))
            optimizer.step()
        exchange.flush()
        assert exchange.peers.wait_read(10.0)  # what is counted has left
        out = exchange.metrics(), before, [to(r) for r in range(count)], len(tap.all_left())
        due = config.channels[0].schedule.due(steps - 1)
        assert exchange.digests_equal() == config.equal_after_exchange or not due
        after = exchange.metrics()
        assert all(after[name] == out[0][name] for name in ("bytes_sent", "messages"))
        told = sum(map(to, range(count))) - sum(out[2])
        assert after["setup_bytes"] - before["setup_bytes"] == told
        exchange.finish()
        return out

    return values(threaded.islands(island, count))


@pytest.mark.parametrize("piece", [None, 1000])
@in_ranks(1, 1)
def test_meter_counts_to_the_byte(piece) -> None:
    """The meter counts what is handed over to the connections, to the byte."""
    if piece:
        chunks.LARGEST = piece
    for name, (config, period) in METERED.items():
        for count in (2, 3):
            results = metered(config, count)
            for i, (after, before, sent, sends) in enumerate(results):
                received = sum(r[2][i] for r in results)
                legs = 1 if config.channels[0].codec.sparse else 3
                with named(name):
                    assert before["bytes_sent"] == before["messages"] == before["exchanges"] == 0
                    assert after["bytes_sent"] == sum(sent)
                    assert after["bytes_received"] == received > 0
                    assert after["exchanges"] == 7 // period
                    assert after["messages"] == legs * (7 // period)
                    assert piece or sends == after["messages"] * (count - 1)


@in_ranks(1, 1)
def test_meter_sparse_message_follows_the_formula() -> None:
    """A sparse message has a header, one bit per tensor and the section; nothing else is sent, and
    both directions are equal.
    """
    config = METERED["demo"][0]
    layout = Layout([(130, 70), (130,), (3, 130), (3,)], ["transform"] * 4)
    expected = 7 * (56 + 1 + sparse.sparse_bytes(layout, config.channels[0].codec))
    for after, *_ in metered(config, 2):
        assert after["bytes_sent"] == after["bytes_received"] == expected
