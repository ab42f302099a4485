"""`fsdp-demo plan`: what every method costs on a link, and which to start with."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..launch.command_line import SEVERAL, Commands, option

if TYPE_CHECKING:
    from ..config.schema import ExchangeConfig
    from ..tools.planner.situation import Situation

_INNER = ("adamw", "adam", "muon", "muonadamw", "sgd")


def add(commands: Commands) -> None:
    """Add the parser of `fsdp-demo plan`."""
    sub = commands.add_parser(
        "plan",
        help="say what each method costs on a link, and which to start with",
        description="What each method costs on a link, from shapes: bytes, seconds, memory, loss.",
        usage="fsdp-demo plan [--model NAME | --params N] --link RATE [--islands R] "
        "[--step-time TIME] [options]",
        example="fsdp-demo plan --model llama-3.2-1b --islands 4 --shards 8 --link 1Gbit "
        "--rtt 40ms --step-time 0.8s",
        run=run,
    )
    _add_model_and_link(sub)
    step = sub.add_argument_group("step")
    option(step, "--step-time TIME", "of a step without exchange, as in 0.8s")
    option(step, "--step-from FILE", "the summary.json of a recipe's run")
    option(step, "--tokens N", "of the run, all islands, as in 20B")
    option(step, "--tokens-per-step N", "of one island")
    option(step, "--compression-time TIME", "of an exchange's work per value, as in 0.5ns")
    _add_methods(sub)
    out = sub.add_argument_group("output")
    option(out, "--json", "print a list of rows")
    option(out, "--yaml FILE", "write the recommended configuration there")


def _add_model_and_link(sub: argparse.ArgumentParser) -> None:
    model = sub.add_argument_group("model and machines")
    option(model, "--model NAME", "a known model, the path of a config.json, or a hub id")
    option(model, "--params N", "so many parameters instead, as in 1.3B")
    option(model, "--layers N", "of --params (default: 24)", type=int)
    option(
        model,
        "--islands R",
        "how many; a list; or a range that doubles, as in 2:64 (default: 2)",
        default="2",
    )
    option(model, "--shards S", "ranks of an island (default: 1)", type=int)
    option(model, "--device NAME", "of a rank (default: h100)", default="h100")
    option(model, "--memory SIZE", "of a rank's device, as in 80GB")
    option(
        model,
        "--mix ISLANDS",
        "unlike islands instead of the same, as in 8xA100@1Gbit,2*4x4090@200Mbit=1.2s: ranks, "
        "device, link, perhaps the time of a step; or doctor.json",
    )
    line = sub.add_argument_group("link")
    option(
        line,
        "--link RATE",
        "of an island, or several; or doctor.json, as fsdp-demo doctor --json writes it",
        **SEVERAL,
    )
    option(
        line,
        "--islands-per-uplink N",
        "islands of a site that share --link (default: 1)",
        default=1,
    )
    option(line, "--rtt TIME", "its round trip, as in 40ms (default: 0)")


def _add_methods(sub: argparse.ArgumentParser) -> None:
    what = sub.add_argument_group("methods")
    option(
        what,
        "--exchange NAME|YAML",
        "only these: presets, yaml files, hsdp; with commas or repeated",
        action="append",
        default=[],
    )
    option(what, "--set PATH=VALUE", "changes to them; NAME:PATH=VALUE changes one", **SEVERAL)
    option(what, "--keep-inner NAME", f"inner optimizer that must stay: {', '.join(_INNER)}")
    option(
        what,
        "--target-utilisation SHARE",
        "solve for the rate of the link that keeps it, as in 0.9",
        **SEVERAL,
    )
    option(
        what,
        "--as-simulated BYTES",
        "as papers simulate: a line without headers and windows, no work of compression, "
        "layers leave while backward runs; BYTES of a value (default: by the code)",
        nargs="?",
        type=float,
        const=0.0,
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan of each number of islands and link, or the rates that reach a target."""
    from ..tools.planner import asking

    _check(args)
    counts = asking.islands(args.islands)
    chosen = asking.exchanges(args.exchange, args.set)
    if args.mix:
        _plans(args, [asking.situation(args)], chosen)
        return 0
    wanted = asking.targets(args.target_utilisation)
    if not (args.link or wanted):
        raise ValueError("plan needs --link RATE, as in 1Gbit, or --target-utilisation SHARE")
    if args.yaml and wanted and args.json:
        raise ValueError("--json with --target-utilisation has rates alone: leave out --yaml")
    lines = asking.links(args.link, args.rtt)
    cases = [(n, link) for n in counts for link in lines]
    if args.yaml and len(cases) > 1:
        raise ValueError(f"--yaml {args.yaml}: of {len(cases)} cases; give one link and one number")
    first = asking.situation(args)
    first = replace(first, target=wanted[-1] if wanted else first.target)
    shared = args.islands_per_uplink
    situations = [replace(first, islands=n, link=x, islands_per_uplink=shared) for n, x in cases]
    if args.link and not (wanted and args.json):  # of a target, json has the rates alone
        _plans(args, situations, chosen)
    if wanted:
        if args.link and not args.json:
            print()
        # the rate is what is solved for: one situation for each number of islands
        _solve(args, list({s.islands: s for s in situations}.values()), wanted, chosen)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what would fail only after the work is done."""
    alike: dict[str, Any] = {"islands": "2", "link": [], "step_time": None, "step_from": None}
    alike |= {"islands_per_uplink": 1, "target_utilisation": []}
    if args.mix and (given := [key for key, at in alike.items() if getattr(args, key) != at]):
        flag = given[0].replace("_", "-")
        raise ValueError(f"--mix describes each island, --{flag} all as one: leave one of them out")
    if args.keep_inner is not None:
        args.keep_inner = args.keep_inner.lower()
        if args.keep_inner not in _INNER:
            raise ValueError(
                f"--keep-inner {args.keep_inner!r}: no method was tried with it; allowed are "
                f"{', '.join(_INNER)}"
            )
    if args.yaml and not Path(args.yaml).parent.is_dir():
        raise ValueError(f"--yaml {args.yaml}: there is no folder {Path(args.yaml).parent}")
    if args.yaml and not (args.link or args.mix):
        raise ValueError("--yaml writes a recommendation, which needs --link RATE")


def _plans(
    args: argparse.Namespace, situations: list[Situation], chosen: list[ExchangeConfig | str] | None
) -> None:
    """Print the plan of each situation, and write the recommendation of one where it is wanted."""
    from ..tools.planner import choose, plan_rows, show
    from ..tools.planner.rows import HSDP

    width = min(shutil.get_terminal_size((show.COLUMNS, 24)).columns, show.COLUMNS)
    out, printed, shown, best = [], [], [], []
    for situation in situations:
        rows = plan_rows(situation, chosen, args.keep_inner)
        parts = [show.wrapped(show.title([situation])), ""]
        recommended = None
        if any(row.name != HSDP for row in rows):
            choice = choose(rows, situation, args.keep_inner)
            recommended = choice.row
            best.append((situation, choice))
            parts += [show.wrapped(f"Recommended: {choice.reason}."), ""]
        for row in rows:
            facts = {**_facts(situation), "recommended": row is recommended}
            out.append({**row.as_json(), **facts})
        printed.append("\n".join([*parts, show.plan_tables(rows, width)]))
        shown += rows
    if args.yaml:
        if not best:
            raise ValueError("--yaml: hsdp is no exchange of this package, so there is no yaml")
        _, choice = best[0]
        written = f"# fsdp-demo plan: {choice.reason}\n{choice.config.to_yaml()}"
        Path(args.yaml).write_text(written, encoding="utf-8")
    if len(best) > 1:
        summary = show.summary([(situation, choice.row) for situation, choice in best])
        printed.append(f"The best of each case:\n{summary}")
    print(json.dumps(out, indent=2) if args.json else "\n\n".join([*printed, show.notes(shown)]))


def _solve(
    args: argparse.Namespace,
    situations: list[Situation],
    wanted: list[float],
    chosen: list[ExchangeConfig | str] | None,
) -> None:
    """Print the rate of the link with which each setting keeps each of the wanted shares."""
    from ..net.link import Link
    from ..tools.planner import gbit_s, plan_rows, show

    out = []
    for situation in situations:
        for row in plan_rows(situation, chosen, args.keep_inner):
            if row.chosen:
                continue
            for target in wanted:
                rate = gbit_s(situation, row.config, target)
                there = replace(situation, link=Link(rate and 1e9 * rate, situation.link.rtt))
                (at,) = plan_rows(there, [row.config or row.name])
                facts = {"target_utilisation": target, "gbit_s": rate}
                out.append({**at.as_json(), **_facts(there), **facts})
    if args.json:
        print(json.dumps(out, indent=2))
        return
    if not args.link:  # else it stands above the plan
        print(show.title(situations), end="\n\n")
    print(show.targets_table(out, situations[0].link.rtt))


def _facts(situation: Situation) -> dict[str, Any]:
    """The keys of `--json` that all rows of a situation share."""
    return {
        "model": situation.model,
        "parameters": situation.parameters,
        "islands": situation.islands,
        "shards": situation.shards,
        "link": str(situation.link),
        "islands_per_uplink": situation.islands_per_uplink,
        "step_seconds": situation.step_seconds,
        "step_source": situation.step_source,
    }
