"""Channels put together: fragments, an order between channels, one norm over the islands, overlap, and what the log says at the start."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import Applier, Channel, Clock, Codec, ExchangeConfig, Fragments, preset
from fsdp_demo.config import Accumulator, Reducer
from fsdp_demo.fragments import expand, layer_of

from . import probe, threaded
from .test_presets_oracle import adamw, sgd

LLAMA = [f"model.layers.{i}.{part}.weight" for i in range(8) for part in ("self_attn.q_proj", "mlp.up_proj")]
LLAMA = ["model.embed_tokens.weight", *LLAMA, "model.norm.weight", "lm_head.weight"]


# -- fragments ---------------------------------------------------------------------------------------------------------


def layers(channel: Channel) -> set[int | None]:
    return {layer_of(n) for n in channel.include}


@pytest.mark.parametrize(
    "order, wanted",
    [("strided", [{0, 3, 6}, {1, 4, 7}, {2, 5}, {None}]), ("sequential", [{0, 1, 2}, {3, 4, 5}, {6, 7}, {None}])],
)
def test_fragments_hold_layers_and_the_last_one_the_rest(order, wanted) -> None:
    parts = expand(preset("streaming_diloco", layers=3, order=order, period=30), LLAMA)
    assert [layers(c) for c in parts] == wanted
    assert sorted(n for c in parts for n in c.include) == sorted(LLAMA)
    assert [(c.clock.offset, c.clock.period, c.clock.delay) for c in parts] == [(p * 30 // 4, 30, 5) for p in range(4)]
    due = [c.name for t in range(60, 90) for c in parts if c.clock.due(t)]
    assert sorted(due) == [f"delta.{p}" for p in range(4)]


def test_fragments_of_any_names() -> None:
    names = ["transformer.h.0.w", "transformer.h.2.w", "transformer.h.11.w[0]*?", "transformer.wte.weight"]
    parts = expand(preset("streaming_diloco", layers=2, period=9), names)
    assert [[fsdp_demo.fragments.covers(c, n) for n in names] for c in parts] == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert layer_of("h.12.mlp.0.weight") == 12 and layer_of("layer12.weight") is None and layer_of("3") == 3
    few = expand(preset("streaming_diloco", layers=50, period=9), LLAMA[1:5])
    assert len(few) == 1 and few[0].clock.offset == 0
    with pytest.raises(ValueError, match="no parameter name holds a layer number"):
        expand(preset("streaming_diloco"), ["embed.weight", "head.weight"])


def test_two_channels_on_one_parameter_are_refused_by_name() -> None:
    """The patterns alone do not tell that they meet: the names do."""
    delta = Channel("delta", "delta", Clock(10), applier=Applier("outer"), include=("*.q_proj.*",))
    other = Channel("other", "delta", Clock(10), applier=Applier("outer"), include=("model.layers.0.*",))
    config = ExchangeConfig("two", (delta, other))
    with pytest.raises(ValueError, match="'model.layers.0.self_attn.q_proj.weight': channels 'delta' and 'other' both exchange 'delta'"):
        expand(config, LLAMA)
    assert len(expand(config, LLAMA[4:])) == 2


# -- an order, and the drift ----------------------------------------------------------------------------------------------


def test_the_released_rule_with_a_full_average_now_and_then(run_ranks) -> None:
    config = preset("decoupled_momentum", rule="released", period=2, average_every=3, clip=None, inner="as_is")

    def run(me):
        def each(t, exchange):
            delta = exchange.channels[0]
            here = torch.equal(delta.anchor, delta.pack("parameter"))
            return here, exchange.drift

        return probe.train(me, config, sgd, 13, True, 3, each=each)

    for procs in (1, 2):
        results = run_ranks(run, 2, procs)
        for out in results:
            assert out["equal"] == [(t + 1) % 6 == 0 for t in range(13)]
            # The anchor is where the parameters are after every exchange, averaged or not.
            assert [h for h, _ in out["each"]][1::2] == [True] * 6
            drifts = [d for _, d in out["each"]]
            assert drifts[:5] == [None] * 5 and drifts[5] > 0 and drifts[11] != drifts[5] and drifts[11] == drifts[12]


def test_des_loc_clocks_beside_a_sparse_delta_and_embeddings_apart(run_ranks) -> None:
    """Nothing ships this together: sparse deltas with error feedback, embeddings dense and rarely, moments on clocks of their own."""
    sparse = Channel(
        "delta",
        "delta",
        Clock(2),
        Accumulator(0.95),
        Codec("dct", "topk", 64, "int8"),
        "subtract",
        Reducer("senders"),
        Applier("outer"),
        exclude=("embed*",),
    )
    embed = Channel("embeddings", "delta", Clock(4), codec=Codec(code="bf16"), applier=Applier("outer", lr=0.7), include=("embed*",))
    moments = [Channel(n, f"state:{n}", Clock(p), applier=Applier("replace")) for n, p in (("exp_avg", 6), ("exp_avg_sq", 8))]
    config = ExchangeConfig("mixture", (sparse, embed, *moments))

    def run(me):
        def each(t, exchange):
            states = [exchange.shards.read(f"state:{n}") for n in ("exp_avg", "exp_avg_sq")]
            return [[s.clone() for s in kind if s is not None] for kind in states]

        return probe.train(me, config, adamw, 8, True, 0, each=each, finish=True)

    a, b = run_ranks(run, 2, 1)
    for t in range(8):
        same = {n: torch.equal(a["params"][t][n], b["params"][t][n]) for n in a["params"][t] if n.endswith(".weight")}
        assert all(same[n] == ((t + 1) % (4 if n.startswith("embed") else 2) == 0) for n in same), (t, same)
        for kind, every in ((0, 6), (1, 8)):
            together = all(torch.equal(x, y) for x, y in zip(a["each"][t][kind], b["each"][t][kind], strict=True))
            assert together == ((t + 1) % every == 0)
    assert a["final_equal"]


# -- clipping by one norm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("procs", [1, 2])
def test_one_norm_over_the_islands(run_ranks, procs) -> None:
    limit = 0.5

    def run(me):
        model = probe.Probe(0)
        if me.procs > 1:
            probe.shard(model, me.mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = fsdp_demo.attach(optimizer, preset("local_sgd", period=100), model=model, clip=limit, clip_over="islands")
        before = probe.whole(model)
        probe.backward(model, me, 0, 0, me.procs > 1)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 + me.island)
        optimizer.step()
        after = probe.whole(model)
        exchange.detach()
        return {n: before[n] - after[n] for n in before}

    raw = [{n: g * (1 + i) for n, g in probe.island_gradient(0, 0, i).items()} for i in range(2)]
    norms = [float(sum(g.double().square().sum() for g in r.values())) for r in raw]
    factor = limit / (((norms[0] + norms[1]) / 2) ** 0.5 + 1e-6)
    for rank, steps in enumerate(run_ranks(run, 2, procs)):
        for n, g in raw[rank // procs].items():
            torch.testing.assert_close(steps[n], g * factor, rtol=1e-4, atol=1e-6)


# -- overlap ------------------------------------------------------------------------------------------------------------------


def test_training_goes_on_while_an_exchange_is_in_flight(run_ranks) -> None:
    """The line is held back until both replicas have taken the steps of the delay: without overlap this would never end."""

    def play(island: int, topology: fsdp_demo.Topology) -> Any:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = preset("diloco", period=4, inner="as_is", **{"clock.delay": 3, "applier.mix": 0.5})
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology)
        gate, line = threading.Event(), exchange._line
        swap = line.swap

        def held(*args: Any, **kw: Any) -> Any:
            if threading.current_thread().name == "exchange":
                assert gate.wait(20)
            return swap(*args, **kw)

        line.swap = held
        flying = []
        for t in range(8):
            if t == 6:
                gate.set()  # the steps 4 and 5 were taken; the mean is applied after step 6
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            flying.append(len(exchange._mailbox.flights))
        exchange.finish()
        return flying, [(f.step, f.applied, f.channels, f.ended > f.began) for f in exchange.timeline()]

    def run():
        return threaded.values(threaded.islands(play, 2))

    for flying, timeline in run_ranks(run, 1, 1)[0]:
        assert flying == [0, 0, 0, 1, 1, 1, 0, 1]
        assert timeline[0] == (3, 6, ("delta",), True) and timeline[1][:2] == (7, 7)


def test_host_memory_is_where_anchors_and_momentum_may_live(run_ranks) -> None:
    """On the CPU both are the same memory; the rules around it must not care."""

    def run(me, where):
        config = preset("diloco", period=3, clip=None, inner="as_is", outer_state=where)
        return probe.train(me, config, sgd, 7)["params"][-1]

    for a, b in zip(*(run_ranks(run, 2, 1, args=(where,)) for where in ("device", "host")), strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned host memory needs an NVIDIA GPU")
def test_anchors_in_pinned_memory_beside_a_gpu(monkeypatch) -> None:
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    results = []
    for where in ("device", "host"):
        torch.manual_seed(0)
        model = nn.Linear(200, 200).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2, inner="as_is", outer_state=where)
        anchor = exchange.channels[0].anchor
        assert (anchor.device.type, anchor.is_pinned()) == (("cpu", True) if where == "host" else ("cuda", False))
        for _ in range(6):
            model(torch.ones(2, 200, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        exchange.finish()
        results.append(model.weight.detach().cpu())
    assert torch.equal(*results)


# -- the line in the log --------------------------------------------------------------------------------------------------------


def test_the_log_says_what_runs(monkeypatch, caplog) -> None:
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    model = nn.Linear(64, 64)
    with caplog.at_level(logging.INFO, logger="fsdp_demo"):
        fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco", model=model, batch=(4, 8)).detach()
    line = next(m for m in caplog.messages if "preset" in m)
    batch = "effective batch 32 rows = 4 x 8 accumulation x 1 ranks x 1 islands"
    for part in ("preset diloco: delta every 500", "inner AdamW", batch, "0 B per exchange"):
        assert part in line, line
    assert Fragments().layers == 3 and "fragments of 3 layers" in preset("streaming_diloco").describe()
