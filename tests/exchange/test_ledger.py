"""Bytes by channel against those that the processes really hand to their group, piece by piece; the
kept energy against norms of what was sent.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo.peers.header import HEADER

from ..support import threaded
from ..support.inside import in_ranks
from ..support.small import Noise, same

CASES: list[tuple[str, dict[str, Any]]] = [
    ("demo", {}), ("full", {}), ("full", {"value_dtype": "bf16"}), ("random", {}),
    ("diloco", {"period": 2}), ("local_adam", {"period": 2}), ("sparse_loco", {"period": 2}),
    ("sign_loco", {"period": 2}), ("streaming_diloco", {"period": 2, "layers": 1, "delay": 1}),
]  # fmt: skip


def trained(islands: int, preset: str, changes: dict[str, Any], look: Any) -> Any:
    """look(exchange, tap) on each island after four steps."""
    config = fsdp_demo.preset(preset, **changes)

    def island(i: int, topology: fsdp_demo.Topology) -> Any:
        made = Noise(topology, config, adamw=config.inner_optimizers[0] != "sgd")
        made.exchange.watch_energy()
        tap = threaded.Tap(made.exchange)
        for _ in range(4):
            made.exchange.report(tokens=7, loss=1.0)
            made.step()
        made.exchange.flush()
        found = look(made.exchange, tap)
        made.exchange.finish()
        return found

    return threaded.values(threaded.islands(island, islands))


@pytest.mark.parametrize(("preset", "changes"), CASES)
@pytest.mark.parametrize("islands", [2, 3])
@in_ranks(1, 1)
def test_ledger_rows_hold_all_bytes(preset: str, changes: Any, islands: int) -> None:
    """The rows of the ledger hold all bytes that a process hands to its group."""

    def look(exchange: Any, tap: Any) -> None:
        page, metrics = exchange.ledger(), exchange.metrics()
        channels, sent = [c.channel for c in exchange.channels], page.total.sent
        assert sent == metrics["bytes_sent"] == sum(n for _, n in tap.all_left())
        assert page.total.received == metrics["bytes_received"]
        assert page.headers.sent == HEADER.size * len(tap.sent) and 0 < page.headers.sent < sent
        # which tensors had a gradient: one byte to each other island, and nothing else
        steps = sum(e.applied >= 0 for e in exchange.timeline())
        early = any(c.before_step for c in channels)
        assert page.other.sent == (steps * (islands - 1) if early else 0)
        assert set(page.channels) == {c.name for c in channels}
        assert all(m.sent for m in page.channels.values())
        assert sum(e.sent for e in exchange.timeline()) == sent

    trained(islands, preset, changes, look)


@pytest.mark.parametrize(("preset", "changes"), [("demo", {}), ("sparse_loco", {"period": 2})])
@in_ranks(1, 1)
def test_kept_energy_of_topk(preset: str, changes: Any) -> None:
    """The kept energy of a top-k selection is that of the values it sends. Of exact values: the
    largest squares of the block over all of them.
    """
    names = {"codec.value_dtype": "fp32", "codec.topk": 16, "codec.transform": "none"}
    config = fsdp_demo.preset(preset, **changes, **names)

    def island(i: int, topology: fsdp_demo.Topology) -> None:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = fsdp_demo.base_optimizer(config, [("weight", weight)], lr=1e-3)
        exchange = fsdp_demo.attach(optimizer, config, topology=topology)
        assert exchange.kept_energy() == {}
        exchange.watch_energy()
        encoded: list[torch.Tensor] = []
        (channel,) = exchange.channels
        plain = channel.section.encode

        def noted(work: torch.Tensor, step: int) -> Any:
            encoded.append(work.clone())
            return plain(work, step)

        channel.section.encode = noted
        for t in range(4):
            draw = torch.Generator().manual_seed(t + 9 * i)
            weight.grad = torch.randn(64, 64, generator=draw)
            optimizer.step()
        (kept,) = exchange.kept_energy().values()
        exchange.finish()
        squares = encoded[-1].double().square().flatten()
        assert kept == pytest.approx(float(squares.topk(16).values.sum() / squares.sum()), rel=1e-4)

    threaded.values(threaded.islands(island))


@in_ranks(1, 1)
def test_kept_energy_of_dense() -> None:
    """The kept energy of a dense channel is 1 in fp32 and less in coarser codes."""

    def kept(code: str) -> dict[str, float]:
        changes = {"period": 2, "value_dtype": code}
        return trained(2, "diloco", changes, lambda exchange, tap: exchange.kept_energy())[0]

    assert kept("fp32") == {"delta": 1.0}
    assert 1.0 > kept("bf16")["delta"] > 1 - 2**-15 > kept("int4")["delta"] > 0.9


@in_ranks(1, 1)
def test_kept_energy_changes_no_bit() -> None:
    """Watching the kept energy changes no bit of the training."""

    def weights(exchange: Any, tap: Any) -> Any:
        return [p.detach().clone() for p in exchange.host.tensors("parameter")]

    watched = trained(2, "demo", {}, weights)
    plain = fsdp_demo.Exchange.watch_energy
    fsdp_demo.Exchange.watch_energy = lambda self, on=True: None
    try:
        other = trained(2, "demo", {}, weights)
    finally:
        fsdp_demo.Exchange.watch_energy = plain
    assert same(watched, other)
