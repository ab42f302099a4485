"""The pure functions (blocks, transform, selection, codes, payload) against slow reference
versions.
"""

from __future__ import annotations

import math
import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_demo.compression import quantize, sparse
from fsdp_demo.compression.blocks import Layout, matrix_shape
from fsdp_demo.compression.selection import top_k
from fsdp_demo.compression.transform import matrix
from fsdp_demo.compression.windows import Group
from fsdp_demo.config.parts import Codec
from fsdp_demo.peers import header as frame

from ..oracles import blocks as slow_blocks
from ..oracles import dct as slow_dct
from ..oracles import quantise as slow_values
from ..oracles import topk as slow_topk
from ..oracles import wire as slow_wire
from ..support.sealed import seal, unseal
from ..support.transforms import transform

quick = settings(deadline=None, max_examples=30, derandomize=True)
shapes = st.one_of(
    st.tuples(st.integers(0, 9000)),
    st.tuples(st.integers(0, 200), st.integers(0, 200)),
    st.tuples(st.integers(1, 4), st.integers(1, 70), st.integers(1, 130)),
    st.just(()),
)
kinds = st.sampled_from(("transform", "plain", "dense"))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
        layout = Layout(
            [s for s, _ in tensors], [k for _, k in tensors], active_copy, active_copies
        )
        work = layout.pack(many, torch.full((layout.numel,), float("nan")))
        assert layout.numel == layout.num_blocks * 4096 + layout.num_dense
        found = slots(layout, work)
        # padding is zero
        assert sum(int((b != 0).sum()) for _, _, b, _ in found) == int(
            (layout.blocks(work) != 0).sum()
        )
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
        parts = [
            Layout(shapes, kinds, active_copy, active_copies)
            for active_copy in range(active_copies)
        ]
        for key, total in counts.items():
            share = [
                sum(g.count for g in p.groups if (g.transform, g.r, g.s) == key) for p in parts
            ]
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
    shapes, kinds = (
        [(187, 250), (64, 64), (9000,), (70, 65), (130, 200)],
        ["transform", "transform", "transform", "plain", "transform"],
    )
    tensors = [random(*s, seed=i) for i, s in enumerate(shapes)]
    layout = Layout(shapes, kinds)
    work = layout.pack(tensors, layout.new("cpu"))
    plain = work.clone()
    before = [(r, s, b.clone(), t) for r, s, b, t in slots(layout, work)]
    assert {(r, s) for r, s, _, t in before if t} >= {
        (64, 64),
        (59, 64),
        (64, 58),
        (59, 58),
        (12, 64),
        (22, 64),
    }
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


# -- selection -----------------------------------------------------------------------------------


