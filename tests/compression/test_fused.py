"""The kernels of `compression/fused.py`, played on a CPU by Triton's interpreter and compiled for
GPUs that are not here; and the agreement of islands on them."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fsdp_demo
from fsdp_demo.exchange import fused_path
from fsdp_demo.exchange.fused_path import Offer

from ..support.inside import in_threads
from ..support.programs import fresh_python

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which torch for CUDA brings"
)


def play(call: str, interpreted: bool = True) -> str:
    """What a call of `support/fused.py` prints."""
    setting = "import os; os.environ['TRITON_INTERPRET'] = '1'; " if interpreted else ""
    return fresh_python(f"{setting}from tests.support import fused; fused.{call}", ROOT)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "'int8', 1, 'noise'",
        "'int8', 4, 'noise', 'dct'",
        "'int8', 32, 'ties', 'dct'",
        "'int8', 32, 'zeros', reducer=1",
        "'int8', 90, 'tiny'",
        "'2bit', 3, 'ties'",
        "'2bit', 64, 'noise', reducer=2",
        "'2bit', 64, 'zeros', reducer=2",
        "'2bit', 90, 'huge'",
        "'1bit', 8, 'tiny', 'dct'",
        "'1bit', 90, 'noise', reducer=1",
    ],
)
def test_fused_same_bytes_and_mean(case: str) -> None:
    """Kernels make the bytes, positions and mean that torch's operations make."""
    play(f"compare({case})")


@needs_triton
@pytest.mark.parametrize("source", ["gradient", "delta"])
def test_fused_accumulator(source: str) -> None:
    """A kernel adds a transformed source to the accumulator, and nothing of one that is bad."""
    play(f"accumulates({source!r})")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "'demo', {'transform': False, 'topk': 8}",
        "'sparse_loco', {'period': 1, 'topk': 8}",
        "'decoupled_momentum', {'period': 1, 'topk': 8}",
    ],
)
def test_fused_exchange_same_bits(case: str) -> None:
    """Two islands with fused kernels send and end with the bits that they do without."""
    play(f"exchange({case})")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", ["'int8', 32, True", "'2bit', 64, False", "'1bit', 90, False"])
def test_fused_compiles(arch: int, case: str) -> None:
    """The kernels compile for GPUs of two generations, hardly spill, and round as IEEE 754 says."""
    print(play(f"compiled({arch}, {case})", interpreted=False))


OFFERS = (
    ([Offer("3.7.1"), Offer("3.7.1")], "by fused kernels (Triton 3.7.1)"),
    ([Offer("3.7.1"), Offer("3.8.0")], "not every rank of all islands has the same kernels"),
    ([Offer("3.7.1"), Offer(why="no compiler")], "by torch all the same: "),
    ([Offer(), Offer()], "by torch all the same: "),
)
place = threading.local()  # what the island of a thread offers


@in_threads()
def test_fused_only_if_all_agree(island: int, topology: Any) -> None:
    """Islands take fused kernels where all offer the same ones, else all fall back at `attach`, and
    say so in one line.
    """
    os.environ["ISLAND_FUSED"] = "1"  # of a process of its own
    fused_path.offer = lambda runtime: place.offer
    thread, lines = threading.get_ident(), list[str]()
    handler, log = logging.Handler(), logging.getLogger("fsdp_demo")
    handler.emit = lambda r: lines.append(r.getMessage()) if r.thread == thread else None
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    for offers, said in OFFERS:
        place.offer = offers[island]
        optimizer = torch.optim.SGD([("w", torch.nn.Parameter(torch.zeros(64, 64)))], lr=0.1)
        exchange = fsdp_demo.attach(optimizer, "demo", topology=topology)
        exchange.detach()
        assert sum("compression by" in line for line in lines) == 1 and said in " ".join(lines)
        lines.clear()


def test_fused_offer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without a GPU or without `triton` offers nothing, and the reason is known; one that
    joins a run does as the others.
    """
    runtime = mock.Mock(**{"host.device": torch.device("cpu")})
    monkeypatch.setitem(sys.modules, "triton", None)
    assert fused_path.offer(runtime) == Offer()
    monkeypatch.setenv("ISLAND_FUSED", "1")
    assert "ModuleNotFoundError" in fused_path.offer(runtime).why
    monkeypatch.setitem(sys.modules, "triton", mock.Mock(**{"knobs.runtime.interpret": False}))
    assert "need an NVIDIA GPU" in fused_path.offer(runtime).why
    section = mock.Mock(fused=None)
    runtime.channels = [mock.Mock(sections=[None, section])]
    found = Offer("3.7.1", made=((section, mock.Mock(mark="3.7.1")),))
    monkeypatch.setattr(fused_path, "offer", lambda runtime: found)
    for theirs, mine in (("3.7.1", "3.7.1"), ("3.8.0", ""), ("3.7.1", "3.7.1"), ("", "")):
        fused_path.follow(runtime, theirs)  # an island that joins a run
        assert fused_path.mark(runtime) == mine
    monkeypatch.undo()
    monkeypatch.setenv("ISLAND_FUSED", "yes")
    with pytest.raises(ValueError, match="allowed are 0 and 1"):
        fused_path.offer(runtime)
