"""The planner against links that really are slow: 36 cells are predicted, written to a file, then
measured. Needs Linux and root.

    python benchmarks/slow_link_predict.py --predict predicted.json --json measured.json     # some 20 minutes
    python benchmarks/slow_link_predict.py --offline docs/figures/slow_link.json             # against an older measurement, no root

The same islands, cables and training as in `slow_link.py`: 12 settings on 3 links, and on a link
without limits, which gives the step's time. First one run of each setting without a limit says how
long steps take. From that, and the planner's constants, the seconds per step of every cell are
predicted and written to --predict; the file's SHA-256 is printed. Then every cell is measured in 3
repeats, its links in turns. A cell counts as met where the seconds per step are within 20 %: those
of the link without limits in the same repeats, and the seconds that the link was predicted to add.

With --islands-per-uplink N the lab has sites of N islands, and the rate and the round trip are those
of a site's uplink. --period, --length and --layers make steps short, so that the link decides.
"""  # noqa: E501

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks import (  # noqa: E402
    common,
    slow_link,
)
from benchmarks.network_lab import Islands, Lab, LabError, missing  # noqa: E402
from benchmarks.slow_link import Case, Cell  # noqa: E402
from fsdp_demo import ExchangeConfig, Link  # noqa: E402
from fsdp_demo.net.link import parse_rtt  # noqa: E402
from fsdp_demo.tools.planner import Situation  # noqa: E402
from fsdp_demo.tools.planner.line import System  # noqa: E402
from fsdp_demo.tools.planner.models import Shape, Tensors  # noqa: E402
from fsdp_demo.tools.planner.rows import plan_row  # noqa: E402

TOLERANCE, NEEDED = 0.2, 30
NAMES = ("islands", "islands_per_uplink", "rtt", "links", "repeat", "layers", "length", "period")
LINKS, PERIOD, LAYERS, LENGTH = "1Gbit,100Mbit,20Mbit", 20, 6, 256


