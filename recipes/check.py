"""Does it work on these devices? Short runs of the recipes, every way it can be launched on one
machine, and one table.

    bash recipes/check.sh            # or: python recipes/check.py

What is done with the GPUs of the machine (--cpu leaves them alone, --procs P overrides; always two
replicas):

    none       2 islands x 2 processes on the CPU; mesh of 2 x 2
    1          2 islands x 1 process, which share the GPU; nothing is sharded, and no mesh (NCCL wants a GPU for every rank of a world)
    2 or 3     2 islands x 2 processes, which share two GPUs; no mesh
    4 or more  2 islands x half of the GPUs each, on their own; mesh of 2 x half

Inside an island the ranks use NCCL (gloo on a CPU). The exit status is 0 if every row that ran is fine.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from report import size, table

RECIPES = Path(__file__).resolve().parent
HEAD = [
    "what",
    "ranks",
    "result",
    "exit codes",
    "islands agree",
    "loss before, after",
    "peak memory",
    "tokens/s",
    "seconds",
]


@dataclass
class Row:
    """One way to launch: the launcher's words, or why it is not run."""

    name: str
    ranks: str
    words: list[str] = field(default_factory=list)
    islands: int = 0  # folders with a summary of their own; 0: the mesh, which has one
    skipped: str = ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of every row (20)")
    parser.add_argument(
        "--model", default="small", help="a json of recipes/models, or a hub id (small)"
    )
    parser.add_argument("--exchange", default="demo", help="preset or yaml file (demo)")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        help="changes to it, as in --set schedule.delay=1",
    )
    parser.add_argument("--lr", type=float, default=0.004, help="learning rate (0.004)")
    parser.add_argument("--procs", type=int, help="processes per replica (default: see above)")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per rank (4)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens per row (256)")
    parser.add_argument(
        "--rows", default="", help="only these, comma-separated: fsdp2, unsharded, mesh, zero"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where there are GPUs")
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds until a row is ended (900)"
    )
    parser.add_argument(
        "--output", default="outputs/check", help="logs, summaries, check.md (outputs/check)"
    )
    return parser.parse_args()


