"""DropCompute: tokens per second with and without it, and loss at equal time and at equal tokens.

    fsdp-demo rehearse --islands 4 --procs 1 --cpu -- benchmarks/drop.py --json outputs/drop.json

Each micro-batch of each island takes `--base` seconds and a log-normal delay (sigma 1) whose mean
is half of that, as in the paper's simulation (arXiv 2306.10598): what computing leaves of it is
slept. With `--drawn` nothing is slept, and all clocks go by the drawn seconds, for a machine that
has other work: computing, dropping and exchanges are as real. With "slow" island 0 takes 1.5 times
as long, too.

Every cell trains `tiny` for so many steps; its held-out loss is read off along the way, outside the
time. Loss at equal time is that at the time that the quickest cell needs, loss at equal tokens that
at the tokens of the one that drops most; both between two readings, on a straight line. Two exact
cells: islands weigh alike, or by their tokens. The first steps, in which "auto" drops nothing yet,
count for the losses alone.
"""

from __future__ import annotations

import itertools
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

import fsdp_demo  # noqa: E402
from benchmarks.common import Parser, facts  # noqa: E402
from fsdp_demo.exchange import drop as dropping  # noqa: E402

LENGTH, ROWS = 64, 1
CELLS: dict[str, dict[str, Any]] = {
    "none": {},
    "published": {"drop.divisor": "published"},
    "exact": {"drop.divisor": "exact"},
    "exact, by tokens": {"drop.divisor": "exact", "reducer.weight": "tokens"},
}

HEAD = ["islands", "seed", "divisor", "limit, s", "dropped, %", "tokens/s", "ratio"]
HEAD += ["loss at equal time", "at equal tokens"]


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of Python's library [rows, LENGTH], to train on and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    raw = b"".join(f.read_bytes() for f in files)[: 1 << 23]
    ids = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[64:], rows[:64]


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


