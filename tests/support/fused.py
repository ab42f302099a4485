"""What `test_fused.py` does in a Python of its own: Triton looks for TRITON_INTERPRET when it is
imported, which other libraries do, too.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fsdp_demo
from fsdp_demo import ExchangeConfig, Topology
from fsdp_demo.channels.channel import ChannelRunner
from fsdp_demo.channels.decode import FusedMean, SparseMean
from fsdp_demo.compression import fused, sparse
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.compression.transform import transform
from fsdp_demo.config.channel import Channel
from fsdp_demo.config.parts import BLOCK, Codec, Reducer

from .threaded import islands, values

CPU = torch.device("cpu")
SHAPES = [(71, 66), (4096 + 7 * 64 + 5,), (64, 59)]  # whole blocks, edges, and what is sent whole
REDUCERS = Reducer("senders"), Reducer("replicas"), Reducer("senders", clip="median_norm")


def work(layout: Layout, kind: str, seed: int) -> Tensor:
    """A workspace whose padding is zero."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(s, generator=g) for s in SHAPES]
    if kind == "ties":
        tensors = [(t * 2).round() for t in tensors]
    scale = {"zeros": 0.0, "tiny": 1e-41, "huge": 1e36}.get(kind, 1.0)
    return layout.pack([t * scale for t in tensors], torch.empty(layout.numel))


@torch.no_grad()
def compare(code: str, topk: int, kind: str, dct: str = "none", reducer: int = 0) -> None:
    """The same bytes, positions, residual and mean as by torch; the mean up to rounding where it is
    transformed.
    """
    rule = REDUCERS[reducer]
    channel = Channel("a", "gradient", codec=Codec(dct, "topk", topk, code), reducer=rule)
    layout = Layout(SHAPES, ["plain" if dct == "none" else "transform"] * len(SHAPES))
    kernels, bodies = fused.FusedBlocks(layout, channel, CPU), []
    for seed in range(2):
        source, chosen = work(layout, kind, seed), list[Tensor]()
        body = sparse.encode_sparse(layout, channel.codec, source, chosen)
        found, picked = kernels.encode(source)
        assert torch.equal(found, body) and all(map(torch.equal, picked, chosen))
        bodies.append(body)
    theirs = SparseMean(layout, channel.codec, rule, bodies, [1.0, 1.0])
    mine, every = FusedMean(kernels, bodies), torch.empty(layout.numel)
    for w in layout.windows(CPU):
        expected = theirs.fill(w, w.of(every))
        assert torch.equal(mine.fill(w, torch.full_like(expected, 7.0)), expected)
    transform(channel.codec, layout, every, inverse=True)
    out = [torch.full(s, 7.0) for s in SHAPES]
    mine.write(out, sign=False)
    blocks = layout.pack(out, torch.empty(layout.numel))[: layout.num_blocks * BLOCK]
    torch.testing.assert_close(blocks, every[: len(blocks)], rtol=1e-5, atol=2e-6)
    assert dct != "none" or torch.equal(blocks, every[: len(blocks)])


@torch.no_grad()
def accumulates(source: str) -> None:
    """An accumulator gets what torch's operations add to it, and nothing of a bad source."""
    channel = Channel("a", source, codec=Codec("dct", "topk", 4, "int8"))
    layout = Layout(SHAPES, ["transform", "plain", "transform"])
    before = work(layout, "noise", 1) if source == "delta" else None
    tensors = [torch.randn(s, generator=torch.Generator().manual_seed(2)) for s in SHAPES]
    x, size = layout.pack([*tensors[:2], None], layout.new(CPU)), layout.num_blocks * BLOCK
    tensors[2].zero_()
    x = transform(channel.codec, layout, x if before is None else before - x)
    kernels = fused.FusedBlocks(layout, channel, CPU)
    for bad in (0.0, torch.tensor(1.0)):
        kept = work(layout, "noise", 3)
        expected = 0.9 * kept + (0.0 if bad else 2.0) * x
        given = [*tensors[:2], tensors[2] if before is not None else None]
        kernels.accumulate(given, before, kept, 0.9, 2.0, bad)
        torch.testing.assert_close(kept[:size], expected[:size], rtol=1e-5, atol=1e-5)