@quick
@given(
    st.lists(st.lists(st.integers(-4, 4), min_size=40, max_size=40), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_topk_with_ties(rows, k):
    """Top-k with many ties selects what the oracle selects."""
    a = torch.tensor(rows, dtype=torch.float32)
    assert top_k(a, k).tolist() == [slow_topk.topk(row, k) for row in a]


@pytest.mark.parametrize("k", [1, 32, 4095, 4096])
def test_topk_of_blocks(k):
    """Top-k of whole blocks selects what the oracle selects."""
    a = torch.cat([random(2, 4096), torch.zeros(1, 4096), random(1, 4096).bfloat16().float()])
    index = top_k(a, k)
    assert index.dtype == torch.int64 and index.shape == (4, k)
    assert index.tolist() == [slow_topk.topk(row, k) for row in a]


@pytest.mark.parametrize("r, s", [(64, 64), (1, 64), (59, 58), (14, 64), (64, 58)])
def test_topk_count_of_edge_blocks(r, s):
    """The number of values kept of an edge block is that of the oracle."""
    for k in (1, 16, 32, 4095, 4096):
        assert Group(r, s, True, 0, 1).k(k) == slow_topk.kept(k, r, s)


# -- values --------------------------------------------------------------------------------------


@quick
@given(
    st.lists(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=5, max_size=5
        ),
        min_size=1,
        max_size=3,
    )
)
def test_codes_follow_oracle(rows):
    """The value codes follow their oracles."""
    v = torch.tensor(rows, dtype=torch.float32)
    v = torch.where(v.abs() > 1e37, 1e37, v)  # max |v| is a finite bf16 number
    for code in ("fp32", "bf16", "int8"):
        data = quantize.encode(code, v)
        assert data.dtype == torch.uint8 and data.numel() == quantize.num_bytes(code, *v.shape)
        expected = torch.stack([slow_values.dequantised(row, code) for row in v])
        assert torch.equal(quantize.decode(code, data, *v.shape), expected)


def test_codes_int8_scales_before_values():
    """A section in int8 holds all scales, then all values."""
    v = torch.tensor([[127.0, -0.5, 1.5], [0.0, 0.0, 0.0], [1.0, -1.0, 0.25]])
    data = bytes(quantize.encode("int8", v).tolist())
    scales, codes = zip(*(slow_values.int8(row) for row in v), strict=True)
    as_bf16 = b"".join(struct.pack("<f", s)[2:] for s in scales)
    assert data == as_bf16 + b"".join(struct.pack("3b", *c) for c in codes)


@pytest.mark.parametrize("code", ["fp32", "bf16", "int8"])
def test_codes_empty(code):
    """An empty block is encoded and decoded."""
    empty = quantize.encode(code, torch.zeros(0, 3))
    assert quantize.decode(code, empty, 0, 3).shape == (0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("code", ["fp32", "bf16", "int8"])
def test_codes_not_finite_stays_visible(code, bad):
    """Values that are not finite stay visible after a round trip."""
    v = torch.tensor([[1.0, bad, 2.0]])
    assert not quantize.decode(code, quantize.encode(code, v), 1, 3).isfinite().all()


# -- wire ----------------------------------------------------------------------------------------


SHAPES, KINDS = (
    [(187, 250), (9000,), (3, 5), (70, 65), (5, 7)],
    ["transform", "transform", "transform", "plain", "dense"],
)


def workspace(seed: int = 0) -> tuple[Layout, torch.Tensor]:
    layout = Layout(SHAPES, KINDS)
    return layout, transform(
        layout,
        layout.pack([random(*s, seed=seed + i) for i, s in enumerate(SHAPES)], layout.new("cpu")),
    )


@pytest.mark.parametrize("code", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("k", [1, 33, 4096])
def test_payload_decodes_to_topk(code, k):
    """The decoded payload is each block's top-k, dequantised, at its place, and the whole dense
    part; nothing else.
    """
    layout, work = workspace()
    codec = Codec("dct", "topk", k, code)
    before = work.clone()
    data = sparse.encode_sparse(layout, codec, work)
    assert (
        torch.equal(work, before)
        and data.dtype == torch.uint8
        and data.numel() == sparse.sparse_bytes(layout, codec)
    )
    positions, found, dense = sparse.decode_sparse(layout, codec, data)
    assert len(set(positions.tolist())) == len(positions) == len(found)
    got = torch.zeros(layout.numel)
    got[positions] = found
    for (r, s, x, _), (_, _, y, _) in zip(slots(layout, work), slots(layout, got), strict=True):
        where = slow_topk.topk(x, slow_topk.kept(k, r, s))
        expected = torch.zeros(r * s)
        expected[where] = slow_values.dequantised(x.reshape(-1)[where], code)
        assert torch.equal(y.reshape(-1), expected)
    assert int((layout.dense_part(got) != 0).sum()) == 0
    assert torch.equal(
        dense,
        slow_values.dequantised(layout.dense_part(work), "fp32" if code == "fp32" else "bf16"),
    )


def test_payload_bytes_by_hand():
    """The bytes of a payload are those counted by hand. One full block, one 14 x 64 edge block, 8
    dense elements: k = 32 and ceil(32 * 896 / 4096) = 7 values.
    """
    layout = Layout([(5000,)], ["transform"])
    # 53 flags, 32 symbols, 32 x 5 low bits in 4 and 1; 12 flags, 7 symbols, 7 x 5 low bits
    positions = (7 + 8 + 16 + 4) + (2 + 2 + 4 + 1)
    assert (
        sparse.sparse_bytes(layout, Codec("dct", "topk", 32, "int8"))
        == 2 + 32 + 2 + 7 + positions + 8 * 2
    )
    assert (
        sparse.sparse_bytes(layout, Codec("dct", "topk", 32, "fp32"))
        == 32 * 4 + 7 * 4 + positions + 8 * 4
    )


def test_payload_empty():
    """A layout without elements has an empty payload."""
    layout = Layout([(0, 5)], ["transform"])
    data = sparse.encode_sparse(layout, Codec("dct", "topk"), layout.new("cpu"))
    positions, found, dense = sparse.decode_sparse(layout, Codec("dct", "topk"), data)
    assert (len(data), len(positions), len(found), len(dense)) == (0, 0, 0, 0)


def test_header_bytes_by_hand():
    """The bytes of a header are those written out by hand."""
    body = torch.arange(5, dtype=torch.uint8)
    header = frame.Header(
        digest=0x0102030405060708, step=9, weight=2.5, loss=1.5, flags=1, kind=3, total=11, number=7
    )
    message = bytes(seal(header, body).tolist())
    fields = (5, 3, 1, 0x0102030405060708, 9, 7, 5, 11, 2.5, 1.5, zlib.crc32(bytes(range(5))))
    head = b"FDX2" + struct.pack("<BBHQIIQQffI", *fields)
    assert message == head + struct.pack("<I", zlib.crc32(head)) + bytes(range(5))
    assert len(head) + 4 == frame.HEADER.size == 56


def test_header_round_trip():
    """A header and its body come back."""
    header = frame.Header(digest=2**64 - 1, step=2**32 - 1, weight=0.25, loss=float("nan"))
    got, body = unseal(seal(header, torch.arange(7, dtype=torch.uint8)), header, "island 1")
    assert (
        body.tolist() == list(range(7))
        and got.weight == 0.25
        and math.isnan(got.loss)
        and got.flags == 0
    )


@quick
@given(st.data())
def test_header_damage_refused(data):
    """Every flipped bit and every truncation is refused."""
    header = frame.Header(digest=7, step=3)
    message = seal(header, torch.arange(40, dtype=torch.uint8))
    unseal(message, header, "island 1")
    torn = message.clone()
    torn[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(frame.WireError, match="island 1"):
        unseal(torn, header, "island 1")
    with pytest.raises(frame.WireError, match="island 1"):
        unseal(message[: data.draw(st.integers(0, len(message) - 1))].clone(), header, "island 1")


def test_header_other_digest_or_step_refused():
    """Another digest or step is refused with both values."""
    message = seal(frame.Header(digest=7, step=3), torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(frame.Mismatch, match="0000000000000007.*0000000000000008"):
        unseal(message, frame.Header(8, 3), "island 1")
    with pytest.raises(frame.Mismatch, match="step 4.*step 5"):
        unseal(message, frame.Header(7, 4), "island 1")


def test_payload_golden_bytes():
    """The bytes of a small payload, written down once: a change here is a new wire version."""
    layout = Layout([(64, 64), (3,)], ["plain", "plain"])
    block = torch.zeros(64, 64)
    block[0, 5], block[1, 0], block[63, 63] = 127.0, -2.5, 1.5
    work = layout.pack([block, torch.tensor([1.0, -2.0, 0.5])], layout.new("cpu"))
    body = sparse.encode_sparse(layout, Codec("none", "topk", 3, "int8"), work)
    # three positions as numbers of 12 bits: the low bytes, then the nibbles above them
    expected = "803f" + "7ffe02" + "0540ff" + "000f" + "803f00c0003f"
    assert bytes(body.tolist()).hex() == expected
    assert slow_wire.positions([[5, 64, 4095]], 4096).hex() == "0540ff000f"
