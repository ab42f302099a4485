"""Positions as bits: against an oracle of strings, by hand, their sizes, and bytes that nobody has
encoded.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_demo.compression import formats, sparse
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.compression.sparse import Form, shortest_form
from fsdp_demo.config.parts import BLOCK, Codec

from ..oracles import wire
from ..support.sections import decode_sparse

quick = settings(deadline=None, max_examples=60, derandomize=True)
# elements of whole and of edge blocks
SIZES = (1, 2, 3, 63, 64, 100, 640, 3712, 4096)


def uint8(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def chosen(rows: int, n: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(rows, n, generator=generator)
    return keys.argsort(1)[:, :k].sort(1).values


def coded(f: Form, index: torch.Tensor) -> torch.Tensor:
    return torch.cat(sparse.encode_positions(f, index))


def back(f: Form, data: torch.Tensor, rows: int) -> torch.Tensor:
    return sparse.decode_positions(f, f.split(data, rows), rows)


@st.composite
def sets(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    """Blocks of n elements and k positions in each: spread evenly, in a row, or with equal gaps."""
    n = draw(st.sampled_from(SIZES))
    k = draw(st.integers(1, min(n, 130)) | st.just(n))
    index = chosen(draw(st.integers(1, 19)), n, k, draw(st.integers(0, 2**31)))
    for row in index:
        shape = draw(st.sampled_from(("even", "first", "last", "equal gaps")))
        if shape == "first":
            row.copy_(torch.arange(k))
        elif shape == "last":
            row.copy_(torch.arange(n - k, n))
        elif shape == "equal gaps":
            row.copy_(torch.arange(k) * (n // k))
    return n, index


# ---- a change here is a new wire version -------------------------------------------------------


def test_positions_bytes_by_hand() -> None:
    """The bytes of a few positions are those written out by hand. Four of 4096: 8 low bits each; h
    = 0, 0, 0, 15, so bits 0, 1, 2 and 18 of a bitmap of 19.
    """
    f = shortest_form(4096, 4)
    assert f == Form(4096, 4, low=8, flags=7) and f.planes == [7, 8, 32]
    data = coded(f, torch.tensor([[1, 2, 255, 4095]]))
    # flags 1000001; symbols 3 3 0 (all three) and 0 (the first of three)
    assert bytes(data.tolist()).hex() == "41" + "0f" + "0102ffff"
    # h = 0, 1, 1, 2: bits 0, 2, 3, 5, so of the first three the second is not set, nor of the next
    data = coded(f, torch.tensor([[0, 256, 257, 512]]))
    assert bytes(data.tolist()).hex() == "03" + "77" + "00000100"
    # one of 64 goes as it is, in 6 bits: 4 and 2
    assert shortest_form(64, 1) == Form(64, 1, low=6, flags=0)
    assert (
        bytes(coded(shortest_form(64, 1), torch.tensor([[63], [17], [32]])).tolist()).hex()
        == "1f00" + "27"
    )


GOLDEN = {
    (4096, 32): (5, 53), (4096, 64): (4, 107), (4096, 90): (3, 201), (4096, 8): (7, 13),
    (4096, 3): (12, 0), (4096, 4096): (0, 2731), (640, 5): (5, 8),
}  # fmt: skip


@pytest.mark.parametrize(("n", "k"), GOLDEN)
def test_positions_form_golden(n: int, k: int) -> None:
    """The form of positions depends on the sizes n and k alone."""
    f = shortest_form(n, k)
    assert (f.low, f.flags) == GOLDEN[n, k] == wire.low_and_flags(n, k)


@quick
@given(sets())
def test_positions_follow_oracle(case: tuple[int, torch.Tensor]) -> None:
    """The bytes of positions are those of the oracle, and they come back."""
    n, index = case
    f = shortest_form(n, index.shape[1])
    data = coded(f, index)
    assert data.dtype == torch.uint8 and data.numel() == f.num_bytes(len(index))
    assert bytes(data.tolist()) == wire.positions(index.tolist(), n)
    found = back(f, data, len(index))
    assert found.dtype == torch.int64 and torch.equal(found, index)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("low", [0, 1, 2])
def test_positions_every_small_set(k: int, low: int) -> None:
    """Every set of positions in a small block comes back, all in one go: one block does not reach
    into the next.
    """
    index = torch.tensor(wire.all_sets(6, k))
    f = Form(6, k, low, -(-(k + (5 >> low)) // 3))
    assert torch.equal(back(f, coded(f, index), len(index)), index)


@quick
@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 70), st.integers(0, 2**31))
def test_positions_pack_few_bits(size: int, count: int, seed: int) -> None:
    """Numbers of few bits are packed in little-endian order and come back."""
    codes = torch.randint(
        1 << size, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    data = formats.pack(codes, size)
    number = sum(c << size * i for i, c in enumerate(codes.tolist()))
    assert bytes(data.tolist()) == number.to_bytes((size * count + 7) // 8, "little")
    assert torch.equal(formats.unpack(data, size)[:count], codes)


# ---- sizes -------------------------------------------------------------------------------------


def test_positions_at_most_twelve_bits() -> None:
    """A position takes at most twelve bits."""
    for n in (*range(1, 200), 640, 896, 1024, 3712, 4032, 4095, 4096):
        for k in {*range(1, min(n, 140) + 1), n // 2 or 1, n - 1 or 1, n}:
            f = shortest_form(n, k)
            assert f.bits <= 12 * k
            for rows in (1, 2, 3, 5, 8):
                assert f.num_bytes(rows) <= (12 * rows * k + 7) // 8, (n, k, rows)


@pytest.mark.parametrize(
    ("code", "k", "most"),
    [("int8", 32, 2.2), ("int8", 64, 2.0), ("1bit", 32, 1.3), ("1bit", 90, 1.1)],
)
def test_positions_bytes_per_coefficient(code: str, k: int, most: float) -> None:
    """The bytes of a coefficient in real sections, without headers, have a bound that holds for any
    positions.
    """
    layout = Layout([(512, 512)], ["plain"])
    data = sparse.encode_sparse(layout, Codec("none", "topk", k, code), torch.randn(layout.numel))
    assert data.numel() / (64 * k) <= most


def test_positions_close_to_entropy() -> None:
    """The bits of a position are within 0.6 of the entropy."""
    for k in (8, 16, 32, 64, 90, 128, 256):
        entropy = math.log2(math.comb(BLOCK, k)) / k
        assert entropy < shortest_form(BLOCK, k).bits / k < entropy + 0.6


# ---- cut ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5, 32, 33])
def test_positions_windows_of_eight_blocks(k: int) -> None:
    """A window of a multiple of eight blocks is written and read by itself."""
    f, index = shortest_form(BLOCK, k), chosen(29, BLOCK, k)
    planes = sparse.encode_positions(f, index)
    cuts = (0, 8, 24, 29)
    for a, b in zip(cuts, cuts[1:], strict=False):
        part = [p[a * n // 8 : (b * n + 7) // 8] for p, n in zip(planes, f.planes, strict=True)]
        assert all(map(torch.equal, part, sparse.encode_positions(f, index[a:b])))
        assert torch.equal(sparse.decode_positions(f, part, b - a), index[a:b])


def test_positions_batch_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of blocks that are coded at once changes nothing. Also where several replicas are
    decoded together, and where an edge block is narrower.
    """
    from fsdp_demo.compression import blocks, windows

    shapes, kinds = [(200, 250), (90_000,)], ["transform", "plain"]
    codec, datas, wanted = Codec("dct", "topk", 9, "int8"), [], []
    layout = Layout(shapes, kinds)
    for r in range(3):
        work = layout.pack(
            [torch.randn(s, generator=torch.Generator().manual_seed(r)) for s in shapes],
            layout.new("cpu"),
        )
        datas.append(sparse.encode_sparse(layout, codec, work))
        wanted.append(decode_sparse(layout, codec, datas[-1])[:2])
    for window, coded_at_once in ((8, 1), (8, 300), (16, 1 << 17)):
        monkeypatch.setattr(blocks, "WINDOW", window)
        monkeypatch.setattr(windows, "CODED", coded_at_once)
        again = Layout(shapes, kinds)
        split = sparse.split(again, codec, datas)
        found: list[list[torch.Tensor]] = [[], [], []]
        for s in windows.stretches(again.windows("cpu"), torch.device("cpu"), codec.topk, 3):
            assert s.group is not None
            place, _ = sparse.decode_window(s, split[s.group], codec)
            start = torch.arange(s.begin, s.end, BLOCK)[:, None]
            for r in range(3):
                found[r].append((place[r] + start).view(-1))
        for r, (place, _) in enumerate(wanted):
            assert torch.equal(torch.cat(found[r]), place)
            assert torch.equal(decode_sparse(again, codec, datas[r])[0], place)


