"""What a checkpoint costs: seconds and bytes of save and load, beside Accelerate's `save_state` and
`load_state`, in one run.

    python benchmarks/checkpoint.py [--model small] [--exchange diloco] [--folder DIR] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py      # FSDP2 over two ranks

`save_state` keeps model, inner optimizer and random states; the exchange's own state, which it
lacks, is a row of its own here. Both kinds write to the same disk. Ours also syncs files, checks
sums and renames (row "seal", "verify"). "blocked" is how long training stands still. Medians of
`--repeat` rounds after one that is not counted; reads come from the page cache.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from model import load_model  # noqa: E402
from report import size, table  # noqa: E402
from torch.distributed.checkpoint import HuggingFaceStorageWriter, async_save, save  # noqa: E402

import fsdp_demo  # noqa: E402
from fsdp_demo.checkpoint import CheckpointManager, load_exchange, save_exchange  # noqa: E402
from fsdp_demo.checkpoint.exchange_state import describe_part  # noqa: E402
from fsdp_demo.checkpoint.files import copied, write_part  # noqa: E402
from fsdp_demo.checkpoint.run_state import random_states  # noqa: E402
from fsdp_demo.checkpoint.sharded_state import load_tensors, tensors_of  # noqa: E402
from fsdp_demo.hosts.torch_params import unwrap  # noqa: E402
from fsdp_demo.integrations.accelerate import accelerator  # noqa: E402
from fsdp_demo.peers.votes import Ranks  # noqa: E402


class Clock:
    """Seconds of named parts, over rounds; all ranks begin and end a part together."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, run: Callable[[], Any]) -> Any:
        self._together()
        begin = time.perf_counter()
        value = run()
        self._together()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
        return value

    def _together(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name][1:])


