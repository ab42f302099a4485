"""What is known of the processor, and that the way in which blocks are read changes no bit."""

from __future__ import annotations

import pytest
import torch

from fsdp_demo.compression import blocks, transform
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.compression.transform import Transform
from fsdp_demo.compression.windows import ContiguousViews

from ..support.transforms import random

SHAPES = [(192, 1088), (704, 128), (187, 250), (9000,), (70, 65), (5, 7), (64, 640)]


def test_processor_decides_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor alone decides whether bf16 products are used, so islands on like machines
    decode alike.
    """
    found = {"amx_tile": False, "avx512_bf16": True}
    monkeypatch.setattr(transform, "_supports", found.__getitem__)
    for name, amx, fast in (
        ("Intel(R) Xeon(R) Processor", False, False),
        ("Intel(R) Xeon(R) Processor", True, True),
        ("AMD EPYC 9J14", False, True),
    ):
        found["amx_tile"] = amx
        monkeypatch.setattr(transform, "cpu_name", lambda name=name: name)
        transform.fast_bf16.cache_clear()
        assert transform.fast_bf16() == fast and ("AMX" in transform.kernels()) == amx
        assert transform.intel() == ("Intel" in name)
    monkeypatch.undo()
    transform.fast_bf16.cache_clear()


@pytest.mark.parametrize("beta, gain", [(0.999, 1.0), (0.5, 2.0)])
def test_processor_block_access_same_bits(beta, gain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way in which blocks are read changes no bit."""
    monkeypatch.setattr(blocks, "CACHED", 16)
    layout = Layout(SHAPES, ["transform"] * 5 + ["dense", "plain"])
    tensors = [random(*s, seed=i) for i, s in enumerate(SHAPES)]
    before, read = random(layout.numel, seed=9), 0
    found, packed = before.clone(), before.clone()
    with ContiguousViews(tensors) as memory, Transform("dct", "cpu") as made:
        for part in (part for w in layout.windows("cpu") for part in w.inner):
            x = part.pack(memory, made.room(part))
            made.add(part.group, x.clone(), part.of(packed), beta, gain)
            if made.reads(part, memory):
                read += 1
                made.add_from(part, memory, part.of(found), beta, gain)
            else:
                made.add(part.group, x, part.of(found), beta, gain)
    filled = [part for w in layout.windows("cpu") for part in w.inner if part.group is not None]
    assert 3 < read < len(filled)
    for part in filled:  # the padding of edge blocks is nobody's
        g = part.group
        cut = [t.view(-1, 64, 64)[:, : g.r, : g.s] for t in (part.of(found), part.of(packed))]
        assert torch.equal(*cut)