def installed(name: str) -> bool:
    """Whether there is such a package. The folders accelerate/ and deepspeed/ beside this file look
    like packages without a file.
    """
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def version(name: str) -> str:
    """Of an installed package, or of one that is only on the path, as this one may be."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(name), "__version__", "not installed"))


def processes(gpus: int) -> int:
    """Processes of each of the two replicas."""
    return 2 if gpus == 0 else 1 if gpus == 1 else max(2, gpus // 2)


def plan(args: argparse.Namespace, gpus: int) -> dict[str, Row]:
    procs = args.procs or processes(gpus)
    own = [] if gpus else ["--cpu"]
    options = [
        "--model",
        args.model,
        "--exchange",
        args.exchange,
        "--steps",
        args.steps,
        "--lr",
        args.lr,
        "--warmup-steps",
        2,
    ]
    options += [
        "--batch-size",
        args.batch_size,
        "--sequence-length",
        args.sequence_length,
        "--eval-every",
        0,
        "--eval-batches",
        4,
    ]
    options += ["--schedule", "constant", "--log-every", max(1, args.steps // 4)]
    options += ["--set", *args.set] if args.set else []
    options += ["--bf16"] if gpus else []  # on a CPU bf16 is slow and shows nothing more

    def islands(
        name: str, *more: str, script: str = "pretrain.py", launcher: str = "accelerate"
    ) -> list[str]:
        words = [
            sys.executable,
            "-m",
            "fsdp_demo.cli",
            "rehearse",
            "--islands",
            2,
            "--procs",
            procs,
            "--run",
            f"check-{name}",
            *own,
        ]
        words += ["--launcher", launcher, "--", RECIPES / script]
        return [
            str(word) for word in [*words, *options, *more, "--output", Path(args.output) / name]
        ]

    two, shares = (
        f"2 x {procs}",
        f" sharing {procs} GPU{'s' * (procs > 1)}" if 0 < gpus < 2 * procs else "",
    )
    rows = {
        "fsdp2": Row(
            "islands, FSDP2" if procs > 1 else "islands of one process",
            two + shares,
            islands("fsdp2"),
            2,
        ),
        "unsharded": Row("islands, unsharded", two + shares, islands("unsharded", "--no-shard"), 2),
        "mesh": mesh(args, gpus, procs, options),
        "zero": Row(
            "islands, ZeRO-2",
            two + shares,
            islands("zero", script="pretrain_deepspeed.py", launcher="deepspeed"),
            2,
        ),
    }
    if procs == 1:
        rows["unsharded"] = Row(
            "islands, unsharded", two, skipped="the row above: one process has nothing to shard"
        )
    if not installed("deepspeed"):
        rows["zero"] = Row("islands, ZeRO-2", "-", skipped="no deepspeed here")
    wanted = args.rows.split(",") if args.rows else list(rows)
    unknown = [name for name in wanted if name not in rows]
    if unknown:
        raise SystemExit(
            f"check.py: --rows {','.join(unknown)}: unknown, allowed are {', '.join(rows)}"
        )
    return {name: rows[name] for name in wanted}


def mesh(args: argparse.Namespace, gpus: int, procs: int, options: list[Any]) -> Row:
    ranks = f"2 x {procs}"
    if procs < 2:
        return Row("mesh, FSDP2", ranks, skipped="needs 2 or more processes per replica")
    if 0 < gpus < 2 * procs:
        return Row("mesh, FSDP2", ranks, skipped=f"needs {2 * procs} GPUs, found {gpus}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "fsdp_demo.launch", "accelerate", "launch"]
    words += [
        "--config_file",
        RECIPES / "accelerate" / "fsdp2-mesh.yaml",
        "--num_machines",
        1,
        "--num_processes",
        2 * procs,
    ]
    words += [
        "--main_process_port",
        port,
        "--parallelism_config_dp_replicate_size",
        2,
        "--parallelism_config_dp_shard_size",
        procs,
    ]
    words += [RECIPES / "pretrain.py", "--mesh", *options, "--output", Path(args.output) / "mesh"]
    return Row("mesh, FSDP2", ranks, [str(word) for word in words])


def run(name: str, row: Row, output: Path, timeout: float, cpu: bool) -> tuple[int, float]:
    """Exit status (124 after the time limit) and seconds; what it prints goes into a file, the end
    of it to the terminal if it fails.
    """
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.rglob("summary.json"):
        old.unlink()
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ISLAND_", "ACCELERATE_", "PARALLELISM_", "FSDP_"))
    }
    if cpu:
        env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            row.words, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = 124
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        except BaseException:  # Ctrl-C: nothing runs on after this
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if status:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(f"    {line}" for line in lines[-15:]), flush=True)
    return status, time.monotonic() - began


def judge(row: Row, status: int, folder: Path) -> tuple[str, list[str]]:
    """ "ok" or what is wrong, and the cells of the table that come from the run."""
    paths = [folder / f"island{n}" / "summary.json" for n in range(row.islands)] or [
        folder / "summary.json"
    ]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    # the last line of `rehearse`, with the status of every island
    codes = re.search(r"with status \d+ \((.*)\)\s*$", log)
    shown = codes.group(1) if codes else str(status)
    if not found:
        return ("timed out" if status == 124 else "FAILED"), [shown, "-", "-", "-", "-"]
    digests = (
        {summary["digests_equal"] for summary in found} if len(found) == len(paths) else {False}
    )
    # None: this preset lets replicas differ
    agree = {True: "yes", None: "not expected"}.get(*digests) if len(digests) == 1 else None
    first, last = (
        found[0]["loss_start"],
        max((summary["loss_end"] for summary in found), key=lambda loss: (math.isnan(loss), loss)),
    )
    faults = (
        [f"status {status}"] * (status != 0)
        + ["islands differ"] * (agree is None)
        + ["no learning"] * (not last < first)
    )
    memory = max(summary["peak_memory"] for summary in found)
    speed = min(summary["tokens_per_second"] for summary in found)
    cells = [shown, agree or "NO", f"{first:.3f}, {last:.3f}", size(memory), f"{speed:.0f}"]
    return ("FAILED: " + ", ".join(faults) if faults else "ok"), cells


def facts(args: argparse.Namespace, gpus: int) -> list[str]:
    """Lines about versions and devices, for the report."""
    names = ("fsdp_demo", "torch", "accelerate", "transformers", "deepspeed")
    versions = [f"{name} {version(name)}" for name in names if installed(name)]
    cuda = (
        [f"CUDA {torch.version.cuda}", "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))]
        if gpus
        else []
    )
    devices = sorted({torch.cuda.get_device_name(number) for number in range(gpus)})
    where = (
        f"{gpus} x {', '.join(devices)}, bf16 compute"
        if gpus
        else f"CPU, {os.cpu_count()} cores ({platform.machine()}), fp32"
    )
    return [
        f"{', '.join([*versions, *cuda])}; Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()}",
        f"{where}; {args.steps} steps of {' '.join([args.model, args.exchange, *args.set])}",
    ]


def main() -> int:
    args = arguments()
    gpus = 0 if args.cpu else torch.cuda.device_count()
    output, rows = Path(args.output), [HEAD]
    about, bad = facts(args, gpus), 0
    print("\n".join(about), flush=True)
    for name, row in plan(args, gpus).items():
        if row.skipped:
            rows.append([row.name, row.ranks, row.skipped, *["-"] * (len(HEAD) - 3)])
            continue
        print(f"{row.name}: {row.ranks} ...", flush=True)
        status, seconds = run(name, row, output, args.timeout, cpu=gpus == 0)
        result, cells = judge(row, status, output / name)
        bad += result != "ok"
        rows.append([row.name, row.ranks, result, *cells, f"{seconds:.0f}"])
    text = "\n".join([*about, "", table(rows, markdown=True)])
    (output / "check.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nlogs and check.md are in {output}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