def grid(period: int = PERIOD) -> list[Case]:
    """12 settings: those of `slow_link.py` without `desloc`, whose cycle is 6 periods, and three
    more. Late exchanges have three quarters of the period.
    """
    kept = [c for c in slow_link.cases(period, 3 * period // 4) if c.preset != "desloc"]
    return [
        *kept,
        Case(f"sparse_loco, period {period}", "sparse_loco", {"period": period}, period),
        Case("sign_loco", "sign_loco", {}, 10),
        Case(f"muloco, period {period}", "muloco", {"period": period}, period),
    ]


def tensors(layers: int) -> Tensors:
    """What the islands train (`training_island.SHAPE`, 258 bytes and marks)."""
    return Shape(320, 896, layers, 5, 5, 258).tensors()


def added(
    config: ExchangeConfig, link: Link, step: float, model: Tensors, islands: int, sharing: int = 1
) -> float:
    """Seconds per step that a link adds to the same training without a limit. sharing: islands
    behind each uplink.
    """

    def exposed(there: Link) -> float:
        # BBR sends at the rate it has seen, also after a pause
        bbr = Path("/proc/sys/net/ipv4/tcp_congestion_control")
        restarts = not (bbr.is_file() and bbr.read_text().strip() == "bbr")
        situation = Situation(
            model,
            islands,
            there,
            step,
            device="cpu",
            system=System(restarts=restarts),
            islands_per_uplink=sharing,
        )
        return plan_row(situation, config).exposed_seconds_per_step

    return exposed(link) - exposed(Link())


def predicted(
    cases: Sequence[Case],
    steps: dict[str, float],
    links: Sequence[Link],
    islands: int,
    layers: int,
    sharing: int = 1,
) -> list[dict[str, Any]]:
    """A row per cell. steps: seconds of each case's step, without a limit and without waiting.
    sharing: islands behind each uplink.
    """
    model = tensors(layers)
    rows = []
    for case in cases:
        for link in links:
            more = added(case.config, link, steps[case.name], model, islands, sharing)
            rows.append(
                {
                    "case": case.name,
                    "link": str(link),
                    "step_seconds": steps[case.name],
                    "added_seconds_per_step": more,
                }
            )
    return rows


def compared(
    rows: Sequence[dict[str, Any]], measured: dict[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Prediction beside measurement; measured: (case, link) -> seconds per step, with Link() for no
    limit. Cells that were not measured are left out.
    """
    out = []
    for row in rows:
        key, alone = (row["case"], row["link"]), measured.get((row["case"], str(Link())))
        if key not in measured or alone is None:
            continue
        seconds = alone + row["added_seconds_per_step"]
        off = seconds / measured[key] - 1
        out.append(
            {
                **row,
                "predicted": seconds,
                "measured": measured[key],
                "without_limit": alone,
                "off": off,
                "met": abs(off) <= TOLERANCE,
            }
        )
    return out


def show(rows: Sequence[dict[str, Any]], digest: str) -> str:
    """The table, and how many cells are met."""
    head = ["setting", "link", "no limit", "predicted s/step", "measured", "off", ""]
    body = [
        [
            r["case"],
            r["link"],
            f"{r['without_limit']:.3f}",
            f"{r['predicted']:.3f}",
            f"{r['measured']:.3f}",
            f"{r['off']:+.1%}",
            "" if r["met"] else "over 20 %",
        ]
        for r in rows
    ]
    met = sum(r["met"] for r in rows)
    says = f"{met} of {len(rows)} cells within {TOLERANCE:.0%}"
    says += f" ({NEEDED} are wanted)" if len(rows) == 36 else ""
    return "\n".join([table([head, *body]), says, *([f"SHA-256 {digest}"] if digest else [])])


# ---- measuring ---------------------------------------------------------------------------------


class Bench:
    """Islands in a lab, and how cells are measured in it.

    Attributes:
        crossed: (case, link) -> bytes that left a site, over those that an island sent; the last
            run. Packet headers and acknowledgements count. Empty without shared uplinks.
    """

    def __init__(self, lab: Lab, args: argparse.Namespace):
        self.args = args
        self.crossed: dict[tuple[str, str], float] = {}
        self.islands = Islands(lab, (1, args.length, args.layers), args.logs)

    def attach(self, case: Case) -> int:
        """A fresh model; steps that settle it before each run."""
        lead, settle = slow_link.quiet_phase(case.config)
        self.islands.lab.shape(None, 0.0)
        self.islands.ask(
            do="attach", run=common.run_id(), method=case.preset, settings=case.settings
        )
        cycle = slow_link._cycle(case.config)
        self.islands.ask(do="train", settle=0, steps=max(cycle + lead, 2))
        return settle

    def leave(self) -> None:
        """Detach."""
        self.islands.lab.shape(None, 0.0)
        self.islands.ask(do="leave")

    def step(self, case: Case) -> float:
        """Seconds of a step without a limit and without waiting."""
        settle, cell = self.attach(case), Cell(Link(), case.steps, 1)
        slow_link._run(cell, self.islands, settle, self.args)
        self.leave()
        return cell.seconds() / cell.steps - cell.waiting()

    def cells(self, case: Case, links: Sequence[Link]) -> dict[tuple[str, str], float]:
        """Seconds per step, the median of the repeats, links in turns."""
        settle, found = self.attach(case), list[Cell]()
        for link in [Link(), *links]:
            cell = Cell(link, case.steps, self.args.repeat)
            if found:
                slow_link._fits(case, cell, found[0], self.args)
            self._run(case, cell, settle)
            found.append(cell)
        for repeat in range(1, self.args.repeat):
            for cell in found if repeat % 2 == 0 else reversed(found):
                self._run(case, cell, settle)
        self.leave()
        return {
            (case.name, str(c.link)): statistics.median(
                max(a["seconds"] for a in run) / c.steps for run in c.runs
            )
            for c in found
        }

    def _run(self, case: Case, cell: Cell, settle: int) -> None:
        """One repeat, and what crossed the uplinks."""
        before = self.islands.lab.uplink_bytes()
        slow_link._run(cell, self.islands, settle, self.args)
        after = self.islands.lab.uplink_bytes()
        if before:
            sent = statistics.fmean(a["metered"] for a in cell.runs[-1])
            left = statistics.fmean(b - a for a, b in zip(before, after, strict=True))
            self.crossed[case.name, str(cell.link)] = left / sent


def measure(args: argparse.Namespace, cases: Sequence[Case], links: Sequence[Link]) -> str:
    """Predict, write, measure; the table."""
    lab = Lab(args.islands, "slowplan", args.islands_per_uplink)
    try:
        lab.up()
        bench = Bench(lab, args)
        steps = {case.name: bench.step(case) for case in cases}
        shared = args.islands_per_uplink
        rows = predicted(cases, steps, links, args.islands, args.layers, shared)
        facts = common.facts(args, NAMES)
        text = json.dumps({"settings": facts, "rows": rows}, indent=1) + "\n"
        args.predict.write_text(text, encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()
        print(f"{len(rows)} cells predicted: {args.predict}, SHA-256 {digest}", flush=True)
        measured: dict[tuple[str, str], float] = {}
        for case in cases:
            began = time.monotonic()
            measured |= bench.cells(case, links)
            print(f"{case.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            found = [
                row | {"crossed": bench.crossed.get((row["case"], row["link"]))}
                for row in compared(rows, measured)
            ]
            if args.json is not None:
                out = {"settings": facts, "sha256": digest, "rows": found}
                args.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        bench.islands.end()
    finally:
        lab.down()
    return show(found, digest)


def offline(path: Path) -> str:
    """The planner against a file of `slow_link.py`, which it has not seen the predictions of."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    settings, seen = saved["settings"], saved["rows"]
    cases = slow_link.cases(settings["period"], settings["delay"])
    links = sorted(
        {(r["bits_per_second"], r["rtt_ms"]) for r in seen if r["bits_per_second"]}, reverse=True
    )
    measured = {
        (r["case"], str(Link(r["bits_per_second"], r["rtt_ms"] / 1e3))): r["seconds_per_step"]
        for r in seen
    }
    steps = {
        r["case"]: r["seconds_per_step"] - r["exposed_seconds_per_step"]
        for r in seen
        if not r["bits_per_second"]
    }
    rows = predicted(
        [c for c in cases if c.name in steps],
        steps,
        [Link(rate, ms / 1e3) for rate, ms in links],
        settings["islands"],
        settings["layers"],
    )
    return show(compared(rows, measured), "")


def _parser() -> common.Parser:
    parser = common.Parser(
        description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[3:])
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--predict", type=Path, metavar="FILE", help="predictions go there, before the run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was measured goes there")
    parser.add_argument(
        "--offline", type=Path, metavar="FILE", help="compare with a file of slow_link.py instead"
    )
    parser.add_argument("--only", default="", metavar="A,B", help="presets (all their rows)")
    parser.add_argument("--links", default=LINKS, help=f"rates (default: {LINKS})")
    parser.add_argument("--rtt", default="20ms", help="round trip of all (default: 20ms)")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument(
        "--islands-per-uplink",
        type=int,
        default=1,
        metavar="N",
        help="islands of a site that share a link (default: 1, each has its own)",
    )
    parser.add_argument(
        "--period",
        type=int,
        default=PERIOD,
        help=f"steps between exchanges of the periodic presets (default: {PERIOD})",
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs per cell (default: 3)")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--length", type=int, default=LENGTH, help=f"tokens per row (default: {LENGTH})"
    )
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds of a run; longer ones get fewer steps"
    )
    parser.add_argument(
        "--logs", default="outputs/slow_link", help="folder of what the islands say"
    )
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.offline is not None:
        print(offline(args.offline))
        return
    if args.predict is None:
        parser.error("give --predict FILE, where predictions are written before the run")
    wanted = [name for name in args.only.split(",") if name]
    if args.period < 2:
        parser.error("--period from 2")
    if not 1 <= args.islands_per_uplink < args.islands:
        parser.error(
            f"--islands-per-uplink {args.islands_per_uplink}: from 1 to {args.islands - 1} of "
            f"{args.islands} islands, so that some are behind another uplink"
        )
    cases = [c for c in grid(args.period) if not wanted or c.preset in wanted]
    try:
        rtt = parse_rtt(args.rtt)
        links = [Link(Link.parse(text).bits_per_second, rtt) for text in args.links.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if not cases or args.islands < 2 or args.repeat < 1:
        parser.error("--only names presets of the grid, --islands from 2, --repeat from 1")
    if why := missing():
        parser.error(why)
    try:
        print(measure(args, cases, links))
    except LabError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
