"""What the exchange costs in a step in which no channel acts, against the number of tensors.

    python benchmarks/idle.py [--json FILE]

One thread on one core. The step hooks run without an optimizer's step between them, so the figures
are those of the exchange alone: microseconds per step, the median and the mean of many steps. An
island of two ranks votes now and then on whether it stops; its two processes share the work of the
machine, and its mean holds the votes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.hotpath import pin  # noqa: E402
from fsdp_demo import attach, preset  # noqa: E402
from tests.support.tensor_ledger import Echo  # noqa: E402

TENSORS = (1, 100, 1000, 10_000)
PERIOD = 10**9
"""Steps between two exchanges: none comes while this measures."""


def microseconds(tensors: int, steps: int, rank: int = 0, world: int = 1) -> dict[str, float]:
    """Median and mean of a step of `diloco` over so many tensors of 64 elements."""
    model = nn.Module()
    for i in range(tensors):
        model.register_parameter(f"weight{i}", nn.Parameter(torch.zeros(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    group = dist.group.WORLD if world > 1 else None
    topology = Echo("mesh", 0, 2, rank=rank, world=world, group=group)
    config = preset("diloco", period=PERIOD, clip=None, inner_optimizers="as_is")
    exchange = attach(optimizer, config, model=model, topology=topology)
    hooks: Any = exchange._hooks
    took = []
    for _ in range(steps + 100):
        began = time.perf_counter_ns()
        hooks._before(0, optimizer, (optimizer,), {})
        hooks._after(0, optimizer, (optimizer,), {})
        took.append((time.perf_counter_ns() - began) / 1e3)
    exchange.detach()
    # the first step compares the parameters with those at attach
    return {"median": statistics.median(took[100:]), "mean": statistics.fmean(took[100:])}


def work(args: dict[str, Any]) -> None:
    """One of two ranks, on a core of its own."""
    pin()
    if args["cores"]:
        os.sched_setaffinity(0, {args["cores"][args["rank"] % len(args["cores"])]})
    dist.init_process_group(
        "gloo", init_method=f"file://{args['folder']}/meet", rank=args["rank"], world_size=2
    )
    found = microseconds(args["tensors"], args["steps"], args["rank"], 2)
    if args["rank"] == 0:
        Path(args["folder"], "out.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(tensors: int, steps: int, cores: list[int]) -> dict[str, float]:
    """`microseconds` of the first of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"tensors": tensors, "steps": steps, "folder": folder, "cores": cores}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--work", json.dumps({**common, "rank": r})]
            )
            for r in range(2)
        ]
        if any([p.wait() for p in ranks]):
            raise RuntimeError("a rank has failed; its error is above")
        found: dict[str, float] = json.loads(Path(folder, "out.json").read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tensors", type=int, nargs="+", default=list(TENSORS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pin()
    rows = [{"ranks": 1, "tensors": n, **microseconds(n, args.steps)} for n in args.tensors]
    rows.append({"ranks": 2, "tensors": 100, **two_ranks(100, args.steps, cores)})
    head = ["ranks of the island", "tensors", "median, us", "mean, us"]
    body = [
        [str(r["ranks"]), f"{r['tensors']:,}", f"{r['median']:.1f}", f"{r['mean']:.1f}"]
        for r in rows
    ]
    print(table([head, *body]))
    if args.json is not None:
        facts = {"torch": torch.__version__, "steps": args.steps}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
