"""Islands of unlike speed: equal steps beside steps by speed, in time and in loss.

    fsdp-demo rehearse --islands 3 --procs 1 --cpu -- benchmarks/unlike.py

Three islands of one process and one thread train `tiny` on English bytes. Each step is filled up
with sleep to `--pause` seconds on island 0, twice that on island 1 and four times on island 2: the
speeds 1, 1/2 and 1/4. `by_speed` trains `--rounds` rounds. `equal` trains as many tokens in all,
with 7/12 of the period, so that an exchange follows as many tokens; its loss does not depend on
speeds, so only its first `--paced` rounds have the sleep. "Busy" is the share of an island's time
in which it did not wait for the others, without the first round, whose end tells the speeds. The
loss is that of held-out bytes, on the common model. The learning rate falls to zero over each run.
`fsdp-demo plan --mix` predicts the seconds of a tick of the run's clock, also on a rehearsed link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from model import load_model  # noqa: E402

import fsdp_demo  # noqa: E402
from benchmarks.common import Parser, at_least_one, processor  # noqa: E402

SLOWER = (1, 2, 4)
"""How many times longer a step takes, by island."""

PRESETS = {
    "diloco": dict(period=24, momentum_warmup=20),
    "sparse_loco": dict(period=24),
    "sign_loco": dict(period=12, switch=0.25),
}
RATES = {"diloco": 4e-3, "sparse_loco": 4e-3, "sign_loco": 8e-3}


def rows(text: torch.Tensor, island: int, number: int, args: argparse.Namespace) -> torch.Tensor:
    """Tokens [batch, length] of one own step of one island; island -1: held out."""
    draw = torch.Generator().manual_seed(1_000_000 * args.seed + 1000 * number + island + 1)
    starts = torch.randint(len(text) - args.length, (args.batch,), generator=draw)
    return torch.stack([text[s : s + args.length] for s in starts]).long()


def cell(name: str, how: str, texts: list[torch.Tensor], args: argparse.Namespace) -> dict:
    """One run on this island: shares of time, tokens and loss of all."""
    changes, by_speed = dict(PRESETS[name]), how == "by_speed"
    steps = args.rounds * changes["period"]
    if not by_speed:  # all three take as many as these in all: 3 rounds' worth, then 7/4
        steps = round(changes["period"] * (3 + 1.75 * (args.rounds - 1)) / 3)
        changes["period"] = changes["period"] * 7 // 12
        steps += -steps % changes["period"]
    os.environ["ISLAND_RUN"] = f"{args.run}-{name}-{how}-{args.seed}"
    torch.manual_seed(args.seed)
    model = load_model("tiny", 258)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[name], weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / (steps + 1))
    exchange = fsdp_demo.attach(
        optimizer, name, model=model, must_match={"steps": steps}, local_steps=how, **changes
    )
    exchange.on_left_out(schedule.step)
    island = exchange.topology.island
    paced = steps if by_speed else args.paced * changes["period"]
    marks, rest = {}, 0.0
    while exchange.step < steps:
        whole = args.pause * SLOWER[island] * (exchange.step < paced)
        until = time.perf_counter() + whole - rest  # the optimizer's part comes behind the sleep
        ids = rows(texts[0], island, exchange.steps_taken, args)
        model(input_ids=ids, labels=ids).loss.backward()
        time.sleep(max(until - time.perf_counter(), 0.0))
        woke = time.perf_counter()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rest = min(rest or 1.0, time.perf_counter() - woke)
        marks[exchange.step] = time.perf_counter(), exchange.metrics()["seconds_waiting"]
    (began, before), (ended, after) = marks[changes["period"]], marks[paced]
    tick = (ended - began) / (paced - changes["period"])
    share, taken = 1 - (after - before) / (ended - began), float(exchange.steps_taken)
    *busy, mean = exchange.across_islands.mean(
        [3 * share * (i == island) for i in range(3)] + [taken]
    )
    exchange.finish()
    with torch.no_grad():
        held_out = [rows(texts[1], -1, n, args) for n in range(args.held_out)]
        loss = sum(float(model(input_ids=ids, labels=ids).loss) for ids in held_out)
    return {
        "preset": name,
        "local_steps": how,
        "seed": args.seed,
        "steps of each": [*exchange.local_steps.values()] or [changes["period"]] * 3,
        "busy": [round(b, 3) for b in busy],
        "seconds of a tick": round(tick, 4),
        "tokens": round(mean * 3) * args.batch * args.length,
        "loss": round(loss / len(held_out), 4),
    }


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=30)
    parser.add_argument("--seeds", type=at_least_one, default=2)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds of the fastest step")
    parser.add_argument("--paced", type=at_least_one, default=3, help="rounds of `equal`")
    parser.add_argument("--batch", type=at_least_one, default=4)
    parser.add_argument("--length", type=at_least_one, default=64)
    parser.add_argument("--held-out", type=at_least_one, default=64, help="batches")
    parser.add_argument("--only", nargs="+", default=[*PRESETS], help="presets")
    args = parser.parse_args()
    topology = fsdp_demo.Topology.from_env()
    if topology.islands != 3:
        raise SystemExit("unlike.py: needs three islands: fsdp-demo rehearse --islands 3 --procs 1")
    torch.set_num_threads(1)
    args.run = os.environ.get("ISLAND_RUN", "unlike")
    raw = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8)
    texts = list(raw.tensor_split([len(raw) * 9 // 10]))
    print(processor())
    for name, seed, how in itertools.product(args.only, range(args.seeds), ("by_speed", "equal")):
        args.seed = seed
        row = cell(name, how, texts, args)
        if topology.island == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
