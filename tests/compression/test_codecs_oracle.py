"""The pure functions (blocks, transform, codes) against slow reference versions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_demo.compression.blocks import Layout, matrix_shape
from fsdp_demo.compression.transform import matrix

from ..oracles import blocks as slow_blocks
from ..oracles import dct as slow_dct
from ..support.transforms import random, transform

quick = settings(deadline=None, max_examples=30, derandomize=True)
shapes = st.one_of(
    st.tuples(st.integers(0, 9000)),
    st.tuples(st.integers(0, 200), st.integers(0, 200)),
    st.tuples(st.integers(1, 4), st.integers(1, 70), st.integers(1, 130)),
    st.just(()),
)
kinds = st.sampled_from(("transform", "plain", "dense"))


# -- blocks --------------------------------------------------------------------------------------


def slots(layout: Layout, work: torch.Tensor) -> list[tuple[int, int, torch.Tensor, bool]]:
    """(r, s, the r x s content, transformed) of every slot of a workspace."""
    blocks = layout.blocks(work).view(-1, 64, 64)
    return [
        (g.r, g.s, blocks[i, : g.r, : g.s], g.transform)
        for g in layout.groups
        for i in range(g.start, g.stop)
    ]


@quick
@given(st.lists(st.tuples(shapes, kinds), min_size=1, max_size=4), st.integers(1, 3))
def test_layout_follows_block_rule(tensors, active_copies):
    """The layout follows the block rule. Over all active copies every element is in exactly one
    place, and the blocks are those of the rule; pack and unpack are inverse.
    """
    first, many = 1, []
    for shape, _ in tensors:
        numel = math.prod(shape)
        many.append(torch.arange(first, first + numel, dtype=torch.float32).reshape(shape))
        first += numel
    got_blocks, got_dense = [], []
    back = [torch.full_like(t, -1) for t in many]
    for active_copy in range(active_copies):
        shapes, kinds = zip(*tensors, strict=True)
        layout = Layout(list(shapes), list(kinds), active_copy, active_copies)
        work = layout.pack(many, torch.full((layout.numel,), float("nan")))
        assert layout.numel == layout.num_blocks * 4096 + layout.num_dense
        found = slots(layout, work)
        # padding is zero
        kept = sum(int((b != 0).sum()) for _, _, b, _ in found)
        assert kept == int((layout.blocks(work) != 0).sum())
        got_blocks += [(r, s, t, tuple(b.reshape(-1).tolist())) for r, s, b, t in found]
        got_dense += layout.dense_part(work).tolist()
        layout.unpack(work, back)
    expected_blocks, expected_dense = [], []
    for t, (shape, kind) in zip(many, tensors, strict=True):
        cuts, rest = slow_blocks.cut(tuple(shape), dense=kind == "dense", flat=kind == "plain")
        flat = t.reshape(-1)
        expected_blocks += [
            (*b.shape, kind == "transform", tuple(flat[b].reshape(-1).tolist())) for b in cuts
        ]
        expected_dense += flat[rest].tolist()
    assert sorted(got_blocks) == sorted(expected_blocks)
    assert sorted(got_dense) == sorted(expected_dense)
    assert all(torch.equal(a, b) for a, b in zip(back, many, strict=True))


def test_layout_active_copies_even():
    """Every active copy gets its share of each group's blocks and of the dense elements, to within
    one.
    """
    shapes, kinds = [(512, 250), (9000,), (33,)], ["transform", "plain", "transform"]
    whole = Layout(shapes, kinds)
    counts = {(g.transform, g.r, g.s): g.count for g in whole.groups}
    for active_copies in (2, 3, 4):
        parts = [Layout(shapes, kinds, copy, active_copies) for copy in range(active_copies)]
        for key, total in counts.items():
            groups = [[g for g in p.groups if (g.transform, g.r, g.s) == key] for p in parts]
            share = [sum(g.count for g in own) for own in groups]
            assert sum(share) == total and max(share) - min(share) <= 1
        dense = [p.num_dense for p in parts]
        assert sum(dense) == whole.num_dense and max(dense) - min(dense) <= 1


def test_layout_none_is_zero():
    """A missing tensor is packed as zeros and left out when the workspace is unpacked."""
    layout = Layout([(64, 64), (3,)], ["transform", "transform"])
    work = layout.pack([None, None], torch.full((layout.numel,), 7.0))
    assert work.count_nonzero() == 0
    kept = torch.ones(3)
    layout.unpack(work, [None, kept])
    assert kept.tolist() == [0, 0, 0]


def test_layout_strided_and_bf16_tensors():
    """Tensors that are not contiguous or not in fp32 come back from the workspace."""
    base = random(130, 128)
    transposed, half = base.t(), random(64, 64).bfloat16()
    layout = Layout([transposed.shape, half.shape], ["transform", "transform"])
    work = layout.pack([transposed, half], layout.new("cpu"))
    back = [torch.zeros(130, 128).t(), torch.zeros(64, 64, dtype=torch.bfloat16)]
    layout.unpack(work, back)
    assert torch.equal(back[0], transposed) and torch.equal(back[1], half)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0, 4), (2, 3, 64), (2, 3, 63), (4, 1, 1)])
def test_layout_matrix_shape_has_every_element(shape):
    """The matrix form of a shape has every element."""
    assert math.prod(matrix_shape(shape)) == math.prod(shape)
    if math.prod(shape):
        assert matrix_shape(shape) == slow_blocks.view_2d(shape)


# -- transform -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 37, 63, 64])
def test_dct_matrix(n):
    """The matrix of the DCT is that of the definition."""
    assert torch.allclose(matrix("dct", n).double(), slow_dct.basis(n), atol=1e-7)


def test_dct_of_every_kind_of_block():
    """The transform of every kind of block is that of the oracle."""
    shapes = [(187, 250), (64, 64), (9000,), (70, 65), (130, 200)]
    kinds = ["transform", "transform", "transform", "plain", "transform"]
    tensors = [random(*s, seed=i) for i, s in enumerate(shapes)]
    layout = Layout(shapes, kinds)
    work = layout.pack(tensors, layout.new("cpu"))
    plain = work.clone()
    before = [(r, s, b.clone(), t) for r, s, b, t in slots(layout, work)]
    sizes = {(64, 64), (59, 64), (64, 58), (59, 58), (12, 64), (22, 64)}
    assert {(r, s) for r, s, _, t in before if t} >= sizes
    transform(layout, work)
    padding = int((layout.blocks(plain) == 0).sum())
    # zeros of padding stay (a random value may be an exact zero)
    assert int((layout.blocks(work) == 0).sum()) >= padding - 3
    for (r, s, x, transformed), (_, _, y, _) in zip(before, slots(layout, work), strict=True):
        expected = slow_dct.dct2(x.double()) if transformed else x.double()
        assert y.shape == (r, s) and torch.allclose(y.double(), expected, atol=2e-5)
    assert torch.equal(layout.dense_part(work), layout.dense_part(plain))
    assert abs(float(work.double().norm() / plain.double().norm()) - 1) < 1e-6
    transform(layout, work, inverse=True)
    assert torch.allclose(work, plain, atol=2e-5)
