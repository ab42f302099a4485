"""Bytes of the planner: those of the library's plan, rank by rank, and of formulas."""

from __future__ import annotations

import pytest

from fsdp_demo import Link, preset, presets, ring_all_reduce_bytes
from fsdp_demo.exchange.plan import plan_model
from fsdp_demo.tools.planner import Situation, equal_layers, load, plan_rows
from fsdp_demo.tools.planner.counting import cycle, releases
from fsdp_demo.tools.planner.models import numel

TINY = load("tiny")
CASES = [(2, 1), (3, 2), (4, 4), (5, 1)]


@pytest.mark.parametrize(("islands", "shards"), CASES)
def test_planner_bytes_of_rows(islands: int, shards: int) -> None:
    """The bytes of a row are those of the library's plans of all ranks, and those of `hsdp` are a
    ring all-reduce in bf16.
    """
    for row in plan_rows(Situation(TINY, islands, Link(1e9, 0.04), shards=shards), presets()):
        plans = plan_model(preset(row.name), TINY, islands, shards)
        assert row.bytes_per_exchange == sum(p.most().bytes_sent for p in plans), row.name
        assert row.bytes_per_step == pytest.approx(sum(p.average()[0] for p in plans)), row.name
    (hsdp,) = plan_rows(Situation(TINY, islands, shards=shards), ["hsdp"])
    assert hsdp.bytes_per_exchange == ring_all_reduce_bytes(islands, 2 * numel(TINY))


@pytest.mark.parametrize("shards", [1, 3, 4])
@pytest.mark.parametrize("name", ["full", "demo", "streaming_diloco", "desloc", "muloco"])
def test_planner_bytes_of_shards(name: str, shards: int) -> None:
    """Equal shards are counted once and added. Against one plan per rank, also where shards are
    unlike (3 do not divide 128).
    """
    config = preset(name)
    plans = plan_model(config, TINY, 3, shards)
    found = cycle(config, TINY, 3, shards)
    sent = [sum(m.bytes_out for m in messages) for messages in found.due.values()]
    assert max(sent) == sum(p.most().bytes_sent for p in plans)
    mean = sum(p.average()[0] for p in plans)
    assert sum(sent) / found.steps == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("name", presets())
def test_planner_bytes_of_legs(name: str) -> None:
    """The legs carry the bytes of the library's plan."""
    other = {"schedule.delay": 2} if preset(name).channels[0].schedule.pure else {"delta": 0.5}
    other = {"period": 3} if preset(name).pairs else other
    for config in (preset(name), preset(name, **other)):
        found = cycle(config, TINY, 3, 2)
        plans = plan_model(config, TINY, 3, 2)
        means = [sum(p.average()[i] for p in plans) for i in (0, 1)]
        messages = [m for sent in found.due.values() for m in sent]
        assert sum(m.bytes_out for m in messages) / found.steps == pytest.approx(means[0])
        assert sum(m.bytes_in for m in messages) / found.steps == pytest.approx(means[1])
        assert all(len(m.legs) in (1, 2) and m.delay in (0, 2, 5) for m in messages)


def test_planner_bytes_of_given_size() -> None:
    """A given size per parameter moves as in a ring all-reduce."""
    tensors = equal_layers(10_000_000, 8)
    assert numel(tensors) == 10_000_000
    for islands in (2, 5):
        found = cycle(preset("full"), tensors, islands, 1, 0.5)
        (message,) = found.due[0]
        assert message.bytes_out == pytest.approx(
            ring_all_reduce_bytes(islands, 5_000_000), abs=islands
        )


def test_planner_bytes_of_fragments() -> None:
    """Each fragment of Streaming DiLoCo is a message of its own."""
    tensors = equal_layers(24_000_000, 24)
    found = cycle(preset("streaming_diloco", period=100), tensors, 2, 1, 2.0)
    assert sorted(found.due) == [int(p * 100 / 8 - 1) % 100 for p in range(1, 8)] + [99]
    assert {round(m.bytes_out) for sent in found.due.values() for m in sent} == {2 * 3_000_000}


def test_planner_backward_releases() -> None:
    """The share of a message that backward has ready follows from the layers."""
    tensors = [("embed", (8, 2)), ("layers.0.w", (4, 2)), ("layers.1.w", (4, 2)), ("head", (8, 2))]
    assert releases(tensors, tensors) == ((0.5, 0.5), (0.5, 0.0))  # head with layer 1, embed with 0
    assert releases(tensors[1:2], tensors) == ((1.0, 0.0),)
    assert releases(tensors[2:3], tensors) == ((1.0, 0.5),)
    assert releases([("w", (3,))], [("w", (3,))]) == ((1.0, 0.0),)
