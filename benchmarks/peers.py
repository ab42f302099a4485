"""Seconds per step of presets beside other programs that do the same, over the same cable. Needs
Linux and root.

    python benchmarks/peers.py --json peers.json         # all, some 13 minutes
    python benchmarks/peers.py --peers full --links none --repeat 10
    python benchmarks/peers.py --torchft DIR            # a folder that holds torchft

`full` beside PyTorch's DistributedDataParallel, `local_sgd` beside Accelerate's LocalSGD, `diloco`
beside torchft's DiLoCo, `demo` beside the published form of DeMo; theirs over gloo
(`peers_twins.py`). Two islands in network namespaces (`network_lab.py`), one process and one core
each. Each process holds two equal models, one under each program, and trains them in turns (ABBA)
on the same batches, so that a machine that gets slower slows both.

Per link and preset: seconds per step of both (medians), their ratio (median of the pairs, and its
range), processor seconds per step of both, of all threads, and whether both models end equal.

With --json a cell is written as soon as it is done, and cells that are in the file are not measured
again.

Each island is this file once more, with `--island`. It reads one JSON command per line from its
standard input and answers each with one line.

    {"do": "meet", "run": NAME, "peer": P, "period": H}   both models, equal, and both connections
    {"do": "time", "ours": true, "settle": S, "steps": N}   S steps that are not timed, then N that are
    {"do": "compare"}                                       how far the models are apart
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.common import Parser, facts, run_id  # noqa: E402
from benchmarks.network_lab import Islands, Lab, LabError, missing  # noqa: E402
from benchmarks.peers_twins import FOLDER, LIMIT, PEERS, Peer, Place, Twin  # noqa: E402
from benchmarks.training_island import Island, answer, make_model  # noqa: E402
from fsdp_demo import Link  # noqa: E402
from fsdp_demo.net.link import parse_rtt  # noqa: E402

NAME = "peers"  # of the lab
NAMES = ("rtt", "period", "rows", "length", "layers")  # settings of all rows
TURN = 1.5  # seconds that a turn takes at least
SHORT = 2.0  # seconds of a cycle up to which one settles before each turn
BATCHES = 8
Times = dict[bool, list[dict[str, float]]]  # of ours and of theirs: turn by turn, per step


class Pairs(Islands):
    script = ("peers.py", "--island")


def measure(peer: Peer, pairs: Islands, link: Link, args: Any) -> dict[str, Any]:
    """One cell, in fresh processes. TCP meets the link as it is, but for the rate, which comes
    after the models were handed around.
    """
    lab = pairs.lab
    lab.shape(None, link.rtt / 2)
    pairs.ask(do="meet", run=run_id(), peer=peer.name, period=args.period)
    lab.shape(link.bits_per_second, link.rtt / 2)
    cycle = peer.cycle(args.period)
    # not counted: buffers are made, and TCP learns the rate
    first = [_turn(pairs, ours, 0, cycle)["seconds"] * cycle for ours in (True, False)]
    steps = cycle * max(1, round(TURN / max(first)))
    settle = cycle if max(first) <= SHORT else 0
    repeats = _repeats(sum(first) * (steps + settle) / cycle, args)
    took: Times = {True: [], False: []}
    for repeat in range(repeats):
        for ours in (False, True) if repeat % 2 else (True, False):
            took[ours].append(_turn(pairs, ours, settle, steps))
    off = max(a["off"] for a in pairs.ask(do="compare"))
    return _row(peer, link, took, off, steps)


def _turn(pairs: Islands, ours: bool, settle: int, steps: int) -> dict[str, float]:
    answers = pairs.ask(do="time", ours=ours, settle=settle, steps=steps)
    return {name: max(a[name] for a in answers) / steps for name in ("seconds", "cpu")}


def _repeats(pair: float, args: Any) -> int:
    """How many pairs of `pair` seconds: an even number, so that each side comes first as often."""
    return max(2, min(args.repeat, int(args.patience / pair)) // 2 * 2)


def _row(peer: Peer, link: Link, took: Times, off: float, steps: int) -> dict[str, Any]:
    row: dict[str, Any] = {"peer": peer.name, "program": peer.program}
    row |= {"link": str(link).partition(",")[0], "rtt_ms": 1e3 * link.rtt}
    for name in ("seconds", "cpu"):
        ours, theirs = ([turn[name] for turn in took[side]] for side in (True, False))
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        row[f"{name}_ours"], row[f"{name}_theirs"] = map(statistics.median, (ours, theirs))
        row[f"{name}_ratio"] = statistics.median(ratios)
        row[f"{name}_range"] = [ratios[0], ratios[-1]]
    same = {"off": None if peer.differs else off, "differs": peer.differs}
    return row | same | {"steps": steps, "repeats": len(took[True])}


def said(row: dict[str, Any]) -> str:
    """Whether both models end equal, in words."""
    if row["differs"]:
        return f"not comparable: {row['differs']}"
    return "bit for bit" if row["off"] == 0 else f"off by {row['off']:.0e}"


def show(rows: list[dict[str, Any]]) -> str:
    head = "preset|beside|link|s/step, ours|theirs|ratio|range|CPU s/step, ours|theirs|ratio|equal"
    body = []
    for r in rows:
        low, high = r["seconds_range"]
        times = [f"{r[n]:.3f}" for n in ("seconds_ours", "seconds_theirs")]
        cpu = [f"{r[n]:.3f}" for n in ("cpu_ours", "cpu_theirs", "cpu_ratio")]
        ratio = [f"{r['seconds_ratio']:.2f}", f"{low:.2f} to {high:.2f} of {r['repeats']}"]
        body.append([r["peer"], r["program"], r["link"], *times, *ratio, *cpu, said(r)])
    return table([head.split("|"), *body])


# ---- an island ---------------------------------------------------------------------------------


class Twins(Island):
    """Two equal models in one process, each with a connection of its own."""

    def meet(self, run: str, peer: str, period: int) -> dict[str, Any]:
        chosen = PEERS[peer]
        found = self.attach(run, peer, chosen.all_settings(period))
        island, islands = self.topology.island, self.topology.islands
        host, port = os.environ["ISLAND_ENDPOINT"].rsplit(":", 1)
        place = Place(island, islands, os.environ["ISLAND_ADDRESS"], host, int(port) + 2)
        init = f"tcp://{host}:{int(port) + 1}"
        dist.init_process_group(
            "gloo", init_method=init, rank=island, world_size=islands, timeout=LIMIT
        )
        model = make_model(self.layers, self.tokenizer.vocab_size)
        self.twin: Twin = chosen.twin(model, chosen.config(period), period, place)
        self.some = [next(self.batches) for _ in range(BATCHES)]
        self.taken = {True: 0, False: 0}
        return found

    def step_of(self, ours: bool) -> None:
        """One step of an ordinary training loop; both models see the same batches."""
        batch = self.some[self.taken[ours] % BATCHES]
        self.taken[ours] += 1
        if not ours:
            self.twin.step(batch)
            return
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time(self, ours: bool, settle: int, steps: int) -> dict[str, Any]:
        """Wall seconds, and those of the processor: all threads of this process."""
        for _ in range(settle):
            self.step_of(ours)
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step_of(ours)
        return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}

    def compare(self) -> dict[str, Any]:
        """The largest difference of two parameters, over the largest parameter of the tensor; 0:
        bit-equal.
        """
        assert self.taken[True] == self.taken[False], self.taken
        pairs = zip(self.model.parameters(), self.twin.model.parameters(), strict=True)
        with torch.no_grad():
            return {"off": max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)}


# ---- the command -------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[2:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--peers", default=",".join(PEERS), metavar="A,B", help="presets")
    parser.add_argument("--links", default="none,100Mbit,10Mbit", help="rates")
    parser.add_argument("--rtt", default="20ms", help="round trip of all links but `none`")
    parser.add_argument("--period", type=int, default=4, help="of local_sgd and diloco")
    parser.add_argument("--torchft", metavar="DIR", help="folder of packages, with torchft")
    parser.add_argument("--repeat", type=int, default=4, help="pairs per cell, an even number")
    parser.add_argument(
        "--patience", type=float, default=50.0, help="seconds per cell; never under 2 pairs"
    )
    parser.add_argument("--rows", type=int, default=1, help="rows per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows go there, too")
    parser.add_argument("--logs", default="outputs/peers", help="folder of what the islands say")
    return parser


def _checked(parser: Parser, args: argparse.Namespace) -> tuple[list[Peer], list[Link]]:
    unknown = sorted(set(args.peers.split(",")) - set(PEERS))
    if unknown:
        parser.error(f"--peers {','.join(unknown)}: allowed are {', '.join(PEERS)}")
    if args.repeat < 2 or args.repeat % 2 or args.period < 1:
        parser.error("--repeat is an even number from 2, --period from 1")
    try:
        rtt = parse_rtt(args.rtt)
        rates = [Link.parse(text).bits_per_second for text in args.links.split(",")]
    except ValueError as error:
        parser.error(str(error))
    links = [Link(rate, rtt if rate else 0.0) for rate in rates]
    return [PEERS[name] for name in args.peers.split(",")], links


def _saved(parser: Parser, path: Path | None, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that are in the file."""
    if path is None or not path.is_file():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["settings"] != shared:
        parser.error(f"--json {path} holds rows of other settings or another machine")
    return list(saved["rows"])


