"""What an exchange of momentum compression costs one replica against the size of the model, the
number of its tensors and the number of replicas: nanoseconds per element.

    python benchmarks/scale.py [--json FILE]

The library's own path (`hotpath.py`): momentum and transform, selection and codes, decode, apply,
with a message at every step. One thread pinned to one core, the thread's own CPU time, medians of
`--repeat` rounds in which all rows of a kind take turns (a small model several times).

* Size: matrices of 1024 x 1024 (one of 512 x 2048 where that is the whole model), two replicas.
* Tensors: as many elements each time, in matrices of 64 x 64 for the largest number of tensors; and
  as many tensors of 32 x 32, which are sent whole.
* Replicas: one layer of Llama-3.2-1B cut over eight shards.
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
    Watch,
    elements,
    here,
    layer,
    pin,
    say_where,
    silent,
)
from fsdp_demo import preset  # noqa: E402

SIZES = (1, 3, 10, 30, 100, 300)
TENSORS = (10, 100, 1000, 10_000)
REPLICAS = (2, 4, 8, 16)
FLAT = 0.2

Shapes = Sequence[tuple[int, int]]


def of_size(millions: int) -> Shapes:
    """Matrices of so many million (2^20) elements."""
    return [(1024, 1024)] * millions if millions > 1 else [(512, 2048)]


def of_number(count: int, most: int) -> Shapes:
    """So many equal tensors, as many elements as `most` of 64 x 64 have, to rounding."""
    return [(64, max(most // count, 1) * 64)] * count


class Run:
    """One replica that hears `replicas`, on tensors of these shapes."""

    def __init__(self, kind: str, name: str, shapes: Shapes, replicas: int, products: str):
        self.count, self.watch = elements(shapes), Watch("cpu")
        self.facts: dict[str, Any] = {"kind": kind, "name": name, "elements": self.count}
        self.facts |= {"tensors": len(shapes), "replicas": replicas}
        config = preset("demo", topk=8, **{"codec.transform_precision": products})
        self.replica = Ours(shapes, config, replicas, "cpu")
        self.gradients = [torch.randn(s) for s in shapes]
        # what others send: what this one would, of other gradients
        self.others = [
            self.replica.send([g * (i + 1) for g in self.gradients], silent).body
            for i in range(replicas - 1)
        ]

    def turn(self, elements: int, warm: bool) -> None:
        """Exchanges of so many elements in all, and one at least; those that `warm` are not
        counted."""
        for _ in range(max(1, elements // self.count)):
            if not warm:
                self.watch.start()
            look = silent if warm else self.watch
            # from the second on they hold the signs of what was received last
            mine = self.replica.send(self.gradients, look)
            self.replica.receive([mine.body, *self.others], look)

    @property
    def row(self) -> dict[str, Any]:
        """Facts and stages in ns per element."""
        return self.facts | self.watch.medians(self.count)


def measure(runs: Sequence[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of runs that take turns, so that what else the machine does hits all alike."""
    for round_ in range(args.repeat + 1):
        for run in runs:
            run.turn(args.turn, warm=not round_)
    return [run.row for run in runs]


def flat(found: Sequence[dict[str, Any]]) -> float:
    """How far the costs per element lie apart: largest over smallest, less 1."""
    return max(f["all"] for f in found) / min(f["all"] for f in found) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="in 2^20")
    parser.add_argument("--tensors", type=int, nargs="*", default=list(TENSORS))
    parser.add_argument("--replicas", type=int, nargs="*", default=list(REPLICAS))
    parser.add_argument("--hidden", type=int, default=2048, help="width of the layer (replicas)")
    parser.add_argument("--products", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--turn",
        type=int,
        default=10_000_000,
        help="elements in a model's turn; a smaller model has several exchanges",
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    pin()
    torch.manual_seed(0)
    most = max(args.tensors, default=0)
    kinds: dict[str, list[tuple[str, Shapes, int]]] = {
        "size": [(f"{n} M elements", of_size(n), 2) for n in args.sizes],
        "tensors": [(f"{n} matrices", of_number(n, most), 2) for n in args.tensors]
        + [(f"{most} sent whole", [(32, 32)] * most, 2)] * bool(most),
        "replicas": [(f"{n} replicas", layer(args.hidden), n) for n in args.replicas],
    }
    rows = []
    for kind, cases in kinds.items():
        rows += measure([Run(kind, *case, args.products) for case in cases], args)
    say_where("cpu")
    stages = [k for k in rows[0] if k not in ("kind", "name", "elements", "tensors", "replicas")]
    body = [[r["name"], f"{r['elements']:,}", *(f"{r[s]:.2f}" for s in stages)] for r in rows]
    print(table([["", "elements", *stages], *body]))
    spread = {}
    if sizes := [r for r in rows if r["kind"] == "size"]:
        spread["size"] = flat(sizes)
        print(f"against size: {spread['size']:.0%} apart (goal {FLAT:.0%})")
    if args.json:
        head = {"repeat": args.repeat, "products": args.products, **here("cpu"), "spread": spread}
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
