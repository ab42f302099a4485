"""Selection by a threshold over whole tensors: what is chosen, its bytes, what stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_demo import Channel, Codec, preset
from fsdp_demo.channels.codec import ChannelCodec
from fsdp_demo.compression import blocks, sparse, threshold, windows
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.compression.selection import magnitudes

from ..oracles.threshold import passing, reached
from ..support.sections import whole

SHAPES, KINDS = [(200, 130), (64, 640), (5000,), (70, 70), (5000,)], ["plain", "transform"] * 2
KINDS.append("plain")  # edge blocks of one size, too
LAYOUT = Layout(SHAPES, KINDS)
SPARSE = preset("sparse_loco").channels[0]


def tensors(seed: int, scale: float = 1.0) -> torch.Tensor:
    """A workspace whose blocks are unlike: some busy, some quiet."""
    g = torch.Generator().manual_seed(seed)
    made = [
        scale
        * torch.randn(s, generator=g)
        * torch.rand(s[0], generator=g).pow(6).view(-1, *[1] * (len(s) - 1))
        for s in SHAPES
    ]
    return LAYOUT.pack(made, LAYOUT.new("cpu"))


def section(every: int = 1, **codec: object) -> ChannelCodec:
    made = replace(SPARSE.codec, select="threshold", threshold_every=every, **codec)
    channel: Channel = replace(SPARSE, codec=made)
    return ChannelCodec(LAYOUT, channel, 2)


def counts(body: torch.Tensor, codec: Codec) -> list[int]:
    """The numbers of values sent of each block."""
    coded = sparse.split(LAYOUT, codec, [body])
    return torch.cat([c.positions[0][0].diff() for c in coded.values()]).tolist()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("level", [-1, 0, 1])
def test_threshold_follows_oracle(level: int, ties: bool) -> None:
    """The chosen values reach the level, the largest do where more reach it than fit, and ties go
    to the lower positions.
    """
    g = torch.Generator().manual_seed(level + 1)
    values = torch.randn(600, generator=g)
    values = (values * 3).round() if ties else values
    values[:20] = 0.0
    most = 50
    wanted = {-1: reached(values, most), 0: 0.0, 1: float(values.abs().max())}[level]
    bits = magnitudes(torch.tensor([wanted]))[0] if level >= 0 else torch.tensor(-1)
    bits = bits.to(torch.int32).clone()
    mask = threshold.threshold(magnitudes(values), most, bits)
    assert mask.nonzero().view(-1).tolist() == passing(values, most, wanted)[0]
    assert int(bits) == int(magnitudes(torch.tensor([wanted]))[0])


@pytest.mark.parametrize("code", ["fp32", "bf16", "int8", "2bit", "1bit"])
@pytest.mark.parametrize("k", [1, 3, 32, 64, 4096])
def test_threshold_bytes_bound_and_conserve(k: int, code: str) -> None:
    """A section has the size that the planner counts, busy blocks send more than `topk`, all of
    them together never, and what is sent and what stays make what was there.
    """
    made, before = section(topk=k, value_dtype=code), tensors(1)
    work = before.clone()
    body, _ = made.encode(work, 29)
    assert body is not None and body.numel() == made.num_bytes and torch.equal(work, before)
    sent = whole(made.received([body], [1.0], 29))
    made.subtract(work, body, [], 29, 1.0)
    assert torch.equal(work, before - sent)
    number = counts(body, made.codec)
    for g in LAYOUT.groups:
        assert sum(number[g.start : g.stop]) <= g.count * g.k(k)
    if k == 32:
        assert max(number) > 32 > min(number)


def test_threshold_is_kept_for_n_exchanges() -> None:
    """Between two estimates smaller values send less and larger ones no more than fit; then the
    threshold follows.
    """
    made = section(every=3, value_dtype="fp32")
    total = {}
    for number, scale in enumerate((1.0, 0.5, 4.0, 0.5)):
        body, _ = made.encode(tensors(1, scale), 30 * (number + 1) - 1)
        assert body is not None
        total[number] = sum(counts(body, made.codec))
    assert total[1] < total[0] == total[2] == total[3]


def test_threshold_of_zeros_sends_nothing() -> None:
    """Tensors of zeros send no value, in codes without a zero, too."""
    made = section(value_dtype="1bit")
    body, _ = made.encode(LAYOUT.new("cpu"), 29)
    assert body is not None and sum(counts(body, made.codec)) == 0
    assert not whole(made.received([body], [1.0], 29)).any()


@pytest.mark.parametrize("seed", range(5))
def test_threshold_any_bytes_decode_within_bounds(seed: int) -> None:
    """Bytes that nobody has encoded are decoded to as many finite or other values, inside the
    blocks.
    """
    made, g = section(value_dtype="1bit"), torch.Generator().manual_seed(seed)
    wrong = torch.randint(256, (made.num_bytes,), generator=g, dtype=torch.uint8)
    assert whole(made.received([wrong, wrong], [1.0, 1.0], 29)).numel() == LAYOUT.numel
    number = counts(wrong, made.codec)
    for group in LAYOUT.groups:
        assert sum(number[group.start : group.stop]) <= group.count * group.k(made.codec.topk)


@pytest.mark.parametrize("code", ["fp32", "1bit"])
def test_threshold_windows_decode_as_the_whole(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that are decoded one after the other hold what the whole holds, the last ones nothing
    where the first have taken all room.
    """
    for module, name, size in ((blocks, "WINDOW", 8), (blocks, "CACHED", 4), (windows, "CODED", 1)):
        monkeypatch.setattr(module, name, size)
    layout = Layout([(64 * 4096,)], ["plain"])
    made = ChannelCodec(layout, replace(section(topk=3, value_dtype=code).channel), 2)
    g = torch.Generator().manual_seed(0)
    work = torch.randn(layout.numel, generator=g)
    for quiet in (0, 24 * 4096):
        work[layout.numel - quiet :] *= 1e-3
        body, _ = made.encode(work, 29)
        assert body is not None and len(layout.windows("cpu")) == 8
        (coded,) = sparse.split(layout, made.codec, [body]).values()
        place, value = sparse.decode_window(layout.whole(coded.group), coded, made.codec)
        whole_ = torch.zeros(64, 4096).scatter_add_(1, place[0], value[0])
        mean = made.received([body, body], [1.0, 1.0], 29)
        out = [mean.fill(w, torch.empty(w.numel)) for w in layout.windows("cpu")]
        assert torch.equal(torch.cat(out), whole_.view(-1))
        assert int((whole_ != 0).sum()) == 3 * 64
        assert not whole_[64 - quiet // 4096 :].any() or not quiet


def test_threshold_bytes_are_frozen() -> None:
    """The layout of docs/wire-format.md#tensor-positions, byte for byte: values, numbers of two
    blocks, bitmap, low bits.
    """
    layout, codec = Layout([(8192,)], ["plain"]), Codec("none", "threshold", 4, "fp32")
    work = layout.new("cpu")
    sent = {0: 1.0, 256: -2.0, 257: 3.0, 512: 4.0, 4096 + 5: -5.0, 8191: 6.0}
    for i, value in sent.items():
        work[i] = value
    body = bytes(sparse.encode_sparse(layout, codec, work)).hex()
    values = "0000803f000000c000004040000080400000a0c00000c040" + 16 * "0"
    assert body == values + "04000200" + "170808" + "0000010005ff0000" + "26"
