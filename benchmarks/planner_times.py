"""The planner's times of a CPU: processor time per value of an exchange in the training thread, and
per byte in all other threads.

    fsdp-demo rehearse --islands 2 --procs 1 --cpu --launcher torchrun -- benchmarks/planner_times.py

Two islands without a limit on the link, 8.4 million values in eight square layers, one thread. Each
setting exchanges at every step, and is compared with its optimizer alone. Processor time is counted
(`time.thread_time`, `time.process_time`), so that waiting and other programs do not count. Medians.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
from torch import nn

import fsdp_demo

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, fp32": ("diloco", {"period": 1}),
    "dense, bf16": ("full", {"value_dtype": "bf16"}),
    "sparse": ("sparse_loco", {"period": 1}),
    "transformed": ("demo", {}),
}


def medians(
    name: str, changes: dict[str, Any], exchanges: bool, args: argparse.Namespace
) -> tuple[float, float, float]:
    """Seconds of a step of the optimizer: of the training thread, and of all others; bytes sent."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
    config = fsdp_demo.preset(name, **changes)
    optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr=1e-4)
    os.environ["ISLAND_RUN"] = f"{RUN}-{name}-{exchanges}"
    exchange = fsdp_demo.attach(optimizer, config, model=model) if exchanges else None
    main, others = [], []
    for _ in range(args.steps):
        model(torch.randn(4, args.width)).square().mean().backward()
        thread, process = time.thread_time(), time.process_time()
        optimizer.step()
        thread, process = time.thread_time() - thread, time.process_time() - process
        main.append(thread)
        others.append(process - thread)
        optimizer.zero_grad()
    sent = 0.0
    if exchange is not None:
        sent = exchange.metrics()["bytes_sent"] / args.steps
        exchange.finish()
    settled = slice(args.steps // 4, None)
    return statistics.median(main[settled]), statistics.median(others[settled]), sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=16, help="the first quarter is not counted")
    parser.add_argument("--width", type=int, default=1024, help="of the layers")
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    values = args.layers * (args.width * args.width + args.width)
    lines = []
    for words, (name, changes) in SETTINGS.items():
        alone, _, _ = medians(name, changes, exchanges=False, args=args)
        thread, others, sent = medians(name, changes, exchanges=True, args=args)
        lines.append(
            f"{words:12} {1e9 * (thread - alone) / values:6.2f} ns per value in the training "
            f"thread, {1e9 * others / sent:6.2f} ns per byte sent in the others ({sent:.0f} B)"
        )
    if os.environ.get("ISLAND_RANK", "0") == "0":
        print("\n".join(lines), flush=True)


RUN = os.environ.get("ISLAND_RUN", "planner_times")

if __name__ == "__main__":
    main()
