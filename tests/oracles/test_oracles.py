"""The oracles themselves: each against the definition, a library, or a case worked by hand."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from . import blocks, dct, presets, quantise, topk, wire


def test_dct_is_the_double_sum_and_orthonormal():
    block = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    coefficients = dct.dct2(block)
    for u, v in ((0, 0), (0, 3), (4, 0), (2, 6)):
        assert abs(dct.coefficient(block, u, v) - float(coefficients[u, v])) < 1e-12
    assert torch.allclose(dct.idct2(coefficients), block, atol=1e-12)
    for n in (1, 2, 37, 64):
        assert torch.allclose(dct.basis(n) @ dct.basis(n).T, torch.eye(n, dtype=torch.float64), atol=1e-12)


def test_dct_of_a_constant_is_one_coefficient():
    coefficients = dct.dct2(torch.full((3, 64), 2.0, dtype=torch.float64))
    assert abs(float(coefficients[0, 0]) - 2 * math.sqrt(3 * 64)) < 1e-12
    coefficients[0, 0] = 0
    assert coefficients.abs().max() < 1e-12


@pytest.mark.parametrize(
    "shape, sizes, dense",
    [
        ((), [], 1),
        ((4095,), [], 4095),
        ((63, 65), [], 4095),
        ((64, 64), [(64, 64)], 0),
        ((0, 5), [], 0),
        ((4096,), [(64, 64)], 0),
        ((5000,), [(64, 64), (14, 64)], 8),  # 904 = 14 * 64 + 8
        ((128, 250), [(64, 64)] * 3 + [(64, 58)] + [(64, 64)] * 3 + [(64, 58)], 0),  # padded 1.024 times
        ((130, 200), [(64, 64)] * 6 + [(22, 64)], 16),  # padded 1.89 times: flat
        ((1000, 7), [(64, 64), (45, 64)], 24),
        ((2, 64, 64), [(64, 64)] * 2, 0),  # rows x last
        ((64, 32, 3), [(64, 64), (32, 64)], 0),  # 64 x 96 pads to 1.33: flat
    ],
)
def test_blocks(shape, sizes, dense):
    cuts, rest = blocks.cut(shape)
    assert [tuple(b.shape) for b in cuts] == sizes
    assert len(rest) == dense
    every = torch.cat([b.reshape(-1) for b in cuts] + [rest])
    assert sorted(every.tolist()) == list(range(math.prod(shape)))


def test_blocks_without_a_transform_are_flat():
    assert [tuple(b.shape) for b in blocks.cut((128, 250), flat=True)[0]] == [(64, 64)] * 7 + [(52, 64)]
    assert blocks.cut((128, 250), flat=True)[0][1].reshape(-1).tolist() == list(range(4096, 8192))


def test_shards_are_torch_chunks():
    for rows, shards in ((5, 2), (3, 2), (1, 2), (7, 4), (8, 4), (5, 4)):
        t = torch.arange(rows * 3.0).reshape(rows, 3)
        parts = blocks.shard_rows(t, shards)
        assert len(parts) == shards and torch.equal(torch.cat(parts), t)
        chunks = torch.chunk(t, shards)
        assert all(torch.equal(a, b) for a, b in zip(parts, chunks, strict=False))


def test_topk_ties_go_to_the_lower_position():
    assert topk.topk(torch.tensor([[1.0, -2.0, 2.0], [0.0, 2.0, -3.0]]), 3) == [1, 2, 5]
    assert topk.kept(32, 64, 64) == 32 and topk.kept(32, 1, 64) == 1 and topk.kept(32, 3, 64) == 2
    assert topk.margin(torch.tensor([4.0, 3.0, 1.0]), 2) == 0.5


def test_bf16_is_torchs():
    values = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-20, 20).repeat(50)
    halves = torch.tensor([struct.unpack("<f", struct.pack("<I", b))[0] for b in (0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF)])
    for v in (values, halves, torch.tensor([0.0, -0.0, 3.4e38])):
        assert torch.equal(quantise.bf16_all(v), v.bfloat16().float())


def test_int8_by_hand():
    scale, codes = quantise.int8(torch.tensor([127.0, -0.5, 1.5, 2.5, -127.0]))
    assert scale == 1.0 and codes == [127, 0, 2, 2, -127]  # halves to even
    assert quantise.int8(torch.zeros(3)) == (0.0, [0, 0, 0])
    scale, codes = quantise.int8(torch.tensor([1.0, -1.0]))  # the scale is rounded down: clamped
    assert scale == float(torch.tensor(1 / 127).bfloat16()) and codes == [127, -127]


def test_pack12():
    assert wire.pack12([0xABC, 0x123]) == bytes([0xBC, 0x3A, 0x12])
    numbers = [0, 4095, 1, 2048, 77]
    assert wire.unpack12(wire.pack12(numbers), 5) == numbers
    assert len(wire.pack12(numbers)) == 8  # 60 bits


# -- presets -------------------------------------------------------------------------------------------------------

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


def close(a: presets.Tensors, b: presets.Tensors) -> bool:
    return all(torch.allclose(a[n].detach(), b[n].detach(), atol=1e-10) for n in a)


def test_full_is_sgd_on_the_mean():
    method = run(presets.Full(start(), 2, sgd))
    for n, p in start().items():
        expected = p.double() - 0.1 * sum((gradients(t, 0)[n].double() + gradients(t, 1)[n].double()) / 2 for t in range(4))
        assert torch.allclose(method.theta[1][n], expected)


def everything(**kw) -> presets.Coding:
    return presets.Coding(k=4096, code="fp32", **kw)


@pytest.mark.parametrize("transform", [True, False])
def test_demo_with_everything_kept(transform):
    """subtract: nothing stays, so plain SGD on the mean; keep: dense momentum SGD."""
    full = run(presets.Full(start(), 2, sgd))
    same = run(presets.Demo(start(), 2, sgd, shards=2, sign=False, coding=everything(transform=transform)))
    assert close(full.theta[0], same.theta[0])

    def momentum(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    dense = run(presets.Full(start(), 2, momentum))
    kept = run(presets.Demo(start(), 2, sgd, sign=False, residual="keep", beta=0.9, coding=everything(transform=transform)))
    assert close(dense.theta[0], kept.theta[0])


def test_diloco_is_torch_sgd_on_the_pseudo_gradient():
    method = run(presets.DiLoCo(start(), 2, sgd, period=2))
    anchor = {n: p.double() for n, p in start().items()}
    outer = torch.optim.SGD(list(anchor.values()), lr=0.7, momentum=0.9, nesterov=True)
    for t in (0, 2):
        for n, a in anchor.items():
            a.grad = sum(0.1 * gradients(t + i, r)[n].double() for i in (0, 1) for r in (0, 1)) / 2
        outer.step()
    assert close(method.theta[0], anchor) and close(method.theta[1], anchor)


def test_consensus_with_everything_kept_is_averaging():
    method = run(presets.DecoupledMomentum(start(), 2, sgd, period=2, coding=everything()))
    assert close(method.theta[0], run(presets.Full(start(), 2, sgd)).theta[0])


def test_released_conserves_the_sum_with_divisor_r_only():
    """Sum of the accumulators after an exchange: beta * sum before + sum of T(D), if the divisor is R; more with senders."""
    for senders in (False, True):
        coding = presets.Coding(k=16, code="fp32", senders=senders)
        method = presets.DecoupledMomentum(start(), 3, sgd, rule="released", period=1, coding=coding)
        run(method, 3)
        before = method.sum_of_accumulators()["weight"][0]
        deltas = [0.1 * gradients(3, r)["weight"].double() for r in range(3)]
        shard = method.shards["weight"][0]
        expected = [0.95 * x + y for x, y in zip(before, shard.forward(sum(deltas)), strict=True)]
        method.step([gradients(3, r) for r in range(3)])
        after = method.sum_of_accumulators()["weight"][0]
        conserved = all(torch.allclose(x, y, atol=1e-10) for x, y in zip(after, expected, strict=True))
        assert conserved != senders


def test_mean_over_senders_and_weights():
    values = [torch.tensor([2.0, 0.0, 0.0]), torch.tensor([4.0, 4.0, 0.0])]
    assert presets.mean(values, [1.0, 1.0], True).tolist() == [3.0, 4.0, 0.0]
    assert presets.mean(values, [1.0, 1.0]).tolist() == [3.0, 2.0, 0.0]
    assert presets.mean(values, [1.0, 3.0]).tolist() == [3.5, 3.0, 0.0]
    assert presets.mean(values, [1.0, 3.0], True).tolist() == [3.5, 4.0, 0.0]
