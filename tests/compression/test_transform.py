"""The transform of blocks, with products in fp32 and bf16, and what stands beside it in a step:
windows, top-k, feedback and the mean.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import ExchangeConfig, preset
from fsdp_demo.channels.channel import ChannelPayload, ChannelRunner, Incoming, Received
from fsdp_demo.channels.state import Placement
from fsdp_demo.compression import blocks as blocks_
from fsdp_demo.compression import dense as vectors
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.compression.transform import Transform, matrix, onednn
from fsdp_demo.compression.windows import ContiguousViews
from fsdp_demo.config.parts import BLOCK, Codec
from fsdp_demo.hosts.torch_params import TorchHost

from ..support.sections import decode_sparse, whole
from ..support.transforms import random, transform

SHAPES = [(320, 192), (187, 250), (9000,), (70, 65), (5, 7)]
KINDS = ["transform", "transform", "transform", "plain", "dense"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that a few blocks are several."""
    monkeypatch.setattr(blocks_, "WINDOW", 8)
    monkeypatch.setattr(blocks_, "CACHED", 4)
    monkeypatch.setattr(vectors, "STEP", 4)


# ---- windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("active_copies", [1, 2, 3])
def test_windows_cover_workspace(active_copies: int, small: None) -> None:
    """The windows are the workspace: they follow each other without gaps, as do their parts, and
    packing them one by one is packing the whole.
    """
    tensors = [random(*s, seed=i) for i, s in enumerate(SHAPES)]
    tensors[0] = tensors[0].t().contiguous().t()  # in another order in memory
    for active_copy in range(active_copies):
        layout = Layout(SHAPES, KINDS, active_copy, active_copies)
        windows = layout.windows("cpu")
        whole = layout.pack(tensors, torch.full((layout.numel,), torch.nan))
        assert [w.begin for w in windows] == [0, *(w.end for w in windows[:-1])]
        assert windows[-1].end == layout.numel
        with ContiguousViews(tensors) as memory:
            for w in windows:
                assert [p.begin for p in w.inner] == [w.begin, *(p.end for p in w.inner[:-1])]
                assert w.inner[-1].end == w.end
                for part in w.inner:
                    assert torch.equal(
                        part.pack(memory, torch.full((part.numel,), torch.nan)), part.of(whole)
                    )


# ---- the transform -----------------------------------------------------------------------------


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_transform_add_and_inverse(products: str, small: None) -> None:
    """The products of the transform are those of the definition. Forward into an accumulator and
    back; bf16 within its rounding of the exact, on blocks of every kind.
    """
    layout = Layout(SHAPES, KINDS)
    work = layout.pack([random(*s, seed=i) for i, s in enumerate(SHAPES)], layout.new("cpu"))
    exact = transform(layout, work.clone())
    near = 2e-6 if products == "fp32" else 4e-2
    found, start = torch.ones_like(work), work.clone()
    with Transform("dct", "cpu", products) as made:
        for w in layout.windows("cpu"):
            for part in w.inner:
                room = made.room(part).copy_(part.of(start))
                made.add(part.group, room, part.of(found), 0.5, 2.0)
    inside = exact != 0
    assert float((found - (0.5 + 2.0 * exact))[inside].abs().max()) < 2 * near
    back = transform(layout, exact.clone(), inverse=True, products=products)
    assert float((back - work).abs().max()) < near


def test_transform_sparse_inverse() -> None:
    """The inverse of a few coefficients, as a sum of outer products, is the exact inverse."""
    place = torch.stack(
        [torch.randperm(BLOCK, generator=torch.Generator().manual_seed(i))[:20] for i in range(3)]
    )
    values, layout = random(3, 20), Layout([(64, 192)], ["transform"])
    dense = torch.zeros(3, BLOCK).scatter_(1, place, values).view(-1)
    exact = transform(layout, dense, inverse=True)
    for products, near in (("fp32", 1e-5), ("bf16", 2e-2)):
        with Transform("dct", "cpu", products) as made:
            found = made.sparse_inverse(place, values, torch.empty(3 * BLOCK))
        assert float((found - exact).abs().max()) < near


def test_transform_onednn_products_fp32() -> None:
    """oneDNN, where it is chosen, makes what MKL makes, to rounding; the setting is put back."""
    before = (
        torch.backends.mkldnn.matmul.fp32_precision
        if hasattr(torch.backends.mkldnn, "matmul")
        else None
    )
    assert onednn() in (True, False)
    layout = Layout([(512, 512)], ["transform"])
    work = random(layout.numel)
    exact = torch.matmul(
        torch.matmul(matrix("dct", 64).double(), work.view(-1, 64, 64).double()),
        matrix("dct", 64).double().t(),
    )
    assert (
        float((transform(layout, work.clone()).view(-1, 64, 64).double() - exact).abs().max())
        < 1e-5
    )
    if before is not None:
        assert torch.backends.mkldnn.matmul.fp32_precision == before


# ---- a channel ---------------------------------------------------------------------------------


def channel(config, size, shapes=SHAPES) -> tuple[ChannelRunner, list[nn.Parameter]]:
    named = [(f"layers.0.{i}.weight", nn.Parameter(torch.zeros(s))) for i, s in enumerate(shapes)]
    made = ChannelRunner(
        config.channels[0],
        Placement(TorchHost([fsdp_demo.base_optimizer(config, named)]), islands=size),
    )
    made.start()
    return made, [p for _, p in named]


