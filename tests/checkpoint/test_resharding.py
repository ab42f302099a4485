"""A saved exchange on another number of islands, shards and copies
(`fsdp_demo/checkpoint/reshard.py`).
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace

import pytest
import torch

import fsdp_demo
from fsdp_demo.channels.channel import Received
from fsdp_demo.checkpoint import load_exchange
from fsdp_demo.checkpoint.reshard import convert, shares
from fsdp_demo.config.patterns import tensor_layout_kind

from ..oracles import resharding as oracle
from ..support import resharded
from ..support.resharded import SHAPES, Form
from ..support.transforms import transform

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
]
MOVES = [
    (Form(2, 2), Form(3, 1)),
    (Form(2, 2), Form(1, 2)),
    (Form(2, 2), Form(2, 1)),
    (Form(2, 2), Form(2, 4)),
    (Form(2, 1), Form(2, 2)),
    (Form(2, 2), Form(2, 1, 2)),  # FSDP2 -> unsharded copies
    (Form(2, 1, 3), Form(1, 2)),  # and back, an island fewer
    (Form(3, 2), Form(2, 2)),
    (Form(2, 2, 2), Form(2, 4)),  # HSDP inside the island
]


# all that a channel may keep
THOROUGH = [
    (n, CHANGES.get(n, {})) for n in ("demo", "decoupled_momentum", "desloc", "streaming_diloco")
]
CASES = [
    pytest.param(
        name,
        changes,
        before,
        after,
        marks=() if number % 4 == 0 or (name, changes) in THOROUGH else pytest.mark.slow,
    )
    for number, (before, after) in enumerate(MOVES)
    for name, changes in PRESETS
]


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small parts: waiting for the disk would take half of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def config(name: str, changes: dict) -> fsdp_demo.ExchangeConfig:
    return fsdp_demo.preset(name, **changes)


def converted(saved: list, to: Form, conf: fsdp_demo.ExchangeConfig, folder) -> list[list]:
    """Ranks of the new form, each with its converted state."""
    found = load_exchange(*resharded.save(saved, folder))
    ranks = resharded.all_ranks(conf, to, fill=False)
    for rank in (r for island in ranks for r in island):
        rank.state = convert(found, rank)
    return ranks


def kept(ranks: list, channel: str, key: str) -> list[dict[str, torch.Tensor]]:
    return resharded.tensors(ranks, channel, lambda r: r.state["channels"][channel][key])


def near(got: torch.Tensor, wanted: torch.Tensor, bound: float = 1e-6) -> None:
    assert got.shape == wanted.shape
    if got.numel():
        assert (got - wanted).abs().max() <= bound * max(1.0, float(wanted.abs().max())), float(
            (got - wanted).abs().max()
        )


@pytest.mark.parametrize(
    "saved, islands", [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2), (5, 3), (3, 7)]
)
def test_shares_keep_the_mean(saved: int, islands: int) -> None:
    rows = [[row.get(j, 0.0) for j in range(saved)] for row in shares(range(saved), islands)]
    wanted = oracle.weights(saved, islands)
    for row, expected in zip(rows, wanted, strict=True):
        assert row == pytest.approx(expected) and sum(row) == pytest.approx(1.0)
    assert [sum(column) for column in zip(*rows, strict=True)] == pytest.approx(
        [islands / saved] * saved
    )


def test_shares_of_islands_that_are_left() -> None:
    """An island keeps its own by its number; one whose number is gone continues in a free place."""
    assert shares([0, 2], 3) == [{0: 1.0}, {0: 0.5, 2: 0.5}, {2: 1.0}]
    assert shares([0, 2], 2) == [{0: 1.0}, {2: 1.0}]
    assert shares([1], 2) == [{1: 1.0}, {1: 1.0}]


@pytest.mark.parametrize("name, changes, before, after", CASES)
def test_every_preset(name: str, changes: dict, before: Form, after: Form, tmp_path) -> None:
    """Each workspace against the dense oracle; presence, tokens and clock."""
    conf = config(name, changes)
    saved = resharded.all_ranks(conf, before)
    new = converted(saved, after, conf, tmp_path)
    rows = oracle.weights(before.islands, after.islands)
    for c in saved[0][0].channels:
        channel, settings = c.channel.name, c.channel
        for key in sorted(c.state().workspaces):
            old = [kept(island, channel, key) for island in saved]
            for i, island in enumerate(new):
                got = kept(island, channel, key)
                for n in got[0]:
                    blocks = tensor_layout_kind(settings, n) if key == "accumulator" else "dense"
                    parts = [[shard[n] for shard in of] for of in old]
                    senders = key == "accumulator" and settings.reducer.mean_over == "senders"
                    wanted = oracle.accumulator(
                        parts, blocks, i, after.islands, after.shards, senders
                    )
                    for shard, expected in zip(got, wanted, strict=True):
                        near(shard[n], expected)
        for i, island in enumerate(new):
            present = island[0].state["channels"][channel]["present"]
            names = [c.host.params[j].name for j in c.covered]
            assert present == [n != "one" and (n != "tied.weight" or rows[i][0] > 0) for n in names]
    for i, island in enumerate(new):
        each = [100 * (j + 1) * before.shards * before.copies for j in range(before.islands)]
        tokens = sum(rank.state["tokens"][0] for rank in island)
        assert tokens == round(sum(w * t for w, t in zip(rows[i], each, strict=True)))
        assert all(
            rank.state["last"] == saved[0][0].state["last"] and rank.state["step"] == resharded.STEP
            for rank in island
        )


@pytest.mark.parametrize("islands, noted", [(1, [[0.0, 1.0]]), (3, [[0.0], [1.0], [0.0, 1.0]])])
def test_losses_since_the_last_exchange_go_on(islands: int, noted: list, tmp_path) -> None:
    conf = config("diloco", {})
    saved = resharded.all_ranks(conf, Form(2, 2))
    for i, island in enumerate(saved):
        for rank in island:
            rank.state["losses"] = [0.5 if islands == 1 else math.nan, [float(i)]]
    for island, losses in zip(
        converted(saved, Form(islands, 1), conf, tmp_path), noted, strict=True
    ):
        for loss, since in (rank.state["losses"] for rank in island):
            assert since == losses and (loss == 0.5 if islands == 1 else math.isnan(loss))


@pytest.mark.parametrize("after", [Form(1, 2), Form(3, 2), Form(4, 2), Form(4, 1), Form(3, 2, 2)])
@pytest.mark.parametrize(
    "name, changes", [("random", {}), ("muloco", {}), ("decoupled_momentum", {"rule": "released"})]
)
def test_divisor_replicas_keeps_the_mean_exactly(
    name: str, changes: dict, after: Form, tmp_path
) -> None:
    """Values are multiples of 2^-18, not transformed: the islands' sum over their number is the
    same number.
    """
    conf, before = config(name, changes), Form(2, 2)
    saved = resharded.all_ranks(conf, before)
    new = converted(saved, after, conf, tmp_path)
    for c in (c.channel for c in saved[0][0].channels if c.accumulator is not None):
        assert c.reducer.mean_over == "replicas"
        for n in SHAPES:
            sums = []
            for ranks in (saved, new):
                whole = [
                    torch.cat([shard[n] for shard in kept(island, c.name, "accumulator")]).double()
                    for island in ranks
                ]
                sums.append(torch.stack(whole).sum(0))
            assert torch.equal(sums[0] * after.islands, sums[1] * before.islands)


@pytest.mark.parametrize("name", ["demo", "sparse_loco"])
def test_divisor_senders_is_carried_over_and_reported(name: str, tmp_path, caplog) -> None:
    conf = config(name, {"transform": False} if name == "demo" else {})
    saved = resharded.all_ranks(conf, Form(2, 2))
    channel = saved[0][0].channels[0].channel.name
    with caplog.at_level(logging.WARNING, "fsdp_demo"):
        new = converted(saved, Form(3, 2), conf, tmp_path)
    assert (
        "accumulators of 2 islands go to 3, their mean over the islands falls by 33 %"
        in caplog.text
    )
    for old, island in zip(saved, new, strict=False):  # the two that were there: bit for bit
        for a, b in zip(old, island, strict=True):
            assert torch.equal(
                a.state["channels"][channel]["accumulator"],
                b.state["channels"][channel]["accumulator"],
            )
    third = kept(new[2], channel, "accumulator")
    dense, mean = (
        third[0]["layers.1.bias"],
        sum(kept(i, channel, "accumulator")[0]["layers.1.bias"] for i in saved) / 2,
    )
    assert not third[0]["layers.1.weight"].any() and torch.equal(dense, mean)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fsdp_demo"):
        converted(saved, Form(1, 2), conf, tmp_path / "fewer")
    assert "go to 1, their sum over the islands falls by 50 %, their mean stays" in caplog.text


@pytest.mark.parametrize("name, changes", PRESETS)
def test_there_and_back(name: str, changes: dict, tmp_path) -> None:
    """2 shards -> 1 -> 2 is what it was, within 1e-6; what is not transformed, and what lies as it
    lay, bit for bit.
    """
    conf = config(name, changes)
    saved = resharded.all_ranks(conf, Form(2, 2))
    back = converted(
        converted(saved, Form(2, 1), conf, tmp_path / "a"), Form(2, 2), conf, tmp_path / "b"
    )
    worst = 0.0
    for old, new in zip((r for i in saved for r in i), (r for i in back for r in i), strict=True):
        for channel, state in old.state["channels"].items():
            for key, work in state.items():
                got = new.state["channels"][channel][key]
                if key == "present":
                    assert got == work
                elif key == "accumulator":
                    near(got, work)
                    worst = max(worst, float((got - work).abs().max() / work.abs().max()))
                else:
                    assert torch.equal(got, work), (channel, key)
    print(f"{name}: largest difference {worst:.2g} of the largest coefficient")


@pytest.mark.parametrize("name, changes", PRESETS)
@pytest.mark.parametrize(
    "before, after",
    [(Form(2, 2), Form(2, 2)), (Form(2, 1, 3), Form(2, 1)), (Form(2, 2), Form(2, 2, 2))],
)
def test_same_shards_bit_for_bit(
    name: str, changes: dict, before: Form, after: Form, tmp_path
) -> None:
    """Equal local tensors: no transform, whatever the active copies."""
    conf = config(name, changes)
    saved = resharded.all_ranks(conf, before)
    new = converted(saved, after, conf, tmp_path)
    for i in range(2):
        for c in saved[0][0].channels:
            for key in c.state().workspaces:
                for a, b in zip(
                    kept(saved[i], c.channel.name, key),
                    kept(new[i], c.channel.name, key),
                    strict=True,
                ):
                    assert all(torch.equal(a[n], b[n]) for n in a)


DELAYED = [
    ("full", {"schedule.delay": 2}),
    ("demo", {"schedule.delay": 2}),
    ("stride", {"schedule.delay": 2, "value_dtype": "int8"}),
    ("local_sgd", {"period": 4, "schedule.delay": 2}),
    ("streaming_diloco", {"layers": 1, "period": 8, "delay": 3}),
    ("diloco", {"period": 4, "schedule.delay": 6}),
    ("muloco", {"period": 4, "schedule.delay": 2}),
    ("diloco", {"period": 4, "schedule.delay": 2, "applier.keep_steps": True}),
]


@pytest.mark.parametrize("name, changes", DELAYED)
@pytest.mark.parametrize(
    "before, after",
    [MOVES[0], (Form(2, 2), Form(1, 4)), (Form(2, 1, 2), Form(2, 2)), (Form(2, 2), Form(3, 2))],
)
def test_what_is_under_way(name: str, changes: dict, before: Form, after: Form, tmp_path) -> None:
    """The mean that has arrived, in elements, is the same under the new layout; own parts are
    mixed; a second conversion keeps it.
    """
    conf = config(name, changes)
    saved = resharded.all_ranks(conf, before)
    resharded.launch(saved, 11)
    new = converted(saved, after, conf, tmp_path / "a")
    again = converted(new, before, conf, tmp_path / "b")
    rows = oracle.weights(before.islands, after.islands)
    for c in saved[0][0].channels:
        channel, blocks = c.channel.name, {n: tensor_layout_kind(c.channel, n) for n in SHAPES}
        wanted = resharded.tensors(saved[0], channel, lambda r: _mean(r, channel))  # noqa: B023
        for ranks in (*new, *again):
            got = resharded.tensors(
                ranks,
                channel,
                lambda r, channel=channel: r.state["in_flight"][0]["arrived"]["decoded"][channel],
            )
            for n in wanted[0]:
                near(
                    oracle.whole([s[n] for s in got], blocks[n]),
                    oracle.whole([s[n] for s in wanted], blocks[n]),
                    2e-6,
                )
        part = saved[0][0].state["in_flight"][0]["parts"][channel]
        for i, ranks in enumerate(new):
            mine = ranks[0].state["in_flight"][0]["parts"][channel]
            assert (mine["present"] is None) == (part["present"] is None) and (
                mine["own"] is None
            ) == (part["own"] is None)
            if mine["present"] is not None:
                assert mine["present"] == part["present"]  # the union is that of island 0
            if part["own"] is not None:
                old = [
                    resharded.tensors(
                        r,
                        channel,
                        lambda r, channel=channel: r.state["in_flight"][0]["parts"][channel]["own"],
                    )
                    for r in saved
                ]
                own = resharded.tensors(
                    ranks,
                    channel,
                    lambda r, channel=channel: r.state["in_flight"][0]["parts"][channel]["own"],
                )
                for n in own[0]:
                    near(
                        torch.cat([s[n] for s in own]),
                        oracle.mixed([torch.cat([s[n] for s in o]) for o in old], rows[i]),
                    )


def _mean(rank, channel: str) -> torch.Tensor:
    """The mean of what arrived on a saved rank, by the channel itself."""
    flight = rank.state["in_flight"][0]
    members = [c for c in rank.channels if c.channel.name in flight["members"]]
    bits = (sum(len(c.present) for c in members if c.channel.before_step) + 7) // 8
    c = next(c for c in members if c.channel.name == channel)
    before = members[: members.index(c)]
    begin = bits + sum(m.section.num_bytes for m in before)
    at = sum(len(m.section.spans) for m in before if not m.section.gathered)
    bodies = [b[begin : begin + c.section.num_bytes] for b in flight["arrived"]["bodies"]]
    means = [m.clone() for m in flight["arrived"]["means"][at : at + len(c.section.spans)]]
    return c.mean(Received(bodies, means, [1.0] * len(bodies)), flight["step"]).clone()


@pytest.mark.parametrize(
    "name, changes",
    [("demo", {"schedule.delay": 2}), ("muloco", {"period": 4, "schedule.delay": 2})],
)
def test_what_did_not_arrive_everywhere_is_taken_back(
    name: str, changes: dict, tmp_path, caplog
) -> None:
    conf = config(name, changes)
    saved = resharded.all_ranks(conf, Form(2, 2))
    before = [[r.channels[0].accumulator.clone() for r in island] for island in saved]
    resharded.launch(saved, 11)
    channel = saved[0][0].channels[0].channel.name
    with_source = [[a.clone() for a in island] for island in before]
    for i, island in enumerate(saved):
        for s, rank in enumerate(island):
            c = rank.channels[0]
            source = {n: resharded.value(i, channel, "sent", n) for n in SHAPES}
            with_source[i][s] += transform(c.layout, resharded.local(c, c.position, source))
    saved[1][1].state["in_flight"].clear()  # this rank had lost its peer, and taken it back itself
    saved[1][1].state["channels"][channel]["accumulator"].copy_(with_source[1][1])
    with caplog.at_level(logging.WARNING, "fsdp_demo"):
        new = converted(saved, Form(3, 2), conf, tmp_path)
    assert "payloads of steps [11] had not arrived in every part" in caplog.text
    for i, s in ((0, 0), (0, 1), (1, 0), (1, 1)):
        near(new[i][s].state["channels"][channel]["accumulator"], with_source[i][s])
        assert new[i][s].state["in_flight"] == [] and new[i][s].state["last"] == {channel: -1}


def test_an_island_is_lost(tmp_path, caplog) -> None:
    """One island's parts are enough; its own come back, and the user hears of the rest."""
    conf = config("diloco", {})
    folders = resharded.save(resharded.all_ranks(conf, Form(2, 2)), tmp_path)
    rank = resharded.make(conf, Form(1, 1), 0, Form(1).places(0)[0])
    with caplog.at_level(logging.WARNING, "fsdp_demo"):
        state = convert(load_exchange(folders[0]), rank)
    assert (
        "saved by 2 islands, whole and in sight here are those of [0]: nothing of the"
        in caplog.text
    )
    assert "falls by" not in caplog.text
    whole = {n: resharded.value(0, "delta", "anchor", n) for n in SHAPES}
    assert torch.equal(
        state["channels"]["delta"]["anchor"],
        resharded.local(rank.channels[0], rank.channels[0].position, whole),
    )


