"""What must hold for any shapes, number of replicas, k, codec and feedback: hypothesis draws them,
threads play the islands.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_demo
from fsdp_demo import (
    Accumulator,
    Applier,
    Channel,
    Codec,
    ExchangeConfig,
    Reducer,
    SyncSchedule,
    presets,
)
from fsdp_demo.compression import dense, selection
from fsdp_demo.config.names import FORMATS
from fsdp_demo.config.parts import CODES

from ..oracles import dense as slow
from ..oracles import quantise
from ..support import threaded
from ..support.inside import in_ranks
from ..support.layered import Layered
from ..support.sections import whole
from ..support.transforms import transform

quick = settings(deadline=None, max_examples=40, derandomize=True, database=None)

SHAPES = [
    (), (0,), (0, 5), (1,), (7,), (4099,), (50257,), (130, 67), (3, 64, 65), (2, 3, 5), (64, 64),
    (1, 4096), (257, 17),
]  # fmt: skip


class Bag(nn.Module):
    """Parameters of some shapes."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]):
        super().__init__()
        self.bag = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in shapes])


FEEDBACKS = ("subtract", "subtract from deltas", "none", "put_back")
KINDS = [
    (r, c)
    for r in FEEDBACKS
    for c in ("dense", "topk", "seeded")
    if (r, c) != ("put_back", "dense")
]


@st.composite
def channels(draw: st.DrawFn, feedback: str, selection: str) -> Channel:
    """A channel with an accumulator that means something."""
    chosen = draw(st.sampled_from(["random", "stride"])) if selection == "seeded" else selection
    turned = "dct" if chosen != "dense" and draw(st.booleans()) else "none"
    k = draw(st.one_of(st.sampled_from([1, 32, 4095, 4096]), st.integers(1, 4096)))
    source = (
        "delta"
        if feedback == "put_back" or feedback.endswith("deltas")
        else draw(st.sampled_from(["gradient", "delta"]))
    )
    feedback = feedback.split()[0]
    return Channel(
        "any",
        source,
        SyncSchedule(1),
        Accumulator(
            draw(st.sampled_from([0.9, 0.0, 1.0])),
            draw(st.sampled_from([0.3, 1.0])),
            draw(st.sampled_from([0.2, 1.0])),
        ),
        Codec(turned, chosen, k, draw(st.sampled_from(CODES))),
        feedback,
        Reducer(
            draw(st.sampled_from(["replicas", "replicas", "senders"]))
            if chosen == "topk"
            else "replicas"
        ),
        Applier("gradient")
        if source == "gradient"
        else Applier("outer_step", local_delta=feedback == "put_back"),
        uncompressed=("bag.1",) * draw(st.booleans()),
        no_transform=("bag.2",) * draw(st.booleans()),
    )


bags = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4).map(tuple)


