"""Training speed on a slow link, for real: every preset on islands whose cables have a rate and a
delay. Needs Linux and root.

    python benchmarks/slow_link.py --json slow_link.json           # the whole grid, some 25 minutes; --quick: some 5
    python benchmarks/slow_link.py --only full,demo --links none,100Mbit
    python benchmarks/slow_link.py --islands 4 --rtt 100ms --quick # more islands than cores: read the waiting only

Islands are network namespaces (`network_lab.py`), one process and one core each, that train a
small Llama on the Python library's sources (`training_island.py`) by the same calls as any script.
Of each preset all links are measured in one run, one after the other and back again (ABAB), so that
a machine that gets slower slows all of them. Per cell: tokens per second of all islands together
(median of the repeats, and their spread), the ratio to the run on the first link in the same repeat
(median), the seconds per step in which training stood still for the exchange (and their share of
the step), the share of a core that the lab's delay line took from training, the ratio without that
share, the share that the kernel's interrupts took, and bytes: those of the meter, and how many the
interface sent for each, with one header per packet. `full` has no row with a delay: what it sends
in each step takes longer than the step. A cell of which one run would take longer than --patience
is left out.

With --json a preset's rows are written as soon as it is done, and presets that are in the file are
not measured again.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.common import Parser, facts, run_id  # noqa: E402
from benchmarks.network_lab import Islands, Lab, LabError, missing  # noqa: E402
from fsdp_demo import ExchangeConfig, Link, preset  # noqa: E402
from fsdp_demo.net.link import parse_rtt  # noqa: E402

NO_OFFLOAD = {True: Link(100e6, 0.02), False: Link(10e6, 0.02)}
"""The links on which headers are counted, for messages over 1 MB and others: on a faster one a
short message has left before that of the other side comes, whose acknowledgements then travel
alone (6.5 % of `demo` at 100 Mbit/s)."""


@dataclass(frozen=True)
class Case:
    """One preset as it is measured.

    Attributes:
        steps: that are timed at once; a multiple of the cycle of its exchanges.
    """

    name: str
    preset: str
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 12

    @property
    def config(self) -> ExchangeConfig:
        return preset(self.preset, **self.settings)


def cases(period: int, delay: int) -> list[Case]:
    """The grid's rows: periods are shortened from hundreds of steps, which makes every exchange
    weigh more than it would.

    Args:
        delay: steps that dense exchanges get to travel, below `period`.
    """
    few = max(1, period // 8)  # for small payloads
    late: dict[str, Any] = {"period": period, "schedule.delay": delay}
    desloc = f"desloc, periods {period}/{3 * period}/{6 * period}, bf16, delay {delay}"

    def periodic(name: str, delay: int, /, **settings: Any) -> Case:
        words = f"{name}, period {period}" + (f", delay {delay}" if delay else "")
        return Case(words, name, {"period": period, **settings}, period)

    return [
        Case("full", "full", {"value_dtype": "bf16"}, 6),
        Case("demo", "demo"),
        Case("demo, delay 1", "demo", {"schedule.delay": 1}),
        periodic("diloco", 0),
        periodic("diloco", delay, **late),
        periodic("streaming_diloco", few, layers=2, delay=few),
        periodic("local_sgd", delay, **late),
        Case(desloc, "desloc", {**late, "value_dtype": "bf16"}, 6 * period),
        periodic("decoupled_momentum", 0),
        periodic("decoupled_momentum", few, **{"schedule.delay": few}),
    ]


def _cycle(config: ExchangeConfig) -> int:
    """Steps after which the exchanges repeat."""
    return math.lcm(*(c.schedule.sync_every for c in config.channels))


def quiet_phase(config: ExchangeConfig) -> tuple[int, int]:
    """(step of the cycle after which the fewest payloads are under way, how many steps those still
    take).
    """
    clocks, cycle = [c.schedule for c in config.channels], _cycle(config)

    def under_way(phase: int) -> list[int]:
        """Steps left of each payload that left before the step `cycle + phase` and is due in it or
        later.
        """
        now = 2 * cycle + phase
        return [
            s + c.delay - now + 1 for c in clocks for s in range(now - c.delay, now) if c.due(s)
        ]

    best = min(range(cycle), key=lambda phase: (len(under_way(phase)), phase))
    return best, max(under_way(best), default=0)


# ---- measuring ---------------------------------------------------------------------------------


@dataclass
class Cell:
    """What was measured of one preset on one link."""

    link: Link
    steps: int
    repeats: int
    runs: list[list[dict[str, Any]]] = field(default_factory=list)  # per repeat, per island
    lab: float = 0.0  # CPU seconds of the lab on one core
    interrupts: float = 0.0  # seconds of the kernel's, on one core

    @property
    def rates(self) -> list[float]:
        """Tokens per second of all islands, per repeat."""
        return [sum(a["tokens"] for a in run) / max(a["seconds"] for a in run) for run in self.runs]

    def seconds(self) -> float:
        return statistics.median(max(a["seconds"] for a in run) for run in self.runs)

    def waiting(self) -> float:
        """Per step, of the island that waited longest."""
        return statistics.median(max(a["waiting"] for a in run) / self.steps for run in self.runs)

    def cpu(self) -> float:
        """Per step, of all threads of the island that took most."""
        return statistics.median(max(a["cpu"] for a in run) / self.steps for run in self.runs)

    def count(self, name: str) -> float:
        """Mean over repeats and islands."""
        return statistics.fmean(a[name] for run in self.runs for a in run)


def measure(
    case: Case, islands: Islands, links: Sequence[Link], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """All cells of one preset: a row each."""
    lead, settle = quiet_phase(case.config)
    islands.lab.shape(None, 0.0)
    parameters = islands.ask(do="attach", run=run_id(), method=case.preset, settings=case.settings)
    # from here on every cycle is like the last
    islands.ask(do="train", settle=0, steps=max(_cycle(case.config) + lead, 2))
    cells: list[Cell] = []
    for link in links:
        cell = Cell(link, case.steps, args.repeat)
        if not cells or _fits(case, cell, cells[0], args):
            cells.append(cell)
            _run(cell, islands, settle, args)
    for repeat in range(1, args.repeat):
        for cell in cells if repeat % 2 == 0 else reversed(cells):
            if repeat < cell.repeats:
                _run(cell, islands, settle, args)
    headers = _headers(
        case, islands, settle, cells[0].count("metered") / max(cells[0].count("messages"), 1) > 1e6
    )
    islands.lab.shape(None, 0.0)
    islands.ask(do="leave")
    return [
        _row(case, cell, cells[0], headers, parameters[0]["parameters"], args) for cell in cells
    ]


def _fits(case: Case, cell: Cell, first: Cell, args: argparse.Namespace) -> bool:
    """Whether a run takes no longer than `--patience` seconds. Where every step is alike it is made
    shorter than that.
    """
    rate = cell.link.bits_per_second
    sent = 8 * first.count("metered") / rate if rate else 0.0
    each = (first.seconds() + sent) / first.steps
    if _cycle(case.config) == 1 and first.steps < 10 and rate:
        cell.steps = max(1, min(cell.steps, int(args.patience / 2 / each)))
    return cell.steps * each <= args.patience or cell.steps == 1


def _run(cell: Cell, islands: Islands, settle: int, args: argparse.Namespace) -> None:
    """One repeat. A cell that would take longer than `--patience` seconds gets fewer repeats."""
    _connect(islands, cell.link)
    before, ticks = islands.lab.seconds(), interrupts()
    cell.runs.append(islands.ask(do="train", settle=settle, steps=cell.steps))
    cell.lab += islands.lab.seconds() - before
    cell.interrupts += interrupts() - ticks
    took = max(a["seconds"] for a in cell.runs[0])
    cell.repeats = max(1, min(args.repeat, int(args.patience / took)))


def _connect(islands: Islands, link: Link) -> None:
    """Change the link, with new connections that know its delay (and soon its rate)."""
    islands.lab.shape(None, link.rtt / 2)
    islands.ask(do="connect", run=run_id())
    islands.lab.shape(link.bits_per_second, link.rtt / 2)


def _headers(case: Case, islands: Islands, settle: int, long: bool) -> float:
    """Bytes that the interface sends per byte of the meter, where every packet has a header of its
    own.
    """
    _connect(islands, NO_OFFLOAD[long])
    islands.lab.offload(False)
    answers = islands.ask(
        do="train",
        settle=settle,
        steps=max(3, min(c.schedule.sync_every for c in case.config.channels)),
    )
    islands.lab.offload(True)
    return sum(a["tx"] for a in answers) / sum(a["metered"] for a in answers)


def _row(
    case: Case, cell: Cell, first: Cell, headers: float, parameters: int, args: argparse.Namespace
) -> dict[str, Any]:
    rates, steps = cell.rates, cell.steps
    whole = sum(max(a["seconds"] for a in run) for run in cell.runs)
    ratio, lab = (
        statistics.median(a / b for a, b in zip(rates, first.rates, strict=False)),
        cell.lab / whole,
    )
    return {
        "case": case.name,
        "preset": case.preset,
        "settings": case.settings,
        "delay": max(c.schedule.delay for c in case.config.channels),
        "link": _named(cell.link),
        "bits_per_second": cell.link.bits_per_second,
        "rtt_ms": 1e3 * cell.link.rtt,
        "islands": args.islands,
        "parameters": parameters,
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "ratio": ratio,
        "ratio_without_lab": ratio / (1 - lab),
        "seconds_per_step": cell.seconds() / steps,
        "exposed_seconds_per_step": cell.waiting(),
        "exposed_share": cell.waiting() * steps / cell.seconds(),
        "cpu_seconds_per_step": cell.cpu(),
        "lab_share": lab,
        "interrupt_share": cell.interrupts / whole,
        "steps": steps,
        "repeats": len(cell.runs),
        "extrapolated": steps < case.steps,
        "bytes_per_step": cell.count("metered") / (steps + quiet_phase(case.config)[1]),
        "interface_over_meter": cell.count("tx") / cell.count("metered"),
        "interface_over_meter_without_offload": headers,
    }


def interrupts() -> float:
    """Seconds that the kernel has spent in interrupts, per core."""
    names = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
    return (int(names[6]) + int(names[7])) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def _named(link: Link) -> str:
    return str(link).partition(",")[0]


# ---- printing ----------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "preset|link|tokens/s|spread|ratio|without lab|s/step|CPU s/step|exposed "
        "s/step|share|lab|interrupts|bytes/step|interface/meter"
    ).split("|")
    body, before = [], None
    for r in rows:
        low, high = r["spread"]
        spread = f"{(high - low) / r['tokens_per_second']:.1%} of {r['repeats']}"
        wire = f"{r['interface_over_meter_without_offload']:.3f}"
        cells = [
            f"{r['tokens_per_second']:.0f}{'*' if r['extrapolated'] else ''}",
            spread,
            f"{r['ratio']:.3f}",
            f"{r['ratio_without_lab']:.3f}",
        ]
        cells += [f"{r[f'{name}seconds_per_step']:.3f}" for name in ("", "cpu_")]
        cells.append(f"{r['exposed_seconds_per_step']:.4f}")
        cells += [f"{r[f'{name}_share']:.1%}" for name in ("exposed", "lab", "interrupt")]
        body.append(
            [
                r["case"] if r["case"] != before else "",
                r["link"],
                *cells,
                f"{r['bytes_per_step']:,.0f}",
                wire,
            ]
        )
        before = r["case"]
    text = table([head, *body])
    if any(r["extrapolated"] for r in rows):
        text += "\n* run for fewer steps than the others, all alike; tokens/s follow from these"
    return text


NAMES = (
    "islands",
    "rtt",
    "links",
    "repeat",
    "period",
    "delay",
    "rows",
    "length",
    "layers",
    "patience",
)


def _parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[2:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", metavar="A,B", help="presets (all their rows)")
    parser.add_argument(
        "--links", default="none,1Gbit,100Mbit,10Mbit", help="rates; ratios are to the first"
    )
    parser.add_argument(
        "--rtt",
        default="20ms",
        help="round trip of all links but `none`, which has none (default: 20ms)",
    )
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5, help="runs per cell")
    parser.add_argument(
        "--period", type=int, default=20, help="steps between exchanges of the periodic presets"
    )
    parser.add_argument(
        "--delay",
        type=int,
        default=15,
        help="steps that dense exchanges may take where they overlap; below --period",
    )
    parser.add_argument("--rows", type=int, default=1, help="rows per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds for all repeats of a cell; longer ones get fewer",
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 runs per cell, a third of the patience"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="rows go there, and are taken from there if it exists",
    )
    parser.add_argument(
        "--logs", default="outputs/slow_link", help="folder of what the islands say"
    )
    return parser


def _checked(parser: Parser, args: argparse.Namespace) -> tuple[list[Case], list[Link]]:
    if args.quick:
        args.repeat, args.patience = min(args.repeat, 2), args.patience / 3
    if args.islands < 2 or args.repeat < 1 or not 0 < args.delay < args.period:
        parser.error("--islands from 2, --repeat from 1, 0 < --delay < --period")
    grid = cases(args.period, args.delay)
    wanted = [name for name in args.only.split(",") if name]
    unknown = sorted(set(wanted) - {c.preset for c in grid})
    if unknown:
        parser.error(
            f"--only {','.join(unknown)}: not in the grid, which has "
            f"{', '.join(dict.fromkeys(c.preset for c in grid))}"
        )
    try:
        rtt, rates = (
            parse_rtt(args.rtt),
            [Link.parse(text).bits_per_second for text in args.links.split(",")],
        )
    except ValueError as error:
        parser.error(str(error))
    return [c for c in grid if not wanted or c.preset in wanted], [
        Link(rate, rtt if rate else 0.0) for rate in rates
    ]


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    chosen, links = _checked(parser, args)
    shared, rows = facts(args, NAMES), []
    if args.json is not None and args.json.is_file():
        saved = json.loads(args.json.read_text(encoding="utf-8"))
        rows = saved["rows"]
        if saved["settings"] != shared:
            parser.error(
                f"--json {args.json} holds rows of other settings or another machine: give another "
                "file"
            )
    todo = [c for c in chosen if c.name not in {r["case"] for r in rows}]
    if todo and (why := missing()):
        parser.error(why)
    if todo:
        lab = Lab(args.islands)
        try:
            lab.up()
            islands = Islands(lab, (args.rows, args.length, args.layers), args.logs)
            for case in todo:
                began = time.monotonic()
                rows += measure(case, islands, links, args)
                print(f"{case.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
                if args.json is not None:
                    text = json.dumps({"settings": shared, "rows": rows}, indent=1) + "\n"
                    args.json.with_suffix(".part").write_text(text, encoding="utf-8")
                    args.json.with_suffix(".part").replace(args.json)
            islands.end()
        except LabError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")
        finally:
            lab.down()
    print(show([r for r in rows if r["case"] in {c.name for c in chosen}]))


if __name__ == "__main__":
    main()