class Island:
    """One cell on this island."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, args: Any, name: str, seed: int, slow: bool, data: Any):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(ROOT / "recipes" / "models" / "tiny.json")
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_config(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        drop = {"drop.limit": args.limit, **CELLS[name]} if CELLS[name] else {}
        self.now = 0.0  # of the drawn seconds
        if args.drawn:
            dropping.clock = self.clock = lambda: self.now
            self.optimizer.register_step_post_hook(self.wait)  # ahead of the exchange's
        how = {"model": self.model, "inner_optimizers": "as_is", **drop}
        self.exchange = fsdp_demo.attach(self.optimizer, args.exchange, **how)
        island = self.exchange.topology.island
        self.draw = torch.Generator().manual_seed(1000 * seed + island)
        self.delays = torch.Generator().manual_seed(2000 * seed + island)
        self.name, self.args, self.rows, self.held_out = name, args, *data
        self.base = args.base * (1.5 if slow and island == 0 else 1.0)

    def micro_batch(self, seconds: float) -> None:
        """One micro-batch, which takes so long, or as long as its computing has to."""
        ends, self.now = time.perf_counter() + seconds, self.now + seconds
        ids = self.rows[torch.randint(len(self.rows), (ROWS,), generator=self.draw)]
        (loss_of(self.model, ids) / self.args.micro).backward()
        self.exchange.report(tokens=ids.numel())
        time.sleep(0.0 if self.args.drawn else max(0.0, ends - time.perf_counter()))

    def wait(self, *_: Any) -> None:
        """Drawn seconds go on to those of the last island: each waits for its message."""
        self.now = self.exchange.across_islands.largest([self.now])[0]

    def step(self) -> float:
        """One step, and its seconds."""
        normal, began = torch.randn(self.args.micro, generator=self.delays), self.clock()
        for micro, each in enumerate((normal - 0.5).exp()):  # log-normal of mean 1
            if not self.exchange.time_is_up(micro, self.args.micro):
                self.micro_batch(self.base * (1 + 0.5 * float(each)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.clock() - began

    @torch.no_grad()
    def reading(self, seconds: float) -> tuple[float, int, float]:
        """Seconds, tokens of all islands, and held-out loss."""
        tokens = sum(self.exchange.across_islands.mean([self.exchange.tokens]))
        loss = float(loss_of(self.model, self.held_out))
        return seconds, round(tokens * self.exchange.topology.islands), loss

    def run(self) -> dict[str, Any]:
        """The readings, and figures from the step on in which the limit is known."""
        seconds, curve = 0.0, [self.reading(0.0)]
        while self.exchange.step < self.args.steps:
            seconds += self.step()
            done = self.exchange.step in (self.first, self.args.steps)
            if done or self.exchange.step % self.args.every == 0:
                curve.append(self.reading(seconds))
                if self.exchange.step == self.first:
                    start = curve[-1]
        asked = (self.args.steps - self.first) * self.args.micro
        dropped = self.exchange.across_islands.mean([self.exchange.drop.dropped / asked])[0]
        limit = self.exchange.drop.limit if CELLS[self.name] else None
        found = {"curve": curve, "dropped": dropped, "limit": limit}
        self.exchange.finish()
        spent, made, _ = (b - a for a, b in zip(start, curve[-1], strict=True))
        return {**found, "tokens/s": made / spent}

    @property
    def first(self) -> int:
        """The steps in which nothing is dropped."""
        return dropping.RECORDED if self.args.limit == "auto" else 1


def at(curve: list[Any], axis: int, value: float) -> float:
    """The loss of a curve where its time (axis 0) or its tokens (1) are `value`."""
    for a, b in itertools.pairwise(curve):
        if b[axis] >= value:
            return a[2] + (b[2] - a[2]) * (value - a[axis]) / (b[axis] - a[axis])
    return curve[-1][2]


def rows_of(cells: dict[str, Any]) -> list[list[str]]:
    """A row for each cell of one seed and one kind of islands."""
    ends = [cell["curve"][-1] for cell in cells.values()]
    seconds, tokens = (min(end[axis] for end in ends) for axis in (0, 1))
    plain = cells["none"]["tokens/s"]
    return [
        [
            name,
            "" if cell["limit"] is None else f"{cell['limit']:.2f}",
            f"{100 * cell['dropped']:.1f}",
            f"{cell['tokens/s']:,.0f}",
            f"{cell['tokens/s'] / plain:.3f}",
            f"{at(cell['curve'], 0, seconds):.3f}",
            f"{at(cell['curve'], 1, tokens):.3f}",
        ]
        for name, cell in cells.items()
    ]


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--exchange", default="full", help="a preset")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=8, help="steps from a reading to the next")
    parser.add_argument("--micro", type=int, default=10, help="micro-batches of a step")
    parser.add_argument("--base", type=float, default=0.1, help="seconds of one at least")
    parser.add_argument("--drawn", action="store_true", help="go by the drawn seconds")
    parser.add_argument("--limit", type=lambda t: t if t == "auto" else float(t), default="auto")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write readings there, too")
    args = parser.parse_args()
    if args.steps <= dropping.RECORDED:
        parser.error(f"--steps {args.steps}: more than {dropping.RECORDED}, which are not counted")
    torch.set_num_threads(1)
    data, found, body = text(), [], []
    for slow, seed in itertools.product((False, True), range(args.seeds)):
        cells = {name: Island(args, name, seed, slow, data).run() for name in CELLS}
        kind = "one slow" if slow else "alike"
        found.append({"islands": kind, "seed": seed, "cells": cells})
        body += [[kind, str(seed), *row] for row in rows_of(cells)]
    if fsdp_demo.Topology.from_env().island == 0:
        print(facts(args, ())["machine"])
        print(table([HEAD, *body]))
        if args.json is not None:
            names = ("exchange", "steps", "micro", "base", "lr", "drawn")
            kept = {**facts(args, names), "rows": found}
            args.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
