"""Seconds from the launch of a rehearsal to its first step, of two trees in turn.

    python recipes/benchmarks/launch_time.py --before TREE --json docs/figures/start.json

Each run is the quickstart's rehearsal: two islands of two ranks on the CPU, `recipes/pretrain.py`
with the preset `demo`. The first step ends where island0/metrics.jsonl has its line. The processor
time is that of all processes until then: rehearsal, store, launchers and ranks. A tree is a
checkout; one of an older commit is made by `git worktree add TREE COMMIT`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PARTS = re.compile(r"island0: start: [\d.]+ s to the first step: (.*)")


def cpu_seconds(root: psutil.Process) -> float:
    """Processor time of a process and of all below it, those that have ended included."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def words(tree: Path, output: Path, options: list[str]) -> list[str]:
    """The command line of one rehearsal."""
    command = [sys.executable, "-m", "fsdp_demo.cli", "rehearse", "--islands", "2", "--procs", "2"]
    script = [str(tree / "recipes/pretrain.py"), "--exchange", "demo", "--steps", "1"]
    return [*command, "--cpu", *options, "--", *script, "--log-every", "1", "--output", str(output)]


def one(tree: Path, options: list[str]) -> dict[str, Any]:
    """One run: seconds to the first step, processor time until then, and the parts if it says
    them. Raises RuntimeError with the end of its output if it ends before.
    """
    env = {**os.environ, "PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        done, began = Path(folder, "island0", "metrics.jsonl"), time.monotonic()
        process = psutil.Popen(
            words(tree, Path(folder), options), cwd=tree, env=env, stdout=log, stderr=log
        )
        try:
            while not (done.exists() and '"step": 1' in done.read_text()):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"{tree}: no first step:\n{log.read()[-3000:]}")
                time.sleep(0.02)
            found: dict[str, Any] = {"first_step": time.monotonic() - began}
            found["cpu"] = cpu_seconds(process)
        finally:
            process.poll() is None and process.terminate()
            process.wait()
        log.seek(0)
        if said := PARTS.search(log.read()):
            parts = (part.rsplit(" ", 1) for part in said[1].split(", "))
            found["parts"] = {name: float(seconds) for name, seconds in parts}
    return {key: round(v, 2) if isinstance(v, float) else v for key, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of the other commit")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each tree")
    parser.add_argument("--options", nargs="*", default=[], help="of rehearse, for this tree alone")
    parser.add_argument("--json", type=Path, help="write the runs into this file")
    args = parser.parse_args()
    before, pairs = args.before.resolve(), []
    for _ in range(args.pairs):
        pairs.append({"before": one(before, []), "now": one(ROOT, args.options)})
        print(json.dumps(pairs[-1]), flush=True)
    for key in ("first_step", "cpu"):
        then, now = ([pair[side][key] for pair in pairs] for side in ("before", "now"))
        ratio = statistics.median(b / a for a, b in zip(then, now, strict=True))
        medians = f"{statistics.median(then):.1f} s before, {statistics.median(now):.1f} s now"
        print(f"{key}: {medians}, ratio {ratio:.2f}")
    if args.json:
        args.json.write_text(json.dumps({"pairs": pairs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