# ---- what nobody has encoded -------------------------------------------------------------------

HOSTILE = [0x00, 0xFF, 0xAA, 0x55, 0x0F, 0xC0, 0x03]


@quick
@given(
    st.sampled_from(SIZES),
    st.integers(1, 130),
    st.integers(1, 19),
    st.sampled_from([None, *HOSTILE]),
    st.integers(0, 2**31),
)
def test_positions_of_any_bytes_inside_block(n, k, rows: int, byte: int | None, seed: int) -> None:
    """Any bytes are decoded to positions inside the block."""
    f = shortest_form(n, min(k, n))
    data = torch.full((f.num_bytes(rows),), byte or 0, dtype=torch.uint8)
    if byte is None:
        generator = torch.Generator().manual_seed(seed)
        data = torch.randint(256, data.shape, dtype=torch.uint8, generator=generator)
    found = back(f, data, rows)
    assert found.shape == (rows, f.k) and 0 <= int(found.min()) and int(found.max()) < n


@quick
@given(st.integers(0, 2**31))
def test_positions_damaged_section_inside_workspace(seed: int) -> None:
    """A damaged section is decoded inside its workspace. A checksum has let it through, say: it is
    as long as it must be, and so is what it makes.
    """
    generator = torch.Generator().manual_seed(seed)
    layout, codec = Layout([(124, 122), (9000,)], ["transform", "plain"]), Codec("dct", "topk", 7)
    good = sparse.encode_sparse(layout, codec, torch.randn(layout.numel, generator=generator))
    for data in (
        good ^ (torch.randint(256, good.shape, dtype=torch.uint8, generator=generator) & 0x11),
        torch.randint(256, good.shape, dtype=torch.uint8, generator=generator),
    ):
        places, found, dense = decode_sparse(layout, codec, data)
        right, _, _ = decode_sparse(layout, codec, good)
        assert places.shape == right.shape == found.shape and len(dense) == layout.num_dense
        assert 0 <= int(places.min()) and int(places.max()) < layout.num_blocks * BLOCK
        assert torch.equal(places // BLOCK, right // BLOCK)  # each in its own block
