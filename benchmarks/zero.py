"""What the exchange costs under DeepSpeed: time of a step at ZeRO-1, 2 and 3 while nothing is due
and while it is, and memory of a step.

    python benchmarks/zero.py [--json FILE]

One replica of two ranks on the CPU, a thread and a core for each. In every rank five engines of one
model take their steps in turns: AdamW plain, and with `diloco` that is never due; SGD plain, and
with `demo`, due at every step; AdamW plain once more, whose ratio to the first is what chance does.
Ratios are of medians. CPU time is the process's own and leaves out what else runs on the machine,
but for the caches; wall time is worth little on a busy one. "in the exchange" is what the hooks
that are not due take of the training thread.

Memory: the most that tensors made inside `engine.step()` take, per parameter that the rank holds.
ZeRO makes the fp32 gradient of one sub-group (stages 1 and 2: parameter group), steps it and frees
it; a gradient channel sends one message per step, so it holds them all: 4 bytes for what is not in
the largest one. The rest of the difference is the codec's workspace, as without ZeRO (`memory.py`).
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed_parts import without_compiler  # noqa: E402
from model import load_model  # noqa: E402
from report import table  # noqa: E402

import deepspeed_ext  # noqa: E402
from deepspeed_ext.wrappers import adapter  # noqa: E402
from fsdp_demo import Exchange, base_optimizer, preset  # noqa: E402
from tests.support.tensor_ledger import Ledger  # noqa: E402

RANKS = 2
NEVER = {"period": 1_000_000}
# name -> preset that chooses the inner optimizer, its changes, attached
ENGINES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "adamw": ("diloco", NEVER, False),
    "adamw, not due": ("diloco", NEVER, True),
    "sgd": ("demo", {}, False),
    "sgd, due": ("demo", {}, True),
    "adamw again": ("diloco", NEVER, False),
}
MEASURED = tuple(kind for kind in ENGINES if kind != "adamw again")
PLAIN = ("adamw, not due", "adamw again")  # compared with "adamw"


def make(model: str, stage: int, kind: str, sub_group: int) -> tuple[Any, Exchange | None]:
    """An engine, and its exchange."""
    name, changes, attached = ENGINES[kind]
    config = preset(name, **changes)
    torch.manual_seed(0)
    made = load_model(model, 0)
    zero = {
        "stage": stage,
        "overlap_comm": False,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": sub_group,
    }
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "steps_per_print": sys.maxsize,
    }
    settings |= {"zero_allow_untested_optimizer": True}
    optimizer = base_optimizer(
        config, [p for n, p in made.named_parameters() if "mlp" not in n], 1e-4
    )
    # as with weight decay for some only
    optimizer.add_param_group({"params": [p for n, p in made.named_parameters() if "mlp" in n]})
    engine, *_ = deepspeed.initialize(model=made, optimizer=optimizer, config=settings)
    return engine, deepspeed_ext.attach(engine, config) if attached else None


def step(engine: Any, rows: torch.Tensor) -> tuple[float, float]:
    """Wall and CPU seconds of a whole step."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    engine.backward(engine(input_ids=rows, labels=rows).loss)
    engine.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def times(model: str, stage: int, rows: torch.Tensor, repeat: int) -> dict[str, Any]:
    """A line of the first table."""
    engines = {kind: make(model, stage, kind, 10**9) for kind in ENGINES}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in engines}
    inside: list[float] = []

    def timed(hook: Callable[[], None], exchange: Exchange) -> None:
        began = time.thread_time()
        hook()
        if exchange is engines["adamw, not due"][1]:
            inside[-1] += time.thread_time() - began

    for _, attached in engines.values():
        if attached is not None:
            ticks: Any = attached._hooks
            for name in ("_run_before", "_run_after"):
                setattr(ticks, name, partial(timed, getattr(ticks, name), attached))
    for turn in range(repeat + 2):
        inside.append(0.0)
        for kind in ENGINES if turn % 2 else reversed(ENGINES):
            seconds = step(engines[kind][0], rows)
            if turn > 1:  # ZeRO-3 records its trace in the first two
                found[kind].append(seconds)
    held = sum(master.numel() for master in adapter(engines["sgd"][0]).masters())
    wall, cpu = (
        {kind: statistics.median(s[i] for s in seconds) for kind, seconds in found.items()}
        for i in range(2)
    )
    for _, attached in engines.values():
        if attached is not None:
            attached.detach()
    compared = {
        f"{name}_{kind}": of[kind] / of["adamw"] - 1
        for name, of in (("wall", wall), ("cpu", cpu))
        for kind in PLAIN
    }
    return {
        "stage": stage,
        "held": held,
        "wall": wall,
        "cpu": cpu,
        **compared,
        "inside": statistics.median(inside[2:]),
        "ns_per_element": 1e9 * (cpu["sgd, due"] - cpu["sgd"]) / held,
    }