def test_errors(tmp_path) -> None:
    conf = config("diloco", {})
    folders = resharded.save(resharded.all_ranks(conf, Form(2, 2)), tmp_path)
    rank = resharded.make(conf, Form(1, 1), 0, Form(1).places(0)[0])
    (folders[1] / "rank0.json").unlink()
    (folders[0] / "rank1.json").unlink()
    with pytest.raises(ValueError, match="no island is complete: one has 2 shards x 1"):
        convert(load_exchange(*folders), rank)
    folders = resharded.save(resharded.all_ranks(conf, Form(2, 2)), tmp_path / "other")
    other = resharded.make(config("demo", {}), Form(1, 1), 0, Form(1).places(0)[0])
    with pytest.raises(
        ValueError, match=r"saved channels are \['delta'\], this configuration has \['momentum'\]"
    ):
        convert(load_exchange(*folders), other)
    with pytest.raises(
        ValueError,
        match=r"saved state has \['anchor', 'momentum'\], this configuration keeps \['anchor'\]",
    ):
        convert(
            load_exchange(*folders),
            resharded.make(
                config("diloco", {"momentum": 0.0}), Form(1, 1), 0, Form(1).places(0)[0]
            ),
        )
    rank.host.params[0] = replace(rank.host.params[0], shape=(124, 61))
    with pytest.raises(
        ValueError, match=r"layers.0.weight of shape \(124, 122\) lies here as \(124, 61\)"
    ):
        convert(load_exchange(*folders), rank)


def test_low_precision_parameters(tmp_path) -> None:
    """bf16 parameters keep `written` beside the anchor; it is mixed as the parameters are."""
    conf, form = config("diloco", {}), Form(2, 2)
    saved = [
        [resharded.make(conf, form, i, p, fill=True, dtype=torch.bfloat16) for p in form.places(i)]
        for i in range(2)
    ]
    found = load_exchange(*resharded.save(saved, tmp_path))
    rank = resharded.make(conf, Form(1, 1), 0, Form(1).places(0)[0], dtype=torch.bfloat16)
    state = convert(found, rank)
    whole = {
        n: (resharded.value(0, "delta", "written", n) + resharded.value(1, "delta", "written", n))
        / 2
        for n in SHAPES
    }
    near(
        state["channels"]["delta"]["written"],
        resharded.local(rank.channels[0], rank.channels[0].position, whole),
    )
