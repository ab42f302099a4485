"""What a resume costs that leaves out accumulators and messages in flight: losses against those of
a run that goes on whole.

    python benchmarks/resumed.py [--presets demo,sparse_loco] [--seeds 3] [--json FILE]

Two replicas, threads of one process, train the model `tiny` on the Python library's text. They stop
between two exchanges and go on three times from there: with all their state, without, and with all
of it on other rows of the text, which says what is noise. A step trains 1,024 bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from data import load_data, load_tokenizer  # noqa: E402
from pretrain import load_model  # noqa: E402
from report import table  # noqa: E402

import fsdp_demo  # noqa: E402
from benchmarks.common import at_least_one, facts  # noqa: E402

RUNS: dict[str, tuple[str, dict[str, Any], float]] = {
    "demo": ("demo", {}, 1e-3),
    "decoupled_momentum": ("decoupled_momentum", {"period": 5}, 2e-3),
    "sparse_loco": ("sparse_loco", {"period": 5, "topk": 32}, 4e-3),
    "sign_muloco": ("sign_muloco", {}, 4.5e-2),
    "streaming_diloco": ("streaming_diloco", {"period": 10, "delay": 5, "layers": 1}, 2e-3),
}
"""Preset, changes and learning rate: as the study's grid chose, or near it."""
REPLICAS, ROWS, LENGTH, WARM_UP = 2, 2, 256, 20


class Replica:
    """One replica: its model and optimizer, and what it trains on."""

    def __init__(self, name: str, seed: int, number: int, data: Any):
        self.data, self.number = data, number
        preset, changes, self.lr = RUNS[name]
        self.config = fsdp_demo.preset(preset, **changes)
        torch.manual_seed(seed)
        self.model = load_model("tiny", 258)
        self.optimizer = fsdp_demo.base_optimizer(
            self.config, self.model.named_parameters(), self.lr
        )

    def train(self, exchange: Any, steps: range, order: int) -> None:
        """Take these steps, on the rows of this order."""
        rows = self.data.train.ids
        for t in steps:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (t + 1) / WARM_UP)
            drawn = torch.Generator().manual_seed(1_000_003 * order + 101 * t + self.number)
            chosen = torch.randint(len(rows), (ROWS,), generator=drawn)
            ids = torch.stack([torch.tensor(rows[int(i)], dtype=torch.long) for i in chosen])
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self) -> float:
        """On the held-out rows."""
        ids = torch.stack([torch.tensor(row, dtype=torch.long) for row in self.data.validation.ids])
        return float(self.model(input_ids=ids, labels=ids).loss)


def without(state: dict[str, Any]) -> dict[str, Any]:
    """A state without accumulators and messages in flight."""
    state = deepcopy(state)
    lost = {name for f in state["in_flight"] for name in f["parts"]}
    state["in_flight"], state["last"] = [], state["last"] | dict.fromkeys(lost, -1)
    for kept in state["channels"].values():
        if "accumulator" in kept:
            kept["accumulator"].zero_()
        kept["present"] = [False] * len(kept["present"])
    return state


WAYS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], int]] = {
    "whole": (deepcopy, 0),
    "without": (without, 0),
    "other rows": (deepcopy, 1000),
}


def replica(
    name: str, seed: int, number: int, store: Any, data: Any, args: argparse.Namespace
) -> dict[str, list[float]]:
    """The held-out losses of one replica after each way to go on."""

    def topology(of: str) -> fsdp_demo.Topology:
        return fsdp_demo.Topology.from_store(dist.PrefixStore(of, store), number, REPLICAS, 600)

    me = Replica(name, seed, number, data)
    exchange = fsdp_demo.attach(me.optimizer, me.config, model=me.model, topology=topology("begin"))
    me.train(exchange, range(args.stop), seed)
    saved = deepcopy((exchange.state_dict(), me.model.state_dict(), me.optimizer.state_dict()))
    exchange.detach()
    out = {}
    for way, (changed, order) in WAYS.items():
        me = Replica(name, seed, number, data)
        me.model.load_state_dict(saved[1])
        me.optimizer.load_state_dict(deepcopy(saved[2]))
        exchange = fsdp_demo.attach(
            me.optimizer,
            me.config,
            model=me.model,
            topology=topology(way),
            state=changed(saved[0]),
        )
        out[way], begin = [], args.stop
        for after in args.after:
            me.train(exchange, range(begin, args.stop + after), seed + order)
            out[way].append(me.loss())
            begin = args.stop + after
        exchange.detach()
    return out


def run(name: str, seed: int, data: list[Any], args: argparse.Namespace) -> dict[str, list[float]]:
    """The mean losses of all replicas."""
    store, found = dist.HashStore(), [dict[str, list[float]]() for _ in range(REPLICAS)]

    def work(i: int) -> None:
        found[i] = replica(name, seed, i, store, data[i], args)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        way: [statistics.mean(losses) for losses in zip(*(f[way] for f in found), strict=True)]
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", default=",".join(RUNS))
    parser.add_argument("--seeds", type=at_least_one, default=3)
    parser.add_argument("--stop", type=int, default=103, help="steps before the stop")
    parser.add_argument(
        "--after", type=int, nargs="+", default=[8, 50], help="steps after it, at the comparisons"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens = load_tokenizer("bytes")
    data = [
        load_data("stdlib", tokens, LENGTH, island=i, islands=REPLICAS) for i in range(REPLICAS)
    ]
    rows: list[dict[str, Any]] = []
    for name in args.presets.split(","):
        for seed in range(args.seeds):
            rows.append({"preset": name, "seed": seed, "losses": run(name, seed, data, args)})
            print(rows[-1], flush=True)
    if args.json:
        args.json.write_text(
            json.dumps(
                {**facts(args, ["presets", "seeds", "stop", "after"]), "rows": rows}, indent=1
            )
            + "\n"
        )
    print(table(summary(rows, args.after)))


def summary(rows: list[dict[str, Any]], afters: list[int]) -> list[list[str]]:
    """Head and rows: the loss that goes on whole, and how far the others lie above it."""
    head = ["preset", "steps after", "whole", *(way for way in WAYS if way != "whole")]
    out = []
    for name in dict.fromkeys(row["preset"] for row in rows):
        for i, after in enumerate(afters):
            mine = [row["losses"] for row in rows if row["preset"] == name]
            cells = [f"{statistics.mean(losses['whole'][i] for losses in mine):.4f}"]
            for way in head[3:]:
                apart = [losses[way][i] - losses["whole"][i] for losses in mine]
                cells.append(" ".join(f"{d:+.4f}" for d in apart))
            out.append([name, str(after), *cells])
    return [head, *out]


if __name__ == "__main__":
    main()