def memory(model: str, stage: int, rows: torch.Tensor, sub_group: int) -> dict[str, Any]:
    """A line of the second table: bytes per parameter of this rank at the most."""
    out: dict[str, Any] = {"stage": stage}
    for kind in MEASURED:
        engine, exchange = make(model, stage, kind, sub_group)
        for _ in range(3):
            engine.backward(engine(input_ids=rows, labels=rows).loss)
            ledger = Ledger()
            with ledger:
                engine.step()
            most = ledger.most["device"]
        sizes = [master.numel() for master in adapter(engine).masters()]
        out |= {"parts": len(sizes), "largest": max(sizes) / sum(sizes), kind: most / sum(sizes)}
        if exchange is not None:
            exchange.detach()
    return out


def rank(number: int, folder: str, args: argparse.Namespace, results: Any) -> None:
    """One rank's life."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # of names that DeepSpeed calls
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    without_compiler()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS
    )
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    rows = torch.randint(256, (args.batch, 64), generator=torch.Generator().manual_seed(number))
    lines = [times(args.model, stage, rows, args.repeat) for stage in args.stages]
    held = lines[0]["held"]
    kept = [memory(args.model, stage, rows, max(1, RANKS * held // 8)) for stage in args.stages]
    if number == 0:
        results.send((lines, kept))
    dist.barrier()
    dist.destroy_process_group()


def show(lines: list[dict[str, Any]], kept: list[dict[str, Any]], markdown: bool) -> str:
    """Both tables."""
    head = [
        "",
        "elements of a rank",
        "plain step, ms: wall, CPU",
        "not due: wall",
        "CPU",
        "in the exchange, ms",
        "plain again: wall",
        "CPU",
    ]
    head += ["due: ns per element, CPU"]
    body = []
    for x in lines:
        ratios = [
            f"{100 * x[f'{name}_{kind}']:+.1f} %" for kind in PLAIN for name in ("wall", "cpu")
        ]
        own = f"{1e3 * x['inside']:.2f} ({x['inside'] / x['cpu']['adamw']:.1%})"
        step = f"{1e3 * x['wall']['adamw']:.1f}, {1e3 * x['cpu']['adamw']:.1f}"
        body.append(
            [
                f"ZeRO-{x['stage']}",
                f"{x['held']:,}",
                step,
                *ratios[:2],
                own,
                *ratios[2:],
                f"{x['ns_per_element']:.0f}",
            ]
        )
    head2 = [
        "most of a step, bytes per parameter",
        "masters",
        "largest",
        *MEASURED,
        "gradients held",
    ]
    body2 = []
    for x in kept:
        cells = [f"{x[kind]:.2f}" for kind in MEASURED]
        body2.append(
            [
                f"ZeRO-{x['stage']}",
                str(x["parts"]),
                f"{x['largest']:.0%}",
                *cells,
                f"{4 * (1 - x['largest']):.2f}",
            ]
        )
    tables = (table([head, *body], markdown=markdown), table([head2, *body2], markdown=markdown))
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="small", help="a json of recipes/models by name or path (small)"
    )
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], help="of ZeRO (all)"
    )
    parser.add_argument("--batch", type=int, default=2, help="rows of 64 tokens per rank (2)")
    parser.add_argument("--repeat", type=int, default=20, help="steps of every engine (20)")
    parser.add_argument("--markdown", action="store_true", help="the tables as markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    args = parser.parse_args()
    # not forked: what is imported above has threads
    spawn = multiprocessing.get_context("spawn")
    results, into = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=rank, args=(number, folder, args, into)) for number in range(RANKS)
        ]
        for process in ranks:
            process.start()
        while not results.poll(1.0):
            if any(process.exitcode for process in ranks):
                sys.exit("a rank has failed; its error is above")
        lines, kept = results.recv()
        for process in ranks:
            process.join()
    print(show(lines, kept, args.markdown))
    if args.json:
        head = {
            "model": args.model,
            "ranks": RANKS,
            "repeat": args.repeat,
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
        }
        args.json.write_text(
            json.dumps({**head, "times": lines, "memory": kept}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