def noise(shape: tuple[int, ...], key: tuple[int, ...], scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(shape, generator=generator) * scale


def played(shapes, channel: Channel, replicas, seed, scale, steps=2) -> list[list[dict[str, Any]]]:
    """What each island saw at each step: source, accumulator before and after, and the mean it
    applied (all in the transform domain).
    """

    def island(i: int, topology: fsdp_demo.Topology) -> list[dict[str, Any]]:
        model = Bag(shapes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = fsdp_demo.attach(
            optimizer, ExchangeConfig("any", (channel,)), model=model, topology=topology
        )
        at, seen, history = exchange.channels[0], [], []
        layout = at.layout
        assert layout is not None
        apply = at.apply

        def spy(arrived: Any) -> None:
            seen.append(whole(at.mean(arrived.received, arrived.sent.step)))
            apply(arrived)

        at.apply = spy
        for t in range(steps):
            before = at.accumulator.clone()
            source = [
                noise(p.shape, (seed, t, i, n), scale) for n, p in enumerate(model.parameters())
            ]
            for p, s in zip(model.parameters(), source, strict=True):
                p.grad = s.clone()
            start = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            # lr 1, from the anchor: the delta is the gradient, but for the rounding of the
            # parameters
            if channel.source == "delta":
                source = [a - (a - s) for a, s in zip(start, source, strict=True)]
            work = transform(layout, layout.pack(source, layout.new("cpu")))
            applied = [
                (p if channel.source == "delta" else p.grad).detach().clone()
                for p in model.parameters()
            ]
            history.append(
                {
                    "before": before,
                    "source": work,
                    "after": at.accumulator.clone(),
                    "mean": seen[t],
                    "applied": applied,
                }
            )
        exchange.finish()
        history.append(
            {
                "sent": exchange.metrics()["bytes_sent"],
                "final": [p.detach().clone() for p in model.parameters()],
            }
        )
        return history

    return threaded.values(threaded.islands(island, replicas))


def conserved(history: list[list[dict[str, Any]]], channel: Channel, replicas: int) -> None:
    """Over the replicas: what came in is what was sent plus what is kept. With divisor R what was
    sent is R times the mean that arrived.
    """
    a = channel.accumulator
    for t in range(len(history[0]) - 1):
        steps = [h[t] for h in history]
        came = sum(a.beta * s["before"].double() + a.gain * s["source"].double() for s in steps)
        kept = sum(s["after"].double() for s in steps)
        mean = steps[0]["mean"].double()
        share = {"none": 0.0, "subtract": a.alpha, "put_back": 0.0}[channel.feedback]
        size = (
            sum(s["source"].abs().max() + s["before"].abs().max() for s in steps)
            if came.numel()
            else torch.zeros(())
        )
        gathers = channel.codec.indexed or slow.gathers(channel.codec.value_dtype, replicas)
        back = (
            "fp32"
            if gathers
            else "int8"
            if channel.codec.value_dtype in slow.BYTES
            else channel.codec.value_dtype
        )
        # of what was sent
        taken = {"none": 0.0, "subtract": a.alpha, "put_back": 1.0}[channel.feedback]
        # of the mean on its way back
        rounding = float(quantise.bound(size.reshape(1), back))
        bound = (4e-6 * float(size) + taken * rounding) * replicas
        assert (
            float((kept + share * replicas * mean - came).abs().max() if came.numel() else 0.0)
            <= bound
        )


@pytest.mark.parametrize("feedback, selection", KINDS)
@in_ranks(1, 1, timeout=240)
def test_property_nothing_lost_and_equal_bits(feedback, selection) -> None:
    """No value is lost, and all replicas apply the same bits."""

    @settings(quick, max_examples=6)
    @given(
        bags,
        channels(feedback, selection),
        st.sampled_from([3, 2, 5, 4, 1]),
        st.integers(0, 99),
        st.sampled_from([1.0, 1e-4, 300.0]),
    )
    def holds(shapes, channel, replicas, seed, scale):
        history = played(shapes, channel, replicas, seed, scale)
        for t in range(2):
            first = history[0][t]
            for other in history[1:]:
                assert torch.equal(first["mean"], other[t]["mean"])
                same = all(
                    torch.equal(x, y)
                    for x, y in zip(first["applied"], other[t]["applied"], strict=True)
                )
                assert same or channel.applier.local_delta
        for other in history[1:]:
            assert all(
                torch.equal(x, y)
                for x, y in zip(history[0][-1]["final"], other[-1]["final"], strict=True)
            )
        assert (history[0][-1]["sent"] == 0) == (replicas == 1)
        if channel.reducer.mean_over == "replicas" or replicas == 1:
            conserved(history, channel, replicas)

    holds()


# -- codes ---------------------------------------------------------------------------------------


@quick
@given(
    st.sampled_from(CODES),
    st.one_of(st.sampled_from([0, 1, 2, 4095, 4096, 4097, 8192, 50257]), st.integers(0, 9000)),
    st.integers(1, 5),
    st.integers(0, 999),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e6]),
    st.sampled_from([0.0, 0.5, 0.999]),
)
def test_property_vector_error_bound(code, n, replicas, seed, scale, zeros) -> None:
    """A vector comes back within the documented bound of its code."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(n, generator=generator) * scale * (torch.rand(n, generator=generator) >= zeros)
    data = dense.encode(code, v)
    assert (data.dtype, data.numel()) == (torch.uint8, dense.num_bytes(code, n))
    back = dense.decode(code, data, n)
    assert back.shape == v.shape and back.dtype == torch.float32
    # Cut into the parts of a reduce, or handed over at an odd place in a message, it is the same.
    assert torch.equal(dense.round_trip(code, v, replicas), back)
    assert torch.equal(dense.decode(code, torch.cat([data[:1], data])[1:] if n else data, n), back)
    group = FORMATS[code].group or max(n, 1)
    for row in range(0, n, 4096):
        for at in range(row, min(row + 4096, n), group):
            part = slice(at, min(at + group, row + 4096, n))
            error = (back[part] - v[part]).abs().double()
            assert bool((error <= quantise.bound(v[part], code) * (1 + 1e-5) + 1e-37).all())


# -- positions that follow from the step ---------------------------------------------------------


@quick
@given(
    st.sampled_from(["random", "stride"]),
    st.one_of(st.sampled_from([1, 64, 3712, 4096]), st.integers(1, 4096)),
    st.data(),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_property_seeded_pass_sends_every_row(kind, size, data, count, passes, seed) -> None:
    """Every coefficient is sent in every pass: its ceil(size / k) exchanges send k distinct ones
    each, a pure function of the arguments.
    """
    k = data.draw(st.one_of(st.sampled_from([1, (size + 1) // 2, size]), st.integers(1, size)))
    length = math.ceil(size / k)
    turns = range(passes * length, (passes + 1) * length)
    if length > 64:  # ever-growing passes: some turns of one are enough for what holds for each
        chosen = selection.seeded(kind, size, k, count, turns[length // 2], seed)
        assert all(len(set(row.tolist())) == k for row in chosen)
        return
    sent = torch.zeros(count, size, dtype=torch.int64)
    for turn in turns:
        chosen = selection.seeded(kind, size, k, count, turn, seed)
        assert chosen.shape == (count, k)
        assert torch.equal(chosen, selection.seeded(kind, size, k, count, turn, seed))
        assert all(len(set(row.tolist())) == k for row in chosen)
        sent.scatter_add_(1, chosen, torch.ones_like(chosen))
    assert int(sent.min()) >= 1
    # more than once only where k does not divide the size
    assert int(sent.sum()) == length * k * count and int(sent.max()) <= 2


@pytest.mark.parametrize("kind", ["random", "stride"])
def test_property_seeded_positions_differ(kind) -> None:
    """Seeded positions differ from pass to pass and from seed to seed."""
    a, b, c = (selection.seeded(kind, 4096, 128, 4, n, s) for n, s in ((0, 0), (32, 0), (0, 1)))
    if kind == "stride":
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(a + 1, selection.seeded(kind, 4096, 128, 4, 1, 0))
    else:
        assert not torch.equal(a, b) and not torch.equal(a, c)
        # blocks are shifted against each other
        assert any(not torch.equal(x, y) for x, y in itertools.pairwise(a))


@pytest.mark.parametrize("name", ["random", "stride"])
def test_property_every_element_moves(monkeypatch, name) -> None:
    """Every element of a model moves within a pass. A constant gradient, SGD without sign: within
    ceil(4096 / k) steps everything has moved, and in all passes equally often.
    """
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    model = Bag(((64, 70), (4096,), (9,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exchange = fsdp_demo.attach(
        optimizer, name, model=model, topk=512, beta=1.0, sign=False, clip=None
    )
    for _ in range(8):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    exchange.detach()
    for p in (p.detach() for p in model.parameters()):
        assert bool((p < 0).all())
        # what was sent last has all eight
        assert float(p.min()) == -8.0 and len(p[p == -8.0]) >= p.numel() / 8 * 0.99


# -- one replica ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(presets()))
def test_property_single_replica_sends_nothing(monkeypatch, name) -> None:
    """Every preset trains one replica, which sends nothing."""
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    model = Layered(0)
    config = fsdp_demo.preset(name)
    if config.channels[0].schedule.sync_every > 1:
        period = "check_every" if name == "sel_sync" else "period"
        changes = {period: 4} | ({"delay": 2} if name == "streaming_diloco" else {})
        config = fsdp_demo.preset(name, **changes)
    optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr=0.01)
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    start = [p.detach().clone() for p in model.parameters()]
    for t in range(9):
        for n, p in enumerate(model.parameters()):
            p.grad = noise(p.shape, (0, t, n), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    exchange.finish()
    metrics = exchange.metrics()
    assert (metrics["bytes_sent"], metrics["bytes_received"]) == (0, 0) and metrics["step"] == 9
    assert all(
        bool(p.isfinite().all()) and not torch.equal(p, s)
        for p, s in zip(model.parameters(), start, strict=True)
    )
