"""The payload of a sparse channel and the header of a message, against slow reference versions and
by hand.
"""

from __future__ import annotations

import math

import pytest
import torch

from fsdp_demo.compression import sparse
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.config.parts import Codec
from fsdp_demo.peers import header as frame

from ..oracles import quantise as slow_values
from ..oracles import topk as slow_topk
from ..oracles import wire as slow_wire
from ..support.sealed import seal, unseal
from ..support.sections import decode_sparse
from ..support.transforms import random, transform
from .test_codecs_oracle import slots

SHAPES = [(187, 250), (9000,), (3, 5), (70, 65), (5, 7)]
KINDS = ["transform", "transform", "transform", "plain", "dense"]


def workspace(seed: int = 0) -> tuple[Layout, torch.Tensor]:
    layout = Layout(SHAPES, KINDS)
    tensors = [random(*s, seed=seed + i) for i, s in enumerate(SHAPES)]
    return layout, transform(layout, layout.pack(tensors, layout.new("cpu")))


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
    assert torch.equal(work, before)
    assert data.dtype == torch.uint8
    assert data.numel() == sparse.sparse_bytes(layout, codec)
    positions, found, dense = decode_sparse(layout, codec, data)
    assert len(set(positions.tolist())) == len(positions) == len(found)
    got = torch.zeros(layout.numel)
    got[positions] = found
    for (r, s, x, _), (_, _, y, _) in zip(slots(layout, work), slots(layout, got), strict=True):
        where = slow_topk.topk(x, slow_topk.kept(k, r, s))
        expected = torch.zeros(r * s)
        expected[where] = slow_values.dequantised(x.reshape(-1)[where], code)
        assert torch.equal(y.reshape(-1), expected)
    assert int((layout.dense_part(got) != 0).sum()) == 0
    exact = "fp32" if code == "fp32" else "bf16"
    assert torch.equal(dense, slow_values.dequantised(layout.dense_part(work), exact))


def test_payload_bytes_by_hand():
    """The bytes of a payload are those counted by hand. One full block, one 14 x 64 edge block, 8
    dense elements: k = 32 and ceil(32 * 896 / 4096) = 7 values.
    """
    layout = Layout([(5000,)], ["transform"])
    # 53 flags, 32 symbols, 32 x 5 low bits in 4 and 1; 12 flags, 7 symbols, 7 x 5 low bits
    positions = (7 + 8 + 16 + 4) + (2 + 2 + 4 + 1)
    int8, fp32 = (Codec("dct", "topk", 32, code) for code in ("int8", "fp32"))
    assert sparse.sparse_bytes(layout, int8) == 2 + 32 + 2 + 7 + positions + 8 * 2
    assert sparse.sparse_bytes(layout, fp32) == 32 * 4 + 7 * 4 + positions + 8 * 4


def test_payload_empty():
    """A layout without elements has an empty payload."""
    layout = Layout([(0, 5)], ["transform"])
    data = sparse.encode_sparse(layout, Codec("dct", "topk"), layout.new("cpu"))
    positions, found, dense = decode_sparse(layout, Codec("dct", "topk"), data)
    assert (len(data), len(positions), len(found), len(dense)) == (0, 0, 0, 0)


def test_header_round_trip():
    """A header and its body come back."""
    header = frame.Header(digest=2**48 - 1, step=2**32 - 1, weight=0.25, loss=float("nan"))
    got, body = unseal(seal(header, torch.arange(7, dtype=torch.uint8)), header, "island 1")
    assert body.tolist() == list(range(7))
    assert got.weight == 0.25
    assert math.isnan(got.loss)
    assert got.flags == 0


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