def _measured(cells: list[tuple[Link, Peer]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows, one after the other."""
    lab = Lab(2, NAME)
    try:
        lab.up()
        for link, peer in cells:
            began = time.monotonic()
            lab.shape(None, 0.0)
            pairs = Pairs(lab, (args.rows, args.length, args.layers), args.logs)
            row = measure(peer, pairs, link, args)
            pairs.end()
            print(f"{show([row])}\n{time.monotonic() - began:.0f} s", file=sys.stderr)
            yield row
    finally:
        lab.down()


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    peers, links = _checked(parser, args)
    if args.torchft is not None:
        os.environ[FOLDER] = str(Path(args.torchft).resolve())
        sys.path.append(os.environ[FOLDER])
    shared = facts(args, NAMES)
    rows = _saved(parser, args.json, shared)
    for reason in filter(None, (peer.missing() for peer in peers)):
        print(reason, file=sys.stderr)
    done = {(row["peer"], row["link"]) for row in rows}
    cells = [(link, peer) for link in links for peer in peers if not peer.missing()]
    todo = [c for c in cells if (c[1].name, str(c[0]).partition(",")[0]) not in done]
    if todo and (why := missing()):
        parser.error(why)
    try:
        for row in _measured(todo, args) if todo else ():
            rows.append(row)
            if args.json is not None:
                text = json.dumps({"settings": shared, "rows": rows}, indent=1)
                args.json.write_text(text + "\n", encoding="utf-8")
    except LabError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(show(sorted(rows, key=lambda row: list(PEERS).index(row["peer"]))))


if __name__ == "__main__":
    answer(Twins) if "--island" in sys.argv else main()
