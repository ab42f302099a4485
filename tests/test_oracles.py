"""The oracles themselves: each against the definition, a library, or a case worked by hand."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from .oracles import blocks, dct, dense, presets, quantise, topk, wire


def test_oracle_dct_is_the_double_sum():
    """The DCT is the double sum of its definition, and orthonormal."""
    block = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    coefficients = dct.dct2(block)
    for u, v in ((0, 0), (0, 3), (4, 0), (2, 6)):
        assert abs(dct.coefficient(block, u, v) - float(coefficients[u, v])) < 1e-12
    assert torch.allclose(dct.idct2(coefficients), block, atol=1e-12)
    for n in (1, 2, 37, 64):
        assert torch.allclose(
            dct.basis(n) @ dct.basis(n).T, torch.eye(n, dtype=torch.float64), atol=1e-12
        )


@pytest.mark.parametrize("shape, sizes, dense", [
    ((), [], 1),
    ((4095,), [], 4095),
    ((63, 65), [], 4095),
    ((64, 64), [(64, 64)], 0),
    ((0, 5), [], 0),
    ((4096,), [(64, 64)], 0),
    ((5000,), [(64, 64), (14, 64)], 8),  # 904 = 14 * 64 + 8
    # padded 1.024 times
    ((128, 250), [(64, 64)] * 3 + [(64, 58)] + [(64, 64)] * 3 + [(64, 58)], 0),
    ((130, 200), [(64, 64)] * 6 + [(22, 64)], 16),  # padded 1.89 times: flat
    ((1000, 7), [(64, 64), (45, 64)], 24),
    ((2, 64, 64), [(64, 64)] * 2, 0),  # rows x last
    ((64, 32, 3), [(64, 64), (32, 64)], 0),  # 64 x 96 pads to 1.33: flat
])  # fmt: skip
def test_oracle_blocks(shape, sizes, dense):
    """A tensor is cut into blocks of the right shapes, each element once."""
    cuts, rest = blocks.cut(shape)
    assert [tuple(b.shape) for b in cuts] == sizes
    assert len(rest) == dense
    every = torch.cat([b.reshape(-1) for b in cuts] + [rest])
    assert sorted(every.tolist()) == list(range(math.prod(shape)))


def test_oracle_topk_ties_go_to_the_lower_position():
    """Ties of top-k go to the lower position."""
    assert topk.topk(torch.tensor([[1.0, -2.0, 2.0], [0.0, 2.0, -3.0]]), 3) == [1, 2, 5]
    assert topk.kept(32, 64, 64) == 32 and topk.kept(32, 1, 64) == 1 and topk.kept(32, 3, 64) == 2
    assert topk.margin(torch.tensor([4.0, 3.0, 1.0]), 2) == 0.5


def test_oracle_bf16_is_torchs():
    """bf16 rounds as torch does."""
    values = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(
        -20, 20
    ).repeat(50)
    halves = torch.tensor(
        [
            struct.unpack("<f", struct.pack("<I", b))[0]
            for b in (0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF)
        ]
    )
    for v in (values, halves, torch.tensor([0.0, -0.0, 3.4e38])):
        assert torch.equal(quantise.bf16_all(v), v.bfloat16().float())


def test_oracle_int8_by_hand():
    """int8 has the scales and codes computed by hand."""

    def coded(*values: float) -> tuple[list[float], list[int]]:
        return quantise.scales_and_codes(torch.tensor(values), "int8")

    # halves to even, and two's complement
    assert coded(127.0, -0.5, 1.5, 2.5, -127.0) == ([1.0], [127, 0, 2, 2, 256 - 127])
    assert coded(0.0, 0.0, 0.0) == ([0.0], [0, 0, 0])
    # the scale is rounded down: clamped
    assert coded(1.0, -1.0) == ([float(torch.tensor(1 / 127).bfloat16())], [127, 256 - 127])


def test_oracle_positions_by_hand():
    """Positions have the bytes worked out by hand. Of 64: 5, 8 and 63 with 2 low bits would take 6
    + 6 + 6 bits, as numbers 18, too.
    """
    assert wire.low_and_flags(64, 3) == (6, 0)
    assert wire.positions([[5, 8, 63]], 64) == bytes([0x85, 0x0F, 0b110000])
    # four of 4096: h = 0, 0, 0, 15: bits 0, 1, 2, 18; symbols 3 3 0 0, then low bytes
    assert wire.low_and_flags(4096, 4) == (8, 7)
    assert wire.positions([[1, 2, 255, 4095]], 4096) == bytes([0x41, 0x0F, 1, 2, 255, 255])
    assert wire.all_sets(4, 3) == [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]


# -- presets -------------------------------------------------------------------------------------

SHAPES = {"weight": (70, 65), "small": (3, 5), "bias": (7,)}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def start() -> presets.Tensors:
    generator = torch.Generator().manual_seed(2)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def gradients(t: int, r: int) -> presets.Gradients:
    generator = torch.Generator().manual_seed(100 * t + r)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def run(method, steps: int = 4):
    for t in range(steps):
        method.step([gradients(t, r) for r in range(method.R)])
    return method


def trained(make, replicas: int = 2, inner=sgd, steps: int = 4, **options):
    return run(make(start(), replicas, inner, **options), steps)


def close(a: presets.Tensors, b: presets.Tensors) -> bool:
    return all(torch.allclose(a[n].detach(), b[n].detach(), atol=1e-10) for n in a)


def test_oracle_full_is_sgd_on_the_mean():
    """`full` is SGD on the mean gradient."""
    method = trained(presets.Full)
    for n, p in start().items():
        expected = p.double() - 0.1 * sum(
            (gradients(t, 0)[n].double() + gradients(t, 1)[n].double()) / 2 for t in range(4)
        )
        assert torch.allclose(method.theta[1][n], expected)


def everything(**kw) -> presets.Coding:
    return presets.Coding(k=4096, code="fp32", **kw)


@pytest.mark.parametrize("transform", [True, False])
def test_oracle_demo_with_everything_kept(transform):
    """`demo` that keeps all coefficients is dense. subtract: nothing stays, so plain SGD on the
    mean; keep: dense momentum SGD.
    """
    full = trained(presets.Full)
    same = trained(presets.Demo, shards=2, sign=False, coding=everything(transform=transform))
    assert close(full.theta[0], same.theta[0])

    def momentum(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    dense = trained(presets.Full, 2, momentum)
    kept = trained(
        presets.Demo, sign=False, residual="keep", beta=0.9, coding=everything(transform=transform)
    )
    assert close(dense.theta[0], kept.theta[0])


def test_oracle_diloco_is_torch_sgd_on_the_pseudo_gradient():
    """`diloco` is torch's SGD on the pseudo-gradient."""
    method = trained(presets.DiLoCo, period=2)
    anchor = {n: p.double() for n, p in start().items()}
    outer = torch.optim.SGD(list(anchor.values()), lr=0.7, momentum=0.9, nesterov=True)
    for t in (0, 2):
        for n, a in anchor.items():
            a.grad = sum(0.1 * gradients(t + i, r)[n].double() for i in (0, 1) for r in (0, 1)) / 2
        outer.step()
    assert close(method.theta[0], anchor) and close(method.theta[1], anchor)


