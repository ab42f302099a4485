"""Top-k: the positions that the oracle selects, by torch and in C, and torch where the build has
left the C code out.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from fsdp_demo.compression import selection
from fsdp_demo.compression.selection import top_k
from fsdp_demo.compression.windows import Group
from fsdp_demo.config.parts import BLOCK

from ..oracles import topk as slow_topk
from ..oracles.topk import topk as oracle
from ..support.transforms import random

needs_c = pytest.mark.skipif(selection._kernels is None, reason="the build had no C compiler")


def blocks(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(6, 4096, generator=generator)
    if kind == "ties":
        out.mul_(3).round_()
    elif kind == "zeros":
        out[::2] = 0.0
        out[1, 20:] = -0.0
    elif kind == "steep":  # almost all that is large lies in a few rows, as after a transform
        out.mul_(torch.linspace(0, 20, 64).neg().exp().repeat_interleave(64))
    elif kind == "denormal":
        out.mul_(1e-41)
    elif kind == "not finite":
        out[0, 9], out[1], out[2, 4095], out[3, 0] = float("nan"), float("nan"), -1e38, 1e38
        out[4, 100:300] = float("inf")
        out[5] = -float("inf")
    return out


@needs_c
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "steep", "denormal", "not finite"])
def test_topk_c_equals_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k in C selects what torch selects."""
    rows = blocks(kind)
    for k in (1, 2, 8, 31, 64, 90, 128, 129, 255, 256):
        found = selection._in_c(rows, k)
        assert torch.equal(found, selection._exact(rows, k))
        if kind != "not finite":  # by torch's sort NaN has another place
            assert found.tolist() == [oracle(row, k) for row in rows]
        with monkeypatch.context() as patch:
            patch.setattr(selection, "_kernels", None)
            assert torch.equal(found, selection.top_k(rows, k))


@needs_c
@pytest.mark.parametrize("k", [0, 257])
def test_topk_c_size_refused(k: int) -> None:
    """Top-k in C refuses a k that it has no room for."""
    with pytest.raises(ValueError, match="1 to 256"):
        selection._in_c(blocks("random"), k)


@needs_c
def test_topk_torch_for_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch selects where k, the size of the blocks or the strides are not those of the C code."""
    rows, asked, in_c = blocks("random"), list[int](), selection._in_c
    wide = torch.randn(5, 8192, generator=torch.Generator().manual_seed(2))[:, :4096]
    monkeypatch.setattr(selection, "_in_c", lambda a, k: asked.append(k) or in_c(a, k))
    cases = [(rows, 256), (rows, 257), (rows, 4096), (rows[:, :100].contiguous(), 7), (wide, 8)]
    for a, k in cases:
        assert selection.top_k(a, k).tolist() == [oracle(row, k) for row in a]
    assert asked == [256]


def test_topk_missing_extension_logged_once(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    """A missing extension is logged once, and torch selects."""
    monkeypatch.setattr(selection, "_kernels", None)
    monkeypatch.setattr(selection, "_SAID", [])
    caplog.set_level(logging.INFO, "fsdp_demo")
    rows = blocks("random")
    for _ in range(2):
        selection.say_what_selects()
        assert selection.top_k(rows, 8).tolist() == [oracle(row, 8) for row in rows]
    assert len(caplog.messages) == 1 and "C compiler" in caplog.messages[0]


# -- selection -----------------------------------------------------------------------------------


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


def by_sorting(a: torch.Tensor, k: int) -> torch.Tensor:
    return torch.sort(a.abs(), dim=1, descending=True, stable=True).indices[:, :k].sort(1).values


@pytest.mark.parametrize("k", [1, 7, 8, 16, 17, 32, 64, 128, 129, 4095])
@pytest.mark.parametrize("levels", [0, 3, 40, 4000])
def test_topk_of_blocks_with_ties(k: int, levels: int) -> None:
    """Top-k of blocks with ties selects what the oracle selects. Whole numbers between -levels and
    levels: from all equal to few ties; a block of zeros, one with a NaN and an infinity.
    """
    a = (random(70, BLOCK, seed=k).clamp(-4, 4) * levels / 4).round()
    a[3] = 0.0
    a[5, 100], a[5, 7] = torch.nan, -torch.inf
    found, expected = selection.top_k(a, k), by_sorting(a.nan_to_num(3e38, 1e38, -1e38), k)
    assert found.dtype == torch.int64 and torch.equal(found, expected)
    if k <= 64:  # what a GPU does
        assert torch.equal(selection._grouped(a, k), expected)
    assert torch.equal(selection._exact(a, k), expected)