def trained(config: ExchangeConfig) -> tuple[list[list[Tensor]], list[str]]:
    """Payloads and parameters of two islands that train with ISLAND_FUSED as it is; log lines."""
    lines, lock, run, encode = [], threading.Lock(), fused.FusedBlocks._run, ChannelRunner.encode
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_demo").addHandler(handler)

    def one_at_a_time(*args: Any, **more: Any) -> None:  # the interpreter has one place to work at
        with lock:
            run(*args, **more)

    def island(i: int, topology: Topology) -> list[Tensor]:
        g, seen = torch.Generator().manual_seed(3), list[Tensor]()
        named = [(f"{n}", nn.Parameter(torch.randn(s, generator=g))) for n, s in enumerate(SHAPES)]
        optimizer = fsdp_demo.base_optimizer(config, [p for _, p in named], lr=1e-2)
        exchange = fsdp_demo.attach(optimizer, config, topology=topology)
        for c in exchange.channels:
            c.encode = lambda *a, c=c: seen.append((out := encode(c, *a)).body.clone()) or out
        g = torch.Generator().manual_seed(10 + i)
        for _ in range(2):
            for _, p in named:
                p.grad = torch.randn(p.shape, generator=g)
            optimizer.step()
        exchange.finish()
        return [*seen, *(p.detach().clone() for _, p in named)]

    logging.getLogger("fsdp_demo").setLevel(logging.INFO)
    with mock.patch.object(fused.FusedBlocks, "_run", one_at_a_time):
        return values(islands(island, timeout=60.0)), lines


def exchange(name: str, settings: dict[str, Any]) -> None:
    """Payloads and parameters with fused kernels are those without them, to the bit."""
    config = fsdp_demo.preset(name, **settings, **{"accumulator.beta": 1.0})
    os.environ["ISLAND_FUSED"] = "1"
    found, lines = trained(config)
    assert sum("compression by fused kernels (Triton" in line for line in lines) == 2, lines
    os.environ["ISLAND_FUSED"] = "0"
    expected, lines = trained(config)
    assert not any("fused" in line for line in lines)
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs) > len(SHAPES) and all(map(torch.equal, mine, theirs))


# ---- compiled ----------------------------------------------------------------------------------

KERNELS = "accumulate", "select", "code", "pack", "mean"
POINTERS = {"pointers": "i64", "tensor": "i64", "offset": "i64", "stride": "i64", "bodies": "i64",
    "index": "i16", "codes": "u8", "data": "u8"}  # fmt: skip
WHOLE = ("begin", "codes_at", "positions_at", "n", "first", "size")


def compiled(arch: int, code: str, topk: int, dct: bool) -> None:
    """Compile the kernels of whole blocks for a GPU that need not be here: print registers and
    spilled bytes of each. No operation flushes denormals, divides inexactly or rounds once for two.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fsdp_demo.compression import fused_kernels

    layout = Layout([(64, 64)], ["transform" if dct else "plain"])
    channel = Channel("a", "gradient", codec=Codec("dct" if dct else "none", "topk", topk, code))
    known = fused.FusedBlocks(layout, channel, CPU)._known[layout.groups[0]]
    known |= {"DELTA": not dct, "DCT": dct, "INVERSE": dct, "SIGN": dct, "TABLE": dct,
        "SENDERS": True, "CLIP": code == "2bit"}  # fmt: skip
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    for name in KERNELS:
        kernel, warps = getattr(fused_kernels, name), fused.WARPS.get(name, 4)
        types = {n: "*" + POINTERS.get(n, "fp32") for n in kernel.arg_names}
        types |= dict.fromkeys(WHOLE, "i32") | dict.fromkeys(("beta", "gain", "share"), "fp32")
        types |= dict.fromkeys(known, "constexpr")
        taken = {n: types[n] for n in kernel.arg_names}
        # nothing is compiled anew in a step, for another number
        assert all(p.do_not_specialize for p in kernel.params if types[p.name] in ("i32", "fp32"))
        given = {(i,): known[n] for i, n in enumerate(kernel.arg_names) if n in known}
        made = triton.compile(
            ASTSource(fn=kernel, signature=taken, constexprs=given),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": warps, "enable_fp_fusion": False},
        )
        ptx = made.asm["ptx"]
        assert not re.search(r"\.ftz|div\.full|div\.approx", ptx), name
        assert dct and name in ("accumulate", "mean") or "fma.rn.f32" not in ptx, name
        target = re.search(r"\.target (\w+)", ptx)[1]
        with tempfile.TemporaryDirectory() as folder:
            (file := Path(folder) / "k.ptx").write_text(ptx)
            words = [ptxas, "-v", f"--gpu-name={target}", file, "-o", f"{folder}/k.cubin"]
            said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
        used = re.search(r"Used (\d+) registers", said)[1]
        spilled = int(re.search(r"(\d+) bytes spill stores", said)[1])
        print(f"{target} {code} k={topk} {name}: {used} registers, {spilled} B spilled")
        assert spilled <= 64, said
