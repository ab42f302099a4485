"""Channels put together: fragments, an order between channels, one norm over the islands, overlap,
and what the log says at the start.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import Applier, Channel, Codec, ExchangeConfig, Fragments, SyncSchedule, preset
from fsdp_demo.config.fragments import covers, expand, layer_of
from fsdp_demo.config.parts import Accumulator, Reducer
from fsdp_demo.rendezvous.position import form

from ..channels.test_presets_oracle import adamw, coded, sgd
from ..support import probe, threaded
from ..support.inside import in_ranks, in_threads
from ..support.two_layers import train

LLAMA = [
    f"model.layers.{i}.{part}.weight"
    for i in range(8)
    for part in ("self_attn.q_proj", "mlp.up_proj")
]
LLAMA = ["model.embed_tokens.weight", *LLAMA, "model.norm.weight", "lm_head.weight"]


def average_after(name: str, first: str, delay: int = 0) -> Channel:
    source = "state:x" if name == "a" else "parameter"
    schedule = SyncSchedule(4, delay=delay)
    return Channel(name, source, schedule, applier=Applier("replace"), after=first)


def deltas(name: str, **names: tuple[str, ...]) -> Channel:
    return Channel(name, "delta", SyncSchedule(10), applier=Applier("outer_step"), **names)


# -- fragments -----------------------------------------------------------------------------------


def layers(channel: Channel) -> set[int | None]:
    return {layer_of(n) for n in channel.include}


@pytest.mark.parametrize("order, wanted", [
    ("strided", [{0, 3, 6}, {1, 4, 7}, {2, 5}, {None}]),
    ("sequential", [{0, 1, 2}, {3, 4, 5}, {6, 7}, {None}]),
])  # fmt: skip
def test_fragments_layers_and_rest(order, wanted) -> None:
    """Fragments hold the layers in turn, and the last fragment holds the remaining parameters."""
    parts = expand(preset("streaming_diloco", layers=3, order=order, period=30), LLAMA)
    assert [layers(c) for c in parts] == wanted
    assert sorted(n for c in parts for n in c.include) == sorted(LLAMA)
    schedules = [(c.schedule.offset, c.schedule.sync_every, c.schedule.delay) for c in parts]
    assert schedules == [(p * 30 // 4, 30, 5) for p in range(4)]
    due = [c.name for t in range(60, 90) for c in parts if c.schedule.due(t)]
    assert sorted(due) == [f"delta.{p}" for p in range(4)]


def test_fragments_any_parameter_names() -> None:
    """Fragments are cut by the layer numbers in parameter names of any form."""
    names = [f"transformer.{n}" for n in ("h.0.w", "h.2.w", "h.11.w[0]*?", "wte.weight")]
    parts = expand(preset("streaming_diloco", layers=2, period=9), names)
    covered = [[covers(c, n) for n in names] for c in parts]
    assert covered == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    numbers = {"h.12.mlp.0.weight": 12, "layer12.weight": None, "3": 3}
    assert {n: layer_of(n) for n in numbers} == numbers
    few = expand(preset("streaming_diloco", layers=50, period=9), LLAMA[1:5])
    assert len(few) == 1 and few[0].schedule.offset == 0
    with pytest.raises(ValueError, match="no parameter name holds a layer number"):
        expand(preset("streaming_diloco"), ["embed.weight", "head.weight"])


def test_channels_overlap_refused() -> None:
    """Two channels on one parameter are refused, and the error names the parameter. The patterns
    alone do not tell that they meet: the names do.
    """
    layer_0 = deltas("other", include=("model.layers.0.*",))
    config = ExchangeConfig("two", (deltas("delta", include=("*.q_proj.*",)), layer_0))
    said = "'model.layers.0.self_attn.q_proj.weight': channels 'delta' and 'other' both exchange"
    with pytest.raises(ValueError, match=f"{said} 'delta'"):
        expand(config, LLAMA)
    assert len(expand(config, LLAMA[4:])) == 2
    body, rest = deltas("a", exclude=("*embed*",)), deltas("b", include=("model.embed_tokens.*",))
    assert len(expand(ExchangeConfig("apart", (body, rest)), LLAMA)) == 2


# -- an order, and the drift ---------------------------------------------------------------------


def test_released_feedback_with_parameter_average(run_ranks) -> None:
    """The released feedback rule runs beside a channel that averages all parameters now
    and then.
    """
    options = {"transform": True, "rule": "released", "period": 2, "average_every": 3}
    config = coded("decoupled_momentum", **options)

    def run(me):
        def each(t, exchange):
            delta = exchange.channels[0]
            here = torch.equal(delta.anchor, delta.pack("parameter"))
            return here, exchange.drift

        return probe.train(me, config, sgd, 13, True, 3, each=each)

    for procs in (1, 2):
        for out in run_ranks(run, 2, procs):
            assert out["equal"] == [(t + 1) % 6 == 0 for t in range(13)]
            # The anchor is where the parameters are after every exchange, averaged or not.
            assert [h for h, _ in out["each"]][1::2] == [True] * 6
            drifts = [d for _, d in out["each"]]
            assert drifts[:5] == [None] * 5 and drifts[5] > 0
            assert drifts[5] != drifts[11] == drifts[12]


def test_desloc_beside_sparse_delta(run_ranks) -> None:
    """DES-LOC's clocks run beside a sparse delta and a channel for embeddings. Nothing ships this
    together: sparse deltas with error feedback, embeddings dense and rarely, moments on clocks of
    their own.
    """
    kept = {"accumulator": Accumulator(0.95), "feedback": "subtract", "reducer": Reducer("senders")}
    sparse, outer = Codec("dct", "topk", 64, "int8"), Applier("outer_step")
    dense = {"codec": Codec(value_dtype="bf16"), "applier": Applier("outer_step", lr=0.7)}
    config = ExchangeConfig("mixture", (
        Channel("delta", "delta", SyncSchedule(2), codec=sparse, applier=outer,
            exclude=("embed*",), **kept),
        Channel("embeddings", "delta", SyncSchedule(4), include=("embed*",), **dense),
        *(Channel(n, f"state:{n}", SyncSchedule(p), applier=Applier("replace"))
            for n, p in (("exp_avg", 6), ("exp_avg_sq", 8))),
    ))  # fmt: skip

    def run(me):
        def each(t, exchange):
            states = [exchange.host.tensors(f"state:{n}") for n in ("exp_avg", "exp_avg_sq")]
            return [[s.clone() for s in kind if s is not None] for kind in states]

        return probe.train(me, config, adamw, 8, True, 0, each=each, finish=True)

    a, b = run_ranks(run, 2, 1)
    for t in range(8):
        now, there = a["params"][t], b["params"][t]
        for n in now:
            if n.endswith(".weight"):
                every = 4 if n.startswith("embed") else 2
                assert torch.equal(now[n], there[n]) == ((t + 1) % every == 0), (t, n)
        for kind, every in ((0, 6), (1, 8)):
            together = all(map(torch.equal, a["each"][t][kind], b["each"][t][kind]))
            assert together == ((t + 1) % every == 0)
    assert a["final_equal"]


# -- clipping by one norm ------------------------------------------------------------------------


@pytest.mark.parametrize("procs", [1, 2])
def test_clip_common_norm_over_islands(run_ranks, procs) -> None:
    """The clipping of a composed configuration uses one norm over all shards and islands."""
    limit = 0.5

    def run(me):
        config = preset("local_sgd", period=100)
        options = {"clip": limit, "clip_scope": "islands"}
        job = probe.Job(me, config, lambda params: torch.optim.SGD(params, lr=1.0), **options)
        before = job.whole()
        job.backward(0)
        for p in job.model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 + me.island)
        job.optimizer.step()
        job.exchange.detach()
        return {n: before[n] - p for n, p in job.whole().items()}

    raw = [{n: g * (1 + i) for n, g in probe.island_gradient(0, 0, i).items()} for i in range(2)]
    norms = [float(sum(g.double().square().sum() for g in r.values())) for r in raw]
    factor = limit / (((norms[0] + norms[1]) / 2) ** 0.5 + 1e-6)
    for rank, steps in enumerate(run_ranks(run, 2, procs)):
        for n, g in raw[rank // procs].items():
            torch.testing.assert_close(steps[n], g * factor, rtol=1e-4, atol=1e-6)


# -- overlap -------------------------------------------------------------------------------------


@in_threads()
def test_delay_overlaps_training(topology: fsdp_demo.Topology) -> None:
    """Training goes on while an exchange is in flight. The line is held back until both replicas
    have taken the steps of the delay: without overlap this would never end.
    """
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = {"schedule.delay": 3, "applier.mix": 0.5}
    config = preset("diloco", period=4, inner_optimizers="as_is", **late)
    exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology)
    gate, line = threading.Event(), exchange.peers
    exchanged = line.exchange

    def held(*args: Any, **kw: Any) -> Any:
        if threading.current_thread().name == "exchange":
            assert gate.wait(20)
        return exchanged(*args, **kw)

    line.exchange = held

    def look(t: int) -> None:
        flying.append(len(exchange._queue.flights))
        if t == 5:
            gate.set()  # the steps 4 and 5 were taken; the mean is applied after step 6

    flying: list[int] = []
    train(optimizer, lambda t: model(torch.ones(2, 8)).sum(), 8, each=look)
    exchange.finish()
    assert flying == [0, 0, 0, 1, 1, 1, 0, 1]
    first, second, *_ = exchange.timeline()
    assert (first.step, first.applied, first.channels) == (3, 6, ("delta",))
    assert first.ended > first.began and (second.step, second.applied) == (7, 7)


def test_offload_outer_state_to_host(run_ranks) -> None:
    """`offload_outer_state` puts anchors and outer momenta into host memory. On the CPU both are
    the same memory; the rules around it must not care.
    """

    def run(me, where):
        config = coded("diloco", period=3, offload_outer_state=where)
        return probe.train(me, config, sgd, 7)["params"][-1]

    for a, b in zip(*(run_ranks(run, 2, 1, args=(where,)) for where in (False, True)), strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned host memory needs an NVIDIA GPU")
def test_offload_pinned_memory_gpu() -> None:
    """Beside a GPU the offloaded anchors lie in pinned host memory, and the result stays
    the same.
    """
    results = []
    for where in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(200, 200).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = preset("diloco", period=2, inner_optimizers="as_is", offload_outer_state=where)
        exchange = fsdp_demo.attach(optimizer, config, model=model)
        anchor = exchange.channels[0].anchor
        assert (anchor.device.type, anchor.is_pinned()) == (
            ("cpu", True) if where else ("cuda", False)
        )
        rows = torch.ones(2, 200, device="cuda")
        train(optimizer, lambda t: model(rows).square().sum(), 6)  # noqa: B023
        exchange.finish()
        results.append(model.weight.detach().cpu())
    assert torch.equal(*results)


# -- the line in the log -------------------------------------------------------------------------


def test_attach_log_lists_channels(caplog) -> None:
    """The log at attach says which channels run, when and in which form."""

    def line(**options: Any) -> str:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="fsdp_demo"):
            fsdp_demo.attach(optimizer, "diloco", model=model, **options).detach()
        return next(m for m in caplog.messages if "preset" in m)

    said = line(batch=(4, 8))
    batch = "effective batch 32 rows = 4 x 8 accumulation x 1 rank x 1 island"
    parts = ("preset diloco, one replica", "delta every 500", "inner AdamW", "0 B per exchange")
    for part in (*parts, batch):
        assert part in said, said
    assert said.splitlines()[3].endswith("island; 1 shard x 1 copy"), said
    assert line().splitlines()[3] == "    1 shard x 1 copy"  # and nothing of a batch
    assert [form(1, 2), form(2, 1)] == ["1 shard x 2 copies", "2 shards x 1 copy"]
    assert Fragments().layers == 3
    assert "fragments of 3 layers" in preset("streaming_diloco").describe()


@pytest.mark.parametrize("weight", ["equal", "tokens"])
@pytest.mark.parametrize("told", [[(4, 8), (2, 8)], [(4, 8), (4, 8)], [(4, 8), None]])
def test_attach_log_unlike_batches(caplog, told, weight) -> None:
    """The log says where islands train on unlike numbers of rows, and how they are weighted."""

    def run(island: int, topology: fsdp_demo.Topology) -> None:
        optimizer = torch.optim.AdamW(nn.Linear(8, 8).parameters())
        config = preset("diloco", **{"reducer.weight": weight})
        fsdp_demo.attach(optimizer, config, topology=topology, batch=told[island]).detach()

    with caplog.at_level(logging.INFO, logger="fsdp_demo"):
        threaded.islands(run)
    (first,) = (m for m in caplog.messages if "preset" in m and "island 0 of 2" in m)
    warned = [m for m in caplog.messages if "counts the same" in m]
    if told[1] != (2, 8):
        assert "effective batch 64 rows = 4 x 8 accumulation x 1 rank x 2 islands; " in first
        assert warned == []
        return
    assert "effective batch 48 rows, 32 of them here = 4 x 8 accumulation x 1 rank; " in first
    assert len(warned) == (2 if weight == "equal" else 0)
    if warned:
        assert "reducer.weight=tokens" in warned[0]
        assert any("island1: this island trains 16 of 48 rows of a step" in m for m in warned)


# -- what a careful reader found -----------------------------------------------------------------


class Line(nn.Module):
    """One parameter whose gradient is given: SGD with rate 1 takes steps of -g."""

    def __init__(self, value: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), value, dtype=dtype))


def walk(config, steps, g=0.125, dtype: torch.dtype = torch.float32, **options) -> tuple[Any, Any]:
    """(value after every step, value after finish()) of one replica that steps by -g."""
    model = Line(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exchange = fsdp_demo.attach(optimizer, config, model=model, **options)
    values = []
    for _ in range(steps):
        model.w.grad = torch.full_like(model.w, g)
        exchange.report(tokens=3)
        optimizer.step()
        values.append(float(model.w[0].detach()))
    exchange.finish()
    return values, float(model.w[0].detach())


PLAIN = {"lr": 1.0, "momentum": 0.0, "inner_optimizers": "as_is", "clip": None}


def test_mix_bf16_follows_fp32() -> None:
    """bf16 parameters that are mixed follow those in fp32."""
    runs = [
        walk("diloco", 6, dtype=d, period=1, **PLAIN, **{"applier.mix": 0.5})[0]
        for d in (torch.float32, torch.bfloat16)
    ]
    assert runs[0] == runs[1]  # all values are exact in bf16


def test_finish_channel_order() -> None:
    """`finish` applies the channels in the order of the configuration."""
    delta = Channel("delta", "delta", SyncSchedule(4), applier=Applier("outer_step", lr=0.5))
    config = ExchangeConfig("two", (delta, average_after("average", "delta")))
    # a part of a round has outer rate 1
    assert walk(config, 4)[1] == 0.75 and walk(config, 3)[1] == 1 - 0.375


def test_flush_gradients_only() -> None:
    """A flush of one channel's gradients leaves those of others alone. Channel b is two steps late:
    at the end its gradients are applied once, those of a, which have been, not again.
    """
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    channels = (
        Channel("a", "gradient", include=("a",)),
        Channel("b", "gradient", SyncSchedule(delay=2), include=("b",)),
    )
    exchange = fsdp_demo.attach(optimizer, ExchangeConfig("late", channels), model=model)
    for _ in range(3):
        for p in model.values():
            p.grad = torch.ones(2)
        optimizer.step()
    exchange.finish()
    assert float(model["a"][0].detach()) == float(model["b"][0].detach()) == -3


def test_token_weights_per_fragment() -> None:
    """The weight of a fragment is the tokens since its own last exchange."""
    model = Line()
    model.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"inner_optimizers": "as_is", "reducer.weight": "tokens"}
    config = preset("streaming_diloco", period=6, delay=0, layers=1, **options)
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    sent = []
    launch = exchange._queue.launch
    exchange._queue.launch = lambda outgoing, step, said: (
        sent.append((list(outgoing), step, said.weight)),
        launch(outgoing, step, said),
    )
    for t in range(14):
        if t == 9:
            state = exchange.state_dict()
            assert state["tokens"][0] == 9 * 5 and state["counts"] == [9 * 5, 9 * 5]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        exchange.report(tokens=5)
        optimizer.step()
    exchange.report(tokens=5, weight=torch.tensor(2))
    assert exchange.tokens == 75 and exchange.state_dict()["counts"] == [72, 75]
    exchange.finish()
    assert all(weight == 30 for names, step, weight in sent if step >= 10 and step < 14), sent


@pytest.mark.parametrize("source", ["delta", "parameter"])
def test_clip_mean_beside_local_gradients(run_ranks, source: str) -> None:
    """Exchanged gradients beside local ones stay equal on all islands when they are clipped. The
    norm of a mean and of gradients that stay on the island is another one on each.
    """
    embed = Channel("embed", "gradient", include=("embed",))
    applier = Applier("outer_step") if source == "delta" else Applier("replace")
    body = Channel("body", source, SyncSchedule(4), applier=applier, exclude=("embed",))
    config = ExchangeConfig("both", (embed, body), clip=1.0)

    def run(me):
        model = nn.ParameterDict({n: nn.Parameter(torch.zeros(3)) for n in ("embed", "body")})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = fsdp_demo.attach(optimizer, config, model=model)
        found = []
        for t in range(3):
            model["embed"].grad = torch.full((3,), 1.0 + t)
            model["body"].grad = torch.full((3,), 1.0 + t + 10.0 * me.island)
            optimizer.step()
            found.append(model["embed"].detach().clone())
        exchange.finish()
        return found, exchange.drift

    (a, drift), (b, _) = run_ranks(run, 2, 1)
    assert all(map(torch.equal, a, b)) and drift is None
    # each island clips its own gradients, of norm sqrt(3) (1 + t) and more, to 1
    own = [1 / math.sqrt(6), 1 / math.sqrt(3 + 3 * 11**2)]
    assert float(a[0][0]) == pytest.approx(-0.1 * sum(own) / 2, rel=1e-5)


@in_ranks(2, 1)
def test_clip_common_norm_skipped_step(me) -> None:
    """An island that skips a step still takes part in the common norm."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = preset("diloco", period=3, inner_optimizers="as_is", clip_scope="islands")
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    for t in range(7):
        model(torch.ones(2, 6)).sum().backward()
        if (t, me.island) == (1, 1):
            exchange.skip()
        else:
            optimizer.step()
        optimizer.zero_grad()
    exchange.finish()
    assert exchange.digests_equal()


def test_config_composed_forms() -> None:
    """Composed configurations take and refuse the documented forms."""
    assert preset("demo", inner_optimizers="as_is").channels[0].applier.sign is True
    assert preset("random", inner_optimizers="as_is").lr == 4e-4
    assert not preset("demo", version=2).clips_mean
    assert not preset("random", sign=False).clips_mean
    assert preset("full").clips_mean
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no parameter name holds a layer number"):
        fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "streaming_diloco")
    cut = preset("decoupled_momentum", transform=True, **{"fragments.layers": 2})
    assert cut.channels[0].fragments == Fragments(2)


@pytest.mark.parametrize("channels, part", [
    ((average_after("a", "b"), average_after("b", "a")), "an order has two places"),
    ((Channel("g", "gradient"), average_after("b", "g")),
        "gradient channels act before the base step"),
    ((Channel("d", "delta", SyncSchedule(4), applier=Applier("outer_step")),
        average_after("b", "d", delay=1)), "use delay=0"),
    ((Channel("a.b", "gradient"),), "no dot"),
])  # fmt: skip
def test_channel_order_refused(channels, part) -> None:
    """Orders of channels that cannot work are refused."""
    with pytest.raises(ValueError, match=part):
        ExchangeConfig("order", channels)