def test_oracle_released_rule_conserves_the_sum():
    """The sum of the accumulators after an exchange is beta * sum before + sum of T(D), if the
    divisor is R; it is more with senders.
    """
    for senders in (False, True):
        coding = presets.Coding(k=16, code="fp32", senders=senders)
        method = presets.DecoupledMomentum(
            start(), 3, sgd, rule="released", period=1, coding=coding
        )
        run(method, 3)
        before = method.sum_of_accumulators()["weight"][0]
        deltas = [0.1 * gradients(3, r)["weight"].double() for r in range(3)]
        shard = method.shards["weight"][0]
        expected = [0.95 * x + y for x, y in zip(before, shard.forward(sum(deltas)), strict=True)]
        method.step([gradients(3, r) for r in range(3)])
        after = method.sum_of_accumulators()["weight"][0]
        conserved = all(
            torch.allclose(x, y, atol=1e-10) for x, y in zip(after, expected, strict=True)
        )
        assert conserved != senders


def test_oracle_mean_over_senders_and_weights():
    """The mean counts weights, and senders only where asked."""
    values = [torch.tensor([2.0, 0.0, 0.0]), torch.tensor([4.0, 4.0, 0.0])]
    assert presets.mean(values, [1.0, 1.0], True).tolist() == [3.0, 4.0, 0.0]
    assert presets.mean(values, [1.0, 1.0]).tolist() == [3.0, 2.0, 0.0]
    assert presets.mean(values, [1.0, 3.0]).tolist() == [3.5, 3.0, 0.0]
    assert presets.mean(values, [1.0, 3.0], True).tolist() == [3.5, 4.0, 0.0]


