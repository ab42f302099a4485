"""What it costs a replica to decode and apply what R replicas have sent: nanoseconds per element
against R.

    python benchmarks/decode.py [--json FILE] [--device cuda]

One layer of Llama-3.2-1B cut over eight shards, `--topk` coefficients of each 64 x 64 block
(`hotpath.py` has both forms). The published form scatters with counts of every coefficient; ours
touches what was sent, in rank order, and transforms once. One thread pinned to one core, the
thread's own CPU time, medians of `--repeat` rounds in which all R take turns. Messages are made
ahead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.hotpath import (  # noqa: E402
    Ours,
    Published,
    Watch,
    arguments,
    elements,
    here,
    layer,
    pin,
    say_where,
    silent,
)
from fsdp_demo import preset  # noqa: E402

REPLICAS = (1, 2, 4, 8, 16, 32)


def measure(
    shapes: Sequence[tuple[int, int]],
    topk: int,
    products: str,
    replicas: Sequence[int],
    device: str,
    repeat: int,
) -> dict[str, Any]:
    """ns per element of both forms for each number of replicas, by it."""
    config = preset("demo", topk=topk, **{"codec.transform_precision": products})
    most = max(replicas)
    ours, theirs = Ours(shapes, config, most, device), Published(shapes, topk, device)
    bodies, sets = [], []
    for _ in range(most):  # replicas that have the same past and other gradients
        gradients = [torch.randn(s, device=device) for s in shapes]
        bodies.append(ours.send(gradients, silent).body)
        sets.append(theirs.send(gradients, silent))
    watches = {r: (Watch(device), Watch(device)) for r in replicas}
    for round_ in range(repeat + 1):  # the first is a warm-up
        for r, pair in watches.items():
            for watch in pair if round_ else ():
                watch.start()
            looks = pair if round_ else (silent, silent)
            ours.receive(bodies[:r], looks[0])
            theirs.receive(sets[:r], looks[1])
    count = elements(shapes)
    return {
        str(r): {"ours_ns": w.medians(count)["all"], "published_ns": p.medians(count)["all"]}
        for r, (w, p) in watches.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--products", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS))
    if (args := arguments(parser, repeat=5)) is None:
        return
    pin()
    torch.manual_seed(0)
    shapes = layer(args.hidden, args.shards)
    found = measure(shapes, args.topk, args.products, args.replicas, args.device, args.repeat)
    say_where(args.device)
    rows = [
        [
            r,
            f"{f['published_ns']:.2f}",
            f"{f['ours_ns']:.2f}",
            f"{f['published_ns'] / f['ours_ns']:.2f}",
        ]
        for r, f in found.items()
    ]
    print(table([["replicas", "ns per element, published", "ours", "ratio"], *rows]))
    growth = {}
    if {"2", "32"} <= set(found):
        growth = {
            form: found["32"][f"{form}_ns"] / found["2"][f"{form}_ns"]
            for form in ("published", "ours")
        }
        print(
            f"from 2 to 32 replicas: published x {growth['published']:.2f}, ours x "
            f"{growth['ours']:.2f}"
        )
    if args.json:
        head = {
            "topk": args.topk,
            "products": args.products,
            "elements": elements(shapes),
            "repeat": args.repeat,
            **here(args.device),
        }
        whole = {**head, "growth": growth, "replicas": found}
        args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
