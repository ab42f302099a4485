"""What an exchange costs a GPU: one rank's eighth of Llama-3.2-1B, beside a copy of its bytes.

    python benchmarks/gpu.py [--only demo,diloco] [--json FILE]

One process, one GPU, fp32 shards, gradients of noise. The other replica is played by an echo, which
costs no time on a link. Per preset, over steps in which a message leaves and is applied: the
device's time between two CUDA events around `optimizer.step()` less that of the same optimizer
without an exchange; the time after which the host is back from it (the device is given 60 ms of
products of matrices before each step, so a host that waits for the device takes longer than that);
memory of the exchange by torch's allocator beside `plan_memory`. Medians of --repeat steps. Of one
step operations on the device, and the bytes that they read and write per element of the shards: a
copy moves 8. With --trace also kernels, copies and calls that made the training thread wait, by
torch.profiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

import fsdp_demo  # noqa: E402
from fsdp_demo import ExchangeConfig, base_optimizer, preset  # noqa: E402
from fsdp_demo.exchange.plan import (  # noqa: E402
    local_shape,  # noqa: E402
    plan_memory,  # noqa: E402
)
from fsdp_demo.tools.planner import load  # noqa: E402
from tests.support.device_work import DeviceWork  # noqa: E402
from tests.support.tensor_ledger import Echo  # noqa: E402

SHARDS, AHEAD = 8, 0.06
CASES: dict[str, ExchangeConfig] = {
    "full": preset("full", clip=None),
    "demo": preset("demo", clip=None),
    "demo, delay 1": preset("demo", clip=None, **{"schedule.delay": 1}),
    "diloco, period 1": preset("diloco", clip=None, period=1),
    "diloco, period 1, on the host": preset(
        "diloco", clip=None, period=1, offload_outer_state=True
    ),
    "sparse_loco, period 1": preset("sparse_loco", clip=None, period=1),
    "sign_loco, period 1": preset("sign_loco", clip=None, period=1),
    "muloco, period 1": preset("muloco", clip=None, period=1),
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Rank:
    """The shards of rank 0, their optimizer and, if there is one, their exchange."""

    def __init__(self, config: ExchangeConfig, exchange: bool):
        self.shapes = [(n, local_shape(s, SHARDS, 0)) for n, s in load("llama-3.2-1b")]
        self.named = [(n, nn.Parameter(torch.randn(s, device="cuda"))) for n, s in self.shapes]
        self.gradients = [torch.randn_like(p) * 1e-3 for _, p in self.named]
        self.optimizer = base_optimizer(config, self.named, lr=1e-3)
        self.square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.step()  # makes the optimizer's state
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        topology = Echo("mesh", 0, 2) if exchange else None
        self.exchange = (
            fsdp_demo.attach(self.optimizer, config, topology=topology) if exchange else None
        )
        for _ in range(4):
            self.step()
        torch.cuda.synchronize()
        self.kept = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()

    def step(self) -> None:
        """One `optimizer.step()` on gradients that were there before."""
        for (_, p), g in zip(self.named, self.gradients, strict=True):
            p.grad = g
        self.optimizer.step()

    def timed(self) -> tuple[float, float]:
        """Seconds of the device and of the host, of one step that begins behind other work."""
        for _ in range(int(AHEAD / 0.0015)):  # a product takes some 1.5 ms of an H100
            torch.mm(self.square, self.square)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        began = time.perf_counter()
        self.step()
        host = time.perf_counter() - began
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3, host

    def work(self) -> dict[str, float]:
        """Operations on the device in one step, and bytes that they move per element."""
        with DeviceWork() as found:
            self.step()
        torch.cuda.synchronize()
        elements = sum(prod(s) for _, s in self.shapes)
        return {"operations": found.operations.total(), "moved": found.bytes / elements}

    def seen(self, trace: Path | None) -> dict[str, int]:
        """Kernels, copies and waits of the training thread in one step, by torch.profiler."""
        if trace is None:
            return {}
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(int(AHEAD / 0.0015)):
                torch.mm(self.square, self.square)
            self.step()
        torch.cuda.synchronize()
        out = dict.fromkeys(("kernels", "to host", "to device", "waits"), 0)
        profiler.export_chrome_trace(str(trace))
        events = list(profiler.events())
        here = {e.thread for e in events if e.name == "aten::mm"}
        for e in events:
            on_device = e.device_type == torch.autograd.DeviceType.CUDA
            out["to host"] += on_device and "DtoH" in e.name
            out["to device"] += on_device and "HtoD" in e.name
            out["kernels"] += on_device and "Memcpy" not in e.name and "Memset" not in e.name
            out["waits"] += not on_device and e.name in WAITS and e.thread in here
        return out


def copy_seconds(elements: int, repeat: int) -> float:
    """Of a copy of as many fp32 elements on the device."""
    a, took = torch.randn(elements, device="cuda"), []
    b = torch.empty_like(a)
    for _ in range(repeat + 2):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        b.copy_(a)
        last.record()
        torch.cuda.synchronize()
        took.append(first.elapsed_time(last) / 1e3)
    return statistics.median(took[2:])


def row(name: str, repeat: int, trace: Path | None) -> dict[str, Any]:
    config, found = CASES[name], dict[str, Any]()
    for kind in (False, True):
        rank = Rank(config, kind)
        times = [rank.timed() for _ in range(repeat)]
        found["with" if kind else "alone"] = {
            "device": statistics.median(t[0] for t in times),
            "host": statistics.median(t[1] for t in times),
            **rank.work(),
            **rank.seen(trace and trace.with_stem(f"{trace.stem}-{kind}")),
        }
        if rank.exchange is not None:
            found |= {"kept": rank.kept, "peak": rank.peak}
            rank.exchange.detach()
        del rank
        gc.collect()
        torch.cuda.empty_cache()
    plan = plan_memory(config, load("llama-3.2-1b"), islands=2, shards=SHARDS)
    found |= {"planned": plan.device_state, "planned_flight": plan.device_flight}
    return {"preset": name, **found, "planned_workspace": plan.device_workspace}


def show(rows: list[dict[str, Any]], copy: float) -> str:
    head = (
        "preset|alone, ms|exchange, ms more|copies of its bytes|host, ms|operations more|"
        "B per element more|kernels more|copies to, from host|waits|kept, MB|planned|peak, MB|"
        "planned"
    ).split("|")
    body = []
    for r in rows:
        a, w = r["alone"], r["with"]
        more = w["device"] - a["device"]
        body.append(
            [
                r["preset"],
                f"{1e3 * a['device']:.2f}",
                f"{1e3 * more:.2f}",
                f"{more / copy:.1f}",
                f"{1e3 * w['host']:.1f}",
                f"{w['operations'] - a['operations']}",
                f"{w['moved'] - a['moved']:.1f}",
                f"{w['kernels'] - a['kernels']}" if "kernels" in w else "-",
                f"{w['to host']}, {w['to device']}" if "kernels" in w else "-",
                f"{w['waits'] - a['waits']}" if "kernels" in w else "-",
                f"{r['kept'] / 1e6:.0f}",
                f"{(r['planned'] + r['planned_flight']) / 1e6:.0f}",
                f"{r['peak'] / 1e6:.0f}",
                f"{r['planned_workspace'] / 1e6:.0f}",
            ]
        )
    return table([head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="A;B", help=f"of {'; '.join(CASES)}")
    parser.add_argument("--repeat", type=int, default=15, help="steps that are timed")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="chrome traces of one step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    wanted = [n.strip() for n in args.only.split(";") if n.strip()] or list(CASES)
    if unknown := [n for n in wanted if n not in CASES]:
        parser.error(f"--only {unknown}: allowed are {', '.join(CASES)}")
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU here")
    elements = sum(prod(local_shape(s, SHARDS, 0)) for _, s in load("llama-3.2-1b"))
    copy = copy_seconds(elements, args.repeat)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {elements / 1e6:.1f} M "
        f"elements; a copy of them in fp32 takes {1e3 * copy:.3f} ms"
    )
    rows = []
    for number, name in enumerate(wanted):
        trace = args.trace / f"trace{number}.json" if args.trace else None
        rows.append(row(name, args.repeat, trace))
        print(name, "done", file=sys.stderr)
    print(show(rows, copy))
    if args.json is not None:
        args.json.write_text(json.dumps({"copy": copy, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