def weight(folder: Path) -> int:
    """Bytes below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


class Bench:
    """A replica after two steps, and the ways to save it."""

    def __init__(self, model: str, exchange: str, parent: str | None):
        self.acc = accelerator()
        made = Ranks.everywhere(self.acc.device).from_first(
            lambda: tempfile.mkdtemp(prefix="checkpoint-", dir=parent)
        )
        self.folder = folder = Path(made)
        torch.manual_seed(0)
        config = fsdp_demo.load_config(exchange)
        module = load_model(model, 258)
        self.parameters = sum(p.numel() for p in module.parameters())
        optimizer = fsdp_demo.base_optimizer(config, module.named_parameters(), 1e-3)
        self.model, self.optimizer = self.acc.prepare(module, optimizer)
        self.topology = fsdp_demo.Topology.from_env({})
        self.checkpoints = CheckpointManager(folder / "ours", self.topology, keep=1)
        self.exchange = fsdp_demo.attach(
            self.optimizer, config, model=self.model, topology=self.topology
        )
        self.plain, self.number, self.clock = folder / "accelerate", 0, Clock()
        self.train(2)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            rows = torch.randint(0, 256, (1, 64), device=self.acc.device)
            self.acc.backward(self.model(input_ids=rows, labels=rows).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def accelerate(self) -> None:
        if self.acc.is_main_process:
            shutil.rmtree(self.plain, ignore_errors=True)
        # torch.distributed.checkpoint steps an optimizer that has no state
        with self.exchange.paused():
            self.clock("save_state", lambda: self.acc.save_state(str(self.plain)))
            self.clock("load_state", lambda: self.acc.load_state(str(self.plain)))

    def ours(self) -> None:
        """A checkpoint in its parts, and read back."""
        clock, group, rank = self.clock, self.checkpoints.group, self.topology.rank
        self.number += 1

        def write(folder: Path) -> None:
            writer = HuggingFaceStorageWriter(str(folder / "model"), save_distributed=True)
            clock(
                "model",
                lambda: save(
                    tensors_of(self.model, [unwrap(self.optimizer)]),
                    storage_writer=writer,
                    process_group=group,
                ),
            )
            clock("exchange", lambda: save_exchange(folder / "exchange", self.exchange))
            clock(
                "loop",
                lambda: write_part(folder / "loop", f"rank{rank}", {}, {"random": random_states()}),
            )

        clock("all", lambda: self.checkpoints.save(self.number, write))
        folder = self.checkpoints.path(self.number)
        clock("verify", lambda: self.checkpoints.verify(folder))
        clock(
            "load model",
            lambda: load_tensors(folder / "model", self.model, [unwrap(self.optimizer)], group),
        )
        saved = load_exchange(folder / "exchange")
        clock(
            "load exchange", lambda: self.exchange.load_state_dict(saved.state_for(self.exchange))
        )

    def behind(self) -> None:
        """The same while training goes on."""
        self.number += 1

        def write(folder: Path) -> Callable[[], None]:
            writer = HuggingFaceStorageWriter(str(folder / "model"), save_distributed=True)
            live = tensors_of(self.model, [unwrap(self.optimizer)])
            group, part = self.checkpoints.group, f"rank{self.topology.rank}"
            under_way = async_save(live, storage_writer=writer, process_group=group)
            head, state = describe_part(self.exchange), copied(self.exchange.state_dict())

            def rest() -> None:
                write_part(folder / "exchange", part, head, state)
                under_way.result()

            return rest

        begin = time.perf_counter()
        self.clock("blocked", lambda: self.checkpoints.save(self.number, write, wait=False))
        self.checkpoints.wait()
        self.clock.seconds.setdefault("complete", []).append(time.perf_counter() - begin)

    def rows(self) -> list[list[str]]:
        median, folder = self.clock.median, self.checkpoints.path(self.number)
        model, exchange = weight(folder / "model"), weight(folder / "exchange")
        seal = median("all") - sum(median(n) for n in ("model", "exchange", "loop"))
        loads = ["load model", "load exchange", "verify"]

        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.3f}"

        lines: list[tuple[str, float | None, float | None, int | None]] = [
            (
                "Accelerate save_state",
                median("save_state"),
                median("load_state"),
                weight(self.plain),
            ),
            ("ours: model, optimizer", median("model"), median("load model"), model),
            ("ours: exchange", median("exchange"), median("load exchange"), exchange),
            ("ours: random states", median("loop"), None, None),
            ("ours: seal, verify", seal, median("verify"), None),
            ("ours: all", median("all"), sum(map(median, loads)), model + exchange),
            ("ours, async: blocked", median("blocked"), None, None),
            ("ours, async: until complete", median("complete"), None, None),
        ]
        text = [
            [name, seconds(a), seconds(b), "-" if c is None else size(c)] for name, a, b, c in lines
        ]
        return [["", "save, s", "load, s", "size"], *text]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="small",
        help="a json of recipes/models by name or path, or a hub id; fresh weights",
    )
    parser.add_argument("--exchange", default="diloco", help="preset name or yaml file")
    parser.add_argument(
        "--folder", help="where to write, on the disk of interest (default: a temporary folder)"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", help="write the seconds of all rounds here")
    args = parser.parse_args()
    bench = Bench(args.model, args.exchange, args.folder)
    try:
        for _ in range(args.repeat + 1):
            bench.accelerate()
            bench.ours()
            bench.behind()
        if bench.acc.is_main_process:
            print(
                f"{args.exchange}, {bench.parameters:,} parameters, {bench.topology.world} ranks, "
                f"{bench.acc.device}"
            )
            print(table(bench.rows()))
        if args.json and bench.acc.is_main_process:
            Path(args.json).write_text(json.dumps(bench.clock.seconds, indent=1) + "\n")
    finally:
        bench.checkpoints.close()
        bench.exchange.detach()
        if bench.acc.is_main_process:
            shutil.rmtree(bench.folder, ignore_errors=True)
        bench.acc.end_training()


if __name__ == "__main__":
    main()