# -- averaging -----------------------------------------------------------------------------------


def heavy(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


def mean_theta(method) -> presets.Tensors:
    return {n: sum(theta[n].detach() for theta in method.theta) / method.R for n in method.theta[0]}


def test_oracle_averaging_of_sgd_is_that_of_gradients():
    """SGD with momentum is linear: where parameters and momenta are averaged replicas hold what the
    mean gradient gives.
    """
    full = trained(presets.Full, 3, heavy, 6)
    for states in ({"momentum_buffer": 2}, {"momentum_buffer": 3}, {}):
        method = trained(presets.Averaging, 3, heavy, 6, period=2, states=states)
        assert close(mean_theta(method), full.theta[0]) and close(method.theta[1], full.theta[0])
        equal = [close(method.state(r, "momentum_buffer"), full_state(full)) for r in range(3)]
        assert equal == [bool(states)] * 3


def full_state(full: presets.Full) -> presets.Tensors:
    return {n: full.inner[0].state[p]["momentum_buffer"] for n, p in full.theta[0].items()}


def test_oracle_desloc_with_multiples_of_one_is_local_adam():
    """Averaging everything at every step with one gradient for all is AdamW itself; rarer states
    leave the replicas' moments apart.
    """
    method = presets.Averaging(start(), 2, adamw, period=2, states={"exp_avg": 2, "exp_avg_sq": 2})
    rare = presets.Averaging(start(), 2, adamw, period=2, states={"exp_avg": 4, "exp_avg_sq": 6})
    for t in range(6):
        for m in (method, rare):
            m.step([gradients(t, r) for r in range(2)])
        for name, period in (("exp_avg", 4), ("exp_avg_sq", 6)):
            assert close(rare.state(0, name), rare.state(1, name)) == ((t + 1) % period == 0)
            assert close(method.state(0, name), method.state(1, name)) == (t % 2 == 1)
    alone = presets.Full(start(), 1, adamw)
    same = presets.Averaging(start(), 2, adamw, period=1, states={"exp_avg": 1, "exp_avg_sq": 1})
    for t in range(4):
        alone.step([gradients(t, 0)])
        same.step([gradients(t, 0)] * 2)
    assert close(alone.theta[0], same.theta[1])
    assert all(float(s["step"]) == 4 for s in same.inner[0].state.values())


@pytest.mark.parametrize("delay", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_oracle_delayed_averaging_moves_no_mean(delay, mix):
    """Delayed averaging moves no mean and corrects a difference once."""
    method = presets.Averaging(start(), 3, sgd, period=2, delay=delay, mix=mix)
    run(method, 7)
    full = trained(presets.Full, 3, sgd, 7)
    assert close(mean_theta(method), full.theta[0])
    assert not close(method.theta[0], method.theta[1])
    for _ in range(2 * delay + 4):  # no gradients: what differs is corrected, not more
        method.step([{} for _ in range(3)])
    method.flush()
    apart = max(
        float((a[n] - full.theta[0][n]).detach().abs().max()) for a in method.theta for n in a
    )
    assert apart < 1e-9 if mix == 0 else apart < 0.5


# -- outer steps, fragments, delays --------------------------------------------------------------


def test_oracle_diloco_with_rate_one_is_local_sgd():
    """`diloco` with an outer rate of one is local SGD."""
    a = trained(presets.DiLoCo, 2, adamw, 7, period=3, lr=1.0, momentum=0.0)
    b = trained(presets.Averaging, 2, adamw, 7, period=3)
    assert all(close(x, y) for x, y in zip(a.theta, b.theta, strict=True))


@pytest.mark.parametrize("warmup", [0, 2])
def test_oracle_streaming_with_one_fragment_is_diloco(warmup):
    """`streaming_diloco` with one fragment is `diloco`."""
    a = trained(presets.DiLoCo, 2, adamw, 8, period=2, lr=0.4, warmup=warmup)
    b = trained(presets.Streaming, 2, adamw, 8, period=2, lr=0.4, warmup=warmup)
    assert all(close(x, y) for x, y in zip(a.theta, b.theta, strict=True))
    c = trained(presets.Streaming, 2, adamw, 8, period=2, lr=0.4, parts=[[n] for n in SHAPES])
    assert not close(a.theta[0], c.theta[0])  # other offsets: 0, 0, 1
    assert [f.offset for f in c.fragments] == [0, 0, 1]


def test_oracle_fragments_by_hand():
    """Fragments are those assigned by hand."""
    names = ["embed.weight", "h.0.w", "h.0.b", "h.1.w", "h.2.w", "h.3.w", "h.4.w", "norm.2x.weight"]
    last = ["embed.weight", "norm.2x.weight"]
    assert presets.fragments(names, 2, "strided") == [
        ["h.0.w", "h.0.b", "h.3.w"],
        ["h.1.w", "h.4.w"],
        ["h.2.w"],
        last,
    ]
    assert presets.fragments(names, 2, "sequential") == [
        ["h.0.w", "h.0.b", "h.1.w"],
        ["h.2.w", "h.3.w"],
        ["h.4.w"],
        last,
    ]


@pytest.mark.parametrize("delay", [0, 2, 4, 6])
def test_oracle_delay_beyond_the_period_loses_nothing(delay):
    """Nothing is lost or sent twice with a delay beyond the period: with lr 1, no momentum and SGD
    the anchor is where the mean gradient leads, once what is in flight has landed. A mean that
    lands where the next delta leaves rewinds no step that was not sent.
    """
    full = trained(presets.Full, 3, sgd, 8)
    for make in (presets.Streaming, presets.DecoupledMomentum):
        kw = {"momentum": 0.0} if make is presets.Streaming else {"coding": everything()}
        method = trained(make, 3, sgd, 8, period=2, lr=1.0, delay=delay, **kw)
        assert delay == 0 or not close(method.theta[0], method.theta[1])
        method.flush()
        assert all(close(theta, full.theta[0]) for theta in method.theta)


@pytest.mark.parametrize(("lr", "momentum", "same"), [(1.0, 0.0, True), (0.7, 0.9, False)])
def test_oracle_own_share_is_an_eager_update(lr, momentum, same):
    """An own share of one in R is an eager update (2502.12996) where the outer step is plain: the
    fresh own delta and the others' last ones, through each replica's own outer step. From the
    second round on; in the first nothing has landed yet.
    """
    kw = {"period": 2, "delay": 2, "lr": lr, "momentum": momentum, "own": 0.5}
    method = trained(presets.Streaming, 2, sgd, 8, **kw)
    anchor, m = start()["bias"].double().repeat(2, 1), torch.zeros(2, 7, dtype=torch.float64)
    before = torch.zeros_like(m)
    for t in range(0, 8, 2):
        delta = 0.1 * torch.stack(
            [sum(gradients(t + i, r)["bias"].double() for i in (0, 1)) for r in (0, 1)]
        )
        eager = delta / 2 + before.mean(0) - before / 2
        m = momentum * m + eager
        anchor = anchor - lr * (eager + momentum * m)
        before = delta
    found = torch.stack([theta["bias"].detach() for theta in method.theta])
    assert torch.allclose(found, anchor, atol=1e-10) is same


def test_oracle_delayed_gradients_arrive_in_order():
    """Delayed gradients arrive late and in order."""
    for make in (presets.Full, presets.Demo):
        kw = {"coding": presets.Coding(code="fp32")} if make is presets.Demo else {}
        early = trained(make, 2, sgd, 3, **kw)
        late = trained(make, 2, sgd, 5, delay=2, **kw)
        assert close(early.theta[0], late.theta[0])
        late.flush()
        assert close(trained(make, 2, sgd, 5, **kw).theta[1], late.theta[1])


def test_oracle_gradient_channel_with_a_period_gathers():
    """A gradient channel with a period gathers the gradients of its steps."""
    method = trained(presets.Demo, 2, sgd, 7, sign=False, beta=1.0, period=3, coding=everything())
    assert close(method.theta[0], trained(presets.Full, 2, sgd, 6).theta[0])


# -- codes on whole tensors, error feedback ------------------------------------------------------


@pytest.mark.parametrize("code", quantise.FORMATS)
def test_oracle_dense_codes_are_those_of_single_values(code):
    """Whole vectors are coded as one value at a time."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4096 + 77, generator=generator) * 10.0 ** torch.randint(
        -3, 1, (4173,), generator=generator
    )
    values[:300], values[400], values[600:700] = 0.0, -0.0, torch.arange(100) / 8.0
    assert torch.equal(dense.coded(values, code), quantise.dequantised(values, code))
    assert dense.coded(values[:0], code).shape == (0,)
    assert dense.coded(values.double(), code).dtype == torch.float64


def test_oracle_dense_mean_is_of_what_arrives():
    """A mean of whole tensors is the mean of what arrives."""
    tensors = [{n: t.double() for n, t in gradients(0, r).items()} for r in range(4)]
    for code, back in (("fp32", "fp32"), ("bf16", "bf16"), ("2bit", "fp32"), ("int4", "int8")):
        got = dense.mean_of(tensors, ["small", "bias"], 2, code, [1.0] * 4)
        for rows, cut in ((slice(0, 2), slice(0, 4)), (slice(2, 3), slice(4, 7))):
            vectors = [torch.cat([t["small"][rows].reshape(-1), t["bias"][cut]]) for t in tensors]
            want = dense.coded(sum(dense.coded(v, code) for v in vectors) / 4, back)
            assert torch.allclose(
                torch.cat([got["small"][rows].reshape(-1), got["bias"][cut]]), want, atol=1e-12
            )


def updates(t: int, r: int) -> presets.Tensors:
    return {n: -0.1 * g.double() for n, g in gradients(t, r).items()}


def test_oracle_muloco_is_diloco_with_error_feedback():
    """`muloco` is `diloco` on given updates, and feeds errors back."""
    method = presets.MuLoCo(start(), 2, sgd, period=2, lr=0.8)
    coarse = presets.MuLoCo(start(), 2, sgd, period=2, lr=1.0, momentum=0.0, beta=1.0, code="2bit")
    for t in range(6):
        method.step([updates(t, r) for r in range(2)])
        coarse.step([updates(t, r) for r in range(2)])
    assert close(method.theta[0], trained(presets.DiLoCo, 2, sgd, 6, period=2, lr=0.8).theta[0])
    # beta 1: the anchor plus what the feedback still holds is where exact deltas would have led
    kept = {
        n: coarse.theta[0][n].detach() - sum(a[n] for a in coarse.fragments[0].a) / 2
        for n in SHAPES
    }
    exact = trained(presets.Full, 2, sgd, 6).theta[0]
    assert all(torch.allclose(kept[n], exact[n].detach(), atol=1e-6) for n in SHAPES)
    assert not close(coarse.theta[0], exact)


# -- sparse --------------------------------------------------------------------------------------


def test_oracle_random_with_half_the_positions():
    """Half the positions of a block come a step late."""

    def half(exchange, name, shard):
        mask = torch.zeros(SHAPES[name], dtype=torch.bool)
        mask.view(-1)[exchange % 2 :: 2] = True
        return mask

    coding = presets.Coding(code="fp32", transform=False, senders=False, positions=half)
    method = trained(presets.Demo, sign=False, beta=1.0, coding=coding)
    now, before = (
        trained(presets.Full, 2, sgd, t).theta[0]["weight"].detach().reshape(-1)[:4096]
        for t in (4, 3)
    )
    got = method.theta[0]["weight"].detach().reshape(-1)[:4096]
    assert torch.allclose(got[1::2], now[1::2], atol=1e-10)
    assert torch.allclose(got[0::2], before[0::2], atol=1e-10)


def test_oracle_block_norms_are_clipped_to_their_median():
    """Norms of blocks are clipped to their median."""
    shard = presets.Shard(
        "weight", torch.Size((64, 64)), presets.Coding(clip=True, transform=False)
    )

    def pieces(*norms):
        blocks = [torch.zeros(64, 64) for _ in norms]
        for i, (block, norm) in enumerate(zip(blocks, norms, strict=True)):
            block[i, i] = norm
        return (
            shard.mean([[b, torch.zeros(0)] for b in blocks], [1.0] * len(norms))[0]
            .diagonal()[: len(norms)]
            .tolist()
        )

    assert pieces(1.0, 8.0, 2.0) == [1.0, 2.0, 2.0]
    assert (
        pieces(1.0, 3.0) == [1.0, 2.0] and pieces(0.0, 3.0) == [0.0, 1.5] and pieces(5.0) == [5.0]
    )


def test_oracle_demo_v2_with_everything_kept():
    """`demo` with alpha 0.5 and gain 0.1 that keeps everything is a geometric mean of gradients: a
    = 0.9 a / 2 + 0.1 g after what was sent has half left it, so the update of step t is 0.1 sum
    (0.45)^i g.
    """
    method = trained(
        presets.Demo, 2, sgd, 3, sign=False, beta=0.9, gain=0.1, alpha=0.5, coding=everything()
    )
    for n, p in start().items():
        g = [(gradients(t, 0)[n].double() + gradients(t, 1)[n].double()) / 2 for t in range(3)]
        moved = 0.1 * (g[0] + (g[1] + 0.45 * g[0]) + (g[2] + 0.45 * g[1] + 0.45**2 * g[0]))
        assert torch.allclose(method.theta[0][n].detach(), p.double() - 0.1 * moved)


# -- learning rate, clipping ---------------------------------------------------------------------


def test_oracle_clip_by_own_norm_or_by_all():
    """Gradients are clipped by a replica's own norm, or by that of all."""
    own = presets.Replicas(start(), 2, sgd, clip=5.0)
    common = presets.Replicas(start(), 2, sgd, clip=5.0, clip_over="islands")
    grads = [{"bias": torch.full((1,), 6.0)}, {"bias": torch.full((1,), 8.0)}]
    assert [round(float(g["bias"]), 4) for g in own.clipped_all(grads)] == [5.0, 5.0]
    factor = 5 / math.sqrt(50)
    assert [round(float(g["bias"]), 4) for g in common.clipped_all(grads)] == [
        round(6 * factor, 4),
        round(8 * factor, 4),
    ]
