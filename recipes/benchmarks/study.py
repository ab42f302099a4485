"""A first look at learning: methods side by side at equal tokens, on a model that two cores can
train.

    python recipes/benchmarks/study.py --table first

Trains a byte-level Llama of 0.9 M parameters on the Python library's sources with 4 replicas, each
a process, through the library itself: `attach`, gloo, the real payloads. Every cell (a method with
its settings) is stored when it is done, so that an interrupted table goes on where it stood; cells
are shared between tables. Writes OUTPUT/TABLE.md and OUTPUT/TABLE.json and prints the table. One
seed, one small model, short runs: good for finding what is wrong, no ranking of methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# replicas are processes that share the cores; a fork must not follow a region of several threads
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from data import ByteTokenizer, load_data  # noqa: E402
from pretrain import MODELS  # noqa: E402
from report import full_bytes, size, table  # noqa: E402
from study_cells import TABLES, Cell, Setting  # noqa: E402
from study_run import Failed, Texts, run_cell, store  # noqa: E402

HEAD = ["cell", "method's model", "mean", "replica 0", "drift", "sent per island", "than full"]
# imported at a first step: once, before any fork
LAZY = ("torch._dynamo", "torch._dynamo.device_interface", "torch.distributed.tensor")


class Cache:
    """Results by key, one json each, written whole or not at all."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> dict[str, Any] | None:
        path = self.path(key)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def put(self, key: str, result: dict[str, Any]) -> None:
        write(self.path(key), json.dumps(result, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Through a temporary name, so that an interrupt leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def load_texts(setting: Setting, replicas: int) -> Texts:
    """The same held-out rows for all; the training rows are dealt to `replicas` parts, of which one
    replica alone takes the first.
    """
    parts = [
        load_data(
            "stdlib",
            ByteTokenizer(),
            setting.length,
            island=i,
            islands=replicas,
            validation_rows=setting.held_out,
        )
        for i in range(replicas)
    ]
    train, held_out = [part.train.ids for part in parts], parts[0].validation.ids
    digest = hashlib.sha256((MODELS / f"{setting.model}.json").read_bytes())
    for rows in (*train, held_out):
        digest.update(rows.tobytes())
    return Texts(train, held_out, digest.hexdigest()[:16])


def choose(tables: str, only: str) -> dict[str, list[Cell]]:
    """The cells of the named tables; `only`: names of cells, or parts of names, of which one must
    match.

    Raises:
        ValueError: no such table, or no cell of that name.
    """
    names = list(TABLES) if tables == "all" else tables.split(",")
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise ValueError(f"--table {unknown[0]}: expected {', '.join(TABLES)} or all")
    every, wanted = (
        {c.name for name in names for c in TABLES[name]},
        [part.strip() for part in only.split(",")],
    )
    chosen = {
        name: [c for c in TABLES[name] if any(_fits(part, c.name, every) for part in wanted)]
        for name in names
    }
    if not any(chosen.values()):
        raise ValueError(f"--only {only}: no such cell; --list shows them")
    return chosen


def _fits(part: str, name: str, every: set[str]) -> bool:
    return part == name if part in every else part in name


def row(cell: Cell, result: dict[str, Any], setting: Setting) -> list[str]:
    loss = [
        f"{v:.3f}" if (v := result["loss"][name]) is not None else "diverged"
        for name in ("method", "mean", "replica")
    ]
    sent = result["bytes_sent"]
    ratio = (
        f"{full_bytes(result['parameters'], setting.steps, cell.replicas) / sent:.4g} x less"
        if sent
        else "-"
    )
    return [
        cell.name,
        *loss,
        f"{result['drift']:.1e}" if result["drift"] > 1e-7 else "-",
        size(sent) if sent else "-",
        ratio,
    ]


def caption(name: str, results: list[dict[str, Any]], setting: Setting) -> str:
    model, replicas = results[0]["parameters"], max(r["cell"]["replicas"] for r in results)
    return (
        f"Table {name}: byte-level Llama of {model / 1e6:.2f} M parameters, the Python library's "
        f"sources, {replicas} replicas, "
        f"{setting.steps} steps of {setting.batch} x {setting.length} bytes, {setting.tokens:,} "
        f"tokens per replica, seed {setting.seed}. "
        "AdamW 2e-3 (demo by sign: SGD, its own rate), cosine with warm-up, norm clipped at 1. "
        "Validation loss in nats per byte, "
        f"{setting.held_out} rows. Bytes against a ring all-reduce of bf16 gradients at every step."
    )


def show(
    name: str, cells: list[Cell], results: dict[str, dict[str, Any]], setting: Setting, output: Path
) -> None:
    """Print a table of the cells that are done and write it, as markdown and json."""
    done = [(c, results[c.name]) for c in cells if c.name in results]
    if not done:
        return
    rows = [HEAD, *(row(c, r, setting) for c, r in done)]
    text = caption(name, [r for _, r in done], setting)
    print(f"\n{text}\n\n{table(rows)}\n", flush=True)
    write(output / f"{name}.md", f"{text}\n\n{table(rows, markdown=True)}\n")
    whole = {
        "table": name,
        "setting": dataclasses.asdict(setting),
        "cells": [{**r, "cell": dataclasses.asdict(c)} for c, r in done],
    }
    write(output / f"{name}.json", json.dumps(whole, indent=2) + "\n")


def expected(cell: Cell, setting: Setting) -> float:
    """Minutes on this machine's cores: 0.1 s of one core per replica and step of 8 x 128 bytes."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    step = 0.105 * setting.batch * setting.length / 1024
    return (setting.steps * step * cell.replicas / min(cores, cell.replicas) + 5) / 60


def show_list(
    tables: dict[str, list[Cell]], keys: dict[str, str], cache: Cache, setting: Setting
) -> None:
    missing: dict[str, float] = {}
    seen = [
        (known["seconds"], 60 * expected(c, setting))
        for part in tables.values()
        for c in part
        if (known := cache.get(keys[c.name]))
    ]
    # what this machine took so far
    pace = sum(s for s, _ in seen) / sum(e for _, e in seen) if seen else 1.0
    for name, cells in tables.items():
        print(f"{name}:")
        for cell in cells:
            known = cache.get(keys[cell.name])
            if known is None:
                missing[keys[cell.name]] = pace * expected(cell, setting)
            state = (
                f"cached ({known['seconds'] / 60:.1f} min)"
                if known
                else f"missing ({missing[keys[cell.name]]:.1f} min)"
            )
            print(f"  {cell.name:<60}{keys[cell.name]}  {state}")
    print(f"missing: {len(missing)} cells, some {sum(missing.values()):.0f} minutes")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--table",
        default="first",
        help=f"one or more of {', '.join(TABLES)}, comma between, or all",
    )
    parser.add_argument(
        "--only", default="", help="cells of these names, or whose name contains one of these texts"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="show the cells, which are cached, and the expected minutes; train nothing",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=Setting.steps,
        help="for a trial: fewer steps (results of their own)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=Setting.seed,
        help="of weights and order of the data (results of their own)",
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/study"))
    args = parser.parse_args()
    if args.steps < 1 or args.seed < 0:
        parser.error("--steps must be 1 or more, --seed 0 or more")
    return args


def main() -> int:
    args = parse()
    setting = Setting(steps=args.steps, seed=args.seed)
    try:
        tables = choose(args.table, args.only)
    except ValueError as error:
        sys.exit(f"study.py: {error}")
    torch.set_num_threads(1)
    for module in LAZY:
        importlib.import_module(module)
    cells = {cell.name: cell for part in tables.values() for cell in part}
    texts = load_texts(setting, max(cell.replicas for part in TABLES.values() for cell in part))
    keys, cache = (
        {name: cell.key(setting, texts.digest) for name, cell in cells.items()},
        Cache(args.output / "cells"),
    )
    if args.list:
        show_list(tables, keys, cache, setting)
        return 0
    results, failed = {}, []
    with store() as endpoint:
        for name, part in tables.items():
            for n, cell in enumerate(part, 1):
                if cell.name not in results and cell.name not in failed:
                    results.update(
                        one(
                            cell,
                            keys[cell.name],
                            f"{name} {n}/{len(part)}",
                            setting,
                            texts,
                            endpoint,
                            cache,
                        )
                    )
                    failed += [] if cell.name in results else [cell.name]
            show(name, part, results, setting, args.output)
    if failed:
        print(f"study.py: failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def one(
    cell: Cell, key: str, where: str, setting: Setting, texts: Texts, endpoint: str, cache: Cache
) -> dict[str, Any]:
    """{name: result} of a cell, from the cache or trained now; {} if it failed."""
    result, known = cache.get(key), True
    if result is None:
        known = False
        try:
            result = {
                "cell": dataclasses.asdict(cell),
                "key": key,
                "does": cell.config().describe(),
            }
            result |= {
                "setting": dataclasses.asdict(setting),
                **run_cell(cell, setting, texts, endpoint),
            }
        except Failed as error:
            print(f"{where}: {error}", file=sys.stderr, flush=True)
            return {}
        cache.put(key, result)
    end = "cached" if known else f"{result['seconds']:.0f} s, {time.strftime('%H:%M')}"
    print("{}: {}: {}, {} ({})".format(where, *row(cell, result, setting)[:3], end), flush=True)
    return {cell.name: result}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