@torch.no_grad()
def step(made: ChannelRunner, parameters: list[nn.Parameter], seed: int) -> ChannelPayload:
    for i, p in enumerate(parameters):
        p.grad = random(*p.shape, seed=100 * seed + i)
    out = made.encode(0, made.accumulate())
    made.subtract(out)
    return out


@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("code", ["int8", "fp32", "2bit", "1bit"])
def test_feedback_subtracts_what_was_sent(products: str, code: str, small: None) -> None:
    """The accumulator before it was sent, less the decoded section, is the accumulator after, bit
    for bit.
    """
    config = preset("demo", topk=9, value_dtype=code, **{"codec.transform_precision": products})
    (one, p), (two, q) = channel(config, 2), channel(config, 2)
    sent = step(one, p, 1)
    for i, parameter in enumerate(q):
        parameter.grad = random(*parameter.shape, seed=100 + i)
    two.accumulate()
    before = two.accumulator
    places, values, dense = decode_sparse(one.layout, config.channels[0].codec, sent.body)
    expected = before.clone()
    expected[places] -= values
    one.layout.dense_part(expected).sub_(dense)
    assert torch.equal(one.accumulator, expected)


@pytest.mark.parametrize(
    "weights", [[1.0, 1.0, 1.0], [1.0, 0.0, 2.5], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
)
@pytest.mark.parametrize(
    "kind, clip", [("senders", "none"), ("replicas", "none"), ("senders", "median_norm")]
)
def test_reduce_windows_equal_plain_sum(kind, clip: str, weights: list[float], small: None) -> None:
    """The mean by windows is that of a plain sum. Window by window as element by element, and as
    few terms; also where blocks are many for the cache.
    """
    config = preset("demo", topk=40, **{"reducer.mean_over": kind, "reducer.clip": clip})
    made, parameters = channel(config, 3)
    bodies = [step(made, parameters, seed).body for seed in range(3)]
    section = made.section
    found = whole(section.received(bodies, weights, 0))
    total, count = torch.zeros(made.layout.numel), torch.zeros(made.layout.numel)
    for body, w in zip(bodies, weights, strict=True):
        places, values, dense = decode_sparse(made.layout, section.codec, body)
        if w:
            total[places] += w * values
            count[places] += w * (values != 0)
            made.layout.dense_part(total).add_(dense, alpha=w)
    made.layout.dense_part(count).fill_(sum(weights))
    expected = total / (
        count.masked_fill(count == 0, 1.0) if kind == "senders" else max(sum(weights), 1e-9)
    )
    if clip == "none" or sum(w > 0 for w in weights) < 2:
        assert torch.allclose(found, expected, atol=1e-6)
    mean = section.received(bodies, weights, 0)
    for w in made.windows:
        terms = mean.terms(w)
        if terms is not None:
            dense = torch.zeros(w.count, BLOCK).scatter_add_(1, *terms)
            assert torch.equal(dense.view(-1), w.of(found))


def test_transform_bf16_follows_fp32(small: None) -> None:
    """Steps with bf16 products follow those with fp32. The same steps with both: nearly the same
    choice, and gradients whose signs nearly all agree.
    """
    configs = [
        preset("demo", topk=8, **{"codec.transform_precision": products})
        for products in ("fp32", "bf16")
    ]
    found = []
    for config in configs:
        made, parameters = channel(config, 1, [(512, 512)])
        sent = step(made, parameters, 1)
        with torch.no_grad():
            made.apply(Incoming(sent, Received([sent.body], [], [1.0]), [True]))
        places, _, _ = decode_sparse(made.layout, config.channels[0].codec, sent.body)
        found.append((set(places.tolist()), parameters[0].grad.clone()))
    (exact, signs), (near, other) = found
    assert len(exact & near) / len(exact) > 0.97 and float((signs == other).float().mean()) > 0.97


@torch.no_grad()
def test_no_transform_in_both_directions() -> None:
    """A parameter that `no_transform` names is not transformed back either: with bf16 products,
    too, its gradient is what was sent, where it was sent.
    """
    changes = {"applier.sign": False, "codec.transform_precision": "bf16"}
    config = preset("demo", topk=8, **changes, **{"momentum.no_transform": ["*embed*"]})
    embedding = nn.Parameter(torch.zeros(128, 64))
    optimizer = fsdp_demo.base_optimizer(config, [("embed_tokens.weight", embedding)])
    made = ChannelRunner(config.channels[0], Placement(TorchHost([optimizer])))
    made.start()
    sent = step(made, [embedding], 1)
    assert [g.transform for g in made.layout.groups] == [False]
    made.apply(Incoming(sent, Received([sent.body], [], [1.0]), [True]))
    places, values, _ = decode_sparse(made.layout, config.channels[0].codec, sent.body)
    expected = torch.zeros(128 * 64)
    expected[places] = values
    assert torch.equal(embedding.grad.view(-1), expected)


def test_transform_precision_in_config() -> None:
    """`codec.transform_precision` is part of the configuration and its digest."""
    config = preset("demo", **{"codec.transform_precision": "bf16"})
    assert ExchangeConfig.from_yaml(config.to_yaml()) == config
    assert config.digest() != preset("demo").digest()
    with pytest.raises(ValueError, match=r"codec.transform_precision='fp16'.*fp32.*bf16"):
        Codec("dct", "topk", transform_precision="fp16")
    with pytest.raises(ValueError, match="about the transform"):
        Codec("none", "topk", transform_precision="bf16")
