"""A saved exchange on another number of islands, shards and copies
(`fsdp_demo/checkpoint/reshard.py`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import pytest
import torch

import fsdp_demo
from fsdp_demo.checkpoint import load_exchange

from ..support import resharded, small
from ..support.resharded import STEP, Form

CHANGES = {  # keep every preset's channels small in time, large in variety
    "streaming_diloco": {"layers": 1, "period": 8, "delay": 3},
    "decoupled_momentum": {"transform": True},
}
PRESETS = [
    *((name, CHANGES.get(name, {})) for name in fsdp_demo.presets()),
    ("demo", {"version": 2}),
    ("demo", {"reducer.mean_over": "replicas"}),
    ("decoupled_momentum", {"rule": "released", "average_every": 2, "transform": True}),
    ("muloco", {"value_dtype": "fp32"}),
    ("diloco", {"eager": 2}),
    ("sparse_loco", {"codec.select": "threshold"}),
]
MOVES = [
    (Form(2, 2), Form(2, 1)),
    (Form(2, 2), Form(2, 4)),
    (Form(2, 1), Form(2, 2)),
    (Form(2, 2), Form(2, 1, 2)),  # FSDP2 -> unsharded copies
    (Form(2, 1, 3), Form(2, 2)),  # and back
    (Form(2, 2, 2), Form(2, 4)),  # HSDP inside the island
    (Form(2, 3), Form(2, 2)),
]
# all that a channel may keep
THOROUGH = [
    (n, CHANGES.get(n, {})) for n in ("demo", "decoupled_momentum", "desloc", "streaming_diloco")
]
CASES = [
    pytest.param(*preset, *move, marks=() if n % 4 == 0 or preset in THOROUGH else pytest.mark.slow)
    for n, move in enumerate(MOVES)
    for preset in PRESETS
]


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small parts: waiting for the disk would take half of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def config(name: str, changes: dict) -> fsdp_demo.ExchangeConfig:
    return fsdp_demo.preset(name, **changes)


def moved(saved: list, to: Form, conf: fsdp_demo.ExchangeConfig, folder, **options) -> list[list]:
    """Ranks of the new form, each with the state that it goes on with, from its island's own
    folder, or that of island 0.
    """
    folders = resharded.save(saved, folder)
    ranks = resharded.all_ranks(conf, to, fill=False, **options)
    for i, island in enumerate(ranks):
        found = load_exchange(folders[i if i < len(folders) else 0])
        for rank in island:
            rank.state = found.state_for(rank)
    return ranks


def as_saved(rank, island: int) -> None:
    """Each workspace of a rank has its parts of what the island has saved."""
    for c in rank.channels:
        channel, got = c.channel.name, rank.state["channels"][c.channel.name]
        names = [c.host.params[j].name for j in c.covered]
        assert set(got) == {"present", *c.state().workspaces}
        for key in c.state().workspaces:
            wanted = {n: resharded.value(island, channel, key, n) for n in names}
            same(got[key], resharded.workspace(c, key, wanted), key)


def same(got: torch.Tensor, wanted: torch.Tensor, key: str) -> None:
    """Bit for bit; accumulators, which are transformed, within 1e-6."""
    assert got.shape == wanted.shape
    if key != "accumulator":
        assert torch.equal(got, wanted), key
    elif got.numel():
        assert (got - wanted).abs().max() <= 1e-6 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("name, changes, before, after", CASES)
def test_resharding_other_shards(name, changes: dict, before: Form, after: Form, tmp_path) -> None:
    """A saved exchange fits another number of shards. Each workspace, which tensors have had a
    gradient, tokens and clock.
    """
    conf = config(name, changes)
    saved = resharded.all_ranks(conf, before)
    for i, island in enumerate(moved(saved, after, conf, tmp_path)):
        for rank in island:
            as_saved(rank, i)
            for c in rank.channels:
                names = [c.host.params[j].name for j in c.covered]
                there = [n != "one" and (n != "tied.weight" or i == 0) for n in names]
                assert rank.state["channels"][c.channel.name]["present"] == there
            assert rank.state["last"] == saved[0][0].state["last"]
            assert rank.state["step"] == STEP
        tokens = sum(rank.state["tokens"][0] for rank in island)
        assert tokens == 100 * (i + 1) * before.shards * before.copies


@pytest.mark.parametrize("after", [Form(1, 2), Form(3, 2)])
@pytest.mark.parametrize("name, changes", PRESETS)
def test_resharding_other_islands(name: str, changes: dict, after: Form, tmp_path) -> None:
    """A saved exchange fits another number of islands. An island goes on with its own,
    bit for bit.
    """
    conf, kept = config(name, changes), ("channels", "last", "step", "tokens")
    saved = resharded.all_ranks(conf, Form(2, 2))
    for old, new in zip(saved, moved(saved, after, conf, tmp_path), strict=False):
        for a, b in zip(old, new, strict=True):
            assert [key for key in kept if not small.same(a.state[key], b.state[key])] == []


@pytest.mark.parametrize("name, changes", PRESETS)
def test_resharding_other_parameter_order(name: str, changes: dict, tmp_path) -> None:
    """Parameters in another order are found by name."""
    conf, form = config(name, changes), Form(1, 2)
    for rank in moved(resharded.all_ranks(conf, form), form, conf, tmp_path, backwards=True)[0]:
        as_saved(rank, 0)


@pytest.mark.parametrize("before, after", [(Form(2, 2), Form(2, 3)), (Form(2, 3), Form(2, 2))])
def test_resharding_flattened_stretches(before: Form, after: Form, tmp_path) -> None:
    """Stretches of flattened tensors, as ZeRO has them, are put together: cut anywhere, several of
    one tensor on a rank or none.
    """
    conf = config("diloco", {})
    saved = resharded.all_ranks(conf, before, flat=True)
    for i, island in enumerate(moved(saved, after, conf, tmp_path, flat=True)):
        for rank in island:
            as_saved(rank, i)


DELAYED = [
    ("full", {"schedule.delay": 2}),
    ("demo", {"schedule.delay": 2}),
    ("streaming_diloco", {"layers": 1, "period": 8, "delay": 3}),
    ("diloco", {"period": 4, "schedule.delay": 6}),
]


@pytest.mark.parametrize("name, changes", DELAYED)
@pytest.mark.parametrize("after", [Form(2, 1), Form(3, 2)])
def test_resharding_drops_messages_in_flight(name, changes, after: Form, tmp_path, caplog) -> None:
    """Messages in flight are dropped with other numbers of islands or shards, and the log
    says so.
    """
    conf = config(name, changes)
    saved = resharded.all_ranks(conf, Form(2, 2))
    resharded.launch(saved, 11)
    (flight,) = saved[0][0].state["in_flight"]
    with caplog.at_level(logging.INFO, "fsdp_demo"):
        new = moved(saved, after, conf, tmp_path)
    assert "messages in flight (steps [12]) are dropped" in caplog.text
    for rank in (r for island in new for r in island):
        assert rank.state["in_flight"] == [] and "history" not in rank.state
        assert all(rank.state["last"][channel] == -1 for channel in flight["parts"])
    (same,) = moved(saved[:1], Form(2, 2), conf, tmp_path / "same")[:1]
    assert all(len(rank.state["in_flight"]) == 1 for rank in same)


@pytest.mark.parametrize("shards", [2, 1])
def test_resharding_mesh_of_other_replicas(shards: int, tmp_path, caplog) -> None:
    """A mesh with another number of replicas goes on. All take what they share from the first one;
    what a replica has to itself begins anew.
    """
    conf = config("decoupled_momentum", {"rule": "released", "average_every": 2})
    folders = resharded.save(resharded.all_ranks(conf, Form(2, 2)), tmp_path)
    form = Form(3, shards)
    with caplog.at_level(logging.INFO, "fsdp_demo"):
        for rank in (resharded.make(conf, form, i, p) for i in range(3) for p in form.places(i)):
            state = load_exchange(folders[0].parent).state_for(rank)
            for c in rank.channels:
                kept = state["channels"][c.channel.name]
                assert not kept.get("accumulator", torch.zeros(1)).any()
                if c.channel.source == "delta" and c.channel.applier.local_delta:
                    assert torch.equal(kept["anchor"], c.pack("parameter"))
    assert (
        "state of 2 x 2 shards x 1 copy (islands x shards x copies) taken over by 3" in caplog.text
    )


def test_resharding_errors(tmp_path) -> None:
    """A missing part, another preset and other settings are refused."""
    conf, place = config("diloco", {}), Form(2).places(0)[0]
    (folder, _) = resharded.save(resharded.all_ranks(conf, Form(2, 2)), tmp_path)

    def refused(said: str, rank) -> None:
        with pytest.raises(ValueError, match=said):
            load_exchange(folder).state_for(rank)

    other = resharded.make(config("demo", {}), Form(2), 0, place)
    refused("was saved by preset 'diloco', this run has 'demo'", other)
    other = resharded.make(config("diloco", {"momentum": 0.0}), Form(2), 0, place)
    kept = r"saved state has \['anchor', 'momentum'\], this configuration keeps \['anchor'\]"
    refused(kept, other)
    rank = resharded.make(conf, Form(2), 0, place)
    first = rank.host.params[0]
    rank.host.params[0] = replace(first, shape=(124, 61))
    refused(r"layers.0.weight of shape \(124, 122\) lies as \(124, 61\)", rank)
    rank.host.params[0] = first
    (folder / "rank1.json").unlink()
    refused("lacks the part of island 0, rank 1", rank)


def test_resharding_low_precision_parameters(tmp_path) -> None:
    """bf16 parameters keep `written` beside the anchor."""
    conf, bf16 = config("diloco", {}), {"dtype": torch.bfloat16}
    saved = resharded.all_ranks(conf, Form(1, 2), **bf16)
    ((rank,),) = moved(saved, Form(1), conf, tmp_path, **bf16)
    assert "written" in rank.state["channels"]["delta"]
    as_saved(rank, 0)
