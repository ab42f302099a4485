"""`fsdp-demo plan`: what every method costs on a link, and which to start with."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config.schema import ExchangeConfig
    from ..tools.planner.asking import Step
    from ..tools.planner.situation import Situation

_EXAMPLE = """example:
  fsdp-demo plan --model llama-3.2-1b --islands 4 --shards 8 --link 1Gbit --rtt 40ms --step-time 0.8s
"""  # noqa: E501
_PICTURES = (".png", ".svg", ".pdf", ".jpg")
_INNER = ("adamw", "adam", "muon", "muonadamw", "sgd")
_USAGE = (
    "fsdp-demo plan [--model NAME | --params N] --link RATE [--islands R] [--step-time TIME] "
    "[options] [-- torchrun ... SCRIPT ARGS]"
)


def add(commands: Any) -> None:
    """The subparser."""
    sub = commands.add_parser(
        "plan",
        help="say what each method costs on a link, and which to start with",
        description="What each method costs on a link, from shapes: bytes, seconds, memory, loss.",
        epilog=_EXAMPLE,
        usage=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = sub.add_argument_group("model and machines")
    model.add_argument(
        "--model", metavar="NAME", help="a known model, the path of a config.json, or a hub id"
    )
    model.add_argument("--params", metavar="N", help="so many parameters instead, as in 1.3B")
    model.add_argument("--layers", type=int, metavar="N", help="of --params (default: 24)")
    model.add_argument(
        "--islands",
        default="2",
        metavar="R",
        help="how many; a list; or a range that doubles, as in 2:64 (default: 2)",
    )
    model.add_argument("--shards", type=int, metavar="S", help="ranks of an island (default: 1)")
    model.add_argument("--device", default="h100", metavar="NAME", help="of a rank (default: h100)")
    model.add_argument("--memory", metavar="SIZE", help="of a rank's device, as in 80GB")
    line = sub.add_argument_group("link")
    line.add_argument(
        "--link",
        nargs="+",
        action="extend",
        default=[],
        metavar="RATE",
        help="of an island, or several; or doctor.json, as fsdp-demo doctor --json writes it",
    )
    line.add_argument(
        "--islands-per-uplink",
        type=int,
        default=1,
        metavar="N",
        help="islands of a site that share --link (default: 1)",
    )
    line.add_argument("--rtt", metavar="TIME", help="its round trip, as in 40ms (default: 0)")
    step = sub.add_argument_group("step")
    step.add_argument("--step-time", metavar="TIME", help="of a step without exchange, as in 0.8s")
    step.add_argument("--step-from", metavar="FILE", help="the summary.json of a recipe's run")
    step.add_argument("--tokens", metavar="N", help="of the run, all islands, as in 20B")
    step.add_argument("--tokens-per-step", metavar="N", help="of one island")
    step.add_argument(
        "--measure-steps",
        type=int,
        default=20,
        metavar="N",
        help="of the script after -- (default: 20)",
    )
    what = sub.add_argument_group("methods")
    what.add_argument(
        "--exchange",
        action="append",
        default=[],
        metavar="NAME|YAML",
        help="only these: presets, yaml files, hsdp; with commas or repeated",
    )
    what.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH=VALUE",
        help="changes to them; NAME:PATH=VALUE changes one",
    )
    what.add_argument(
        "--keep-inner", metavar="NAME", help=f"inner optimizer that must stay: {', '.join(_INNER)}"
    )
    what.add_argument(
        "--target-utilisation",
        nargs="+",
        action="extend",
        default=[],
        metavar="SHARE",
        help="solve for the rate of the link that keeps it, as in 0.9",
    )
    paper = sub.add_argument_group("checking against papers")
    paper.add_argument(
        "--bytes-per-param", type=float, metavar="B", help="of what is exchanged; as simulated"
    )
    paper.add_argument("--compression-time", metavar="TIME", help="per value, as in 0.5ns")
    paper.add_argument(
        "--no-compression-time",
        action="store_true",
        help="compression and copies take none; with --params as simulated",
    )
    paper.add_argument(
        "--as-simulated",
        action="store_true",
        help="a line without headers and windows, layers leave while backward runs",
    )
    out = sub.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print a list of rows")
    out.add_argument("--yaml", metavar="FILE", help="write the recommended configuration there")
    out.add_argument("--plot", metavar="FILE", help="draw utilisation over the rate of the link")
    sub.set_defaults(run_command=run, takes_script=True)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from ..tools.planner import asking

    _check(args)
    counts = asking.islands(args.islands)
    chosen = asking.exchanges(args.exchange, args.set)
    wanted = asking.targets(args.target_utilisation)
    if not (args.link or wanted or args.plot):
        raise ValueError("plan needs --link RATE, as in 1Gbit, or --target-utilisation SHARE")
    lines = asking.links(args.link, args.rtt)
    first, step, model = _situation(args)
    shared = args.islands_per_uplink
    cases = [
        replace(first, islands=n, link=link, islands_per_uplink=shared)
        for n in counts
        for link in lines
    ]
    if args.yaml and not args.link:
        raise ValueError("--yaml writes a recommendation, which needs --link RATE")
    if args.yaml and wanted and args.json:
        raise ValueError("--json with --target-utilisation has rates alone: leave out --yaml")
    cases = [replace(case, target=wanted[-1] if wanted else case.target) for case in cases]
    found: list[ExchangeConfig] = []
    if args.link and not (wanted and args.json):  # of a target, json has the rates alone
        found = _plans(args, cases, chosen, step, model)
    if wanted:
        if args.link and not args.json:
            print()
        _solve(args, _without_rate(cases), wanted, chosen, step, model)
    if args.plot:
        from ..tools.planner.show import draw

        first_count = found[: len(lines)]  # the picture shows the first number of islands
        draw(args.plot, cases[0], chosen, lines if args.link else [], first_count)
    return 0


def _without_rate(cases: list[Situation]) -> list[Situation]:
    """One case for each number of islands."""
    return list({case.islands: case for case in cases}.values())


def _check(args: argparse.Namespace) -> None:
    """Refuse what would fail only after the work is done."""
    if args.keep_inner is not None:
        args.keep_inner = args.keep_inner.lower()
        if args.keep_inner not in _INNER:
            raise ValueError(
                f"--keep-inner {args.keep_inner!r}: no method was tried with it; allowed are "
                f"{', '.join(_INNER)}"
            )
    for flag, name in (("--yaml", args.yaml), ("--plot", args.plot)):
        if name and not Path(name).parent.is_dir():
            raise ValueError(f"{flag} {name}: there is no folder {Path(name).parent}")
    if args.plot and Path(args.plot).suffix not in _PICTURES:
        raise ValueError(f"--plot {args.plot}: allowed endings are {', '.join(_PICTURES)}")


def _plans(
    args: argparse.Namespace,
    cases: list[Situation],
    chosen: list[ExchangeConfig | str] | None,
    step: Step,
    model: str,
) -> list[ExchangeConfig]:
    """Print the plan of each case; what is recommended for each."""
    from ..tools.planner import choose, plan_rows, show
    from ..tools.planner.rows import HSDP

    if args.yaml and len(cases) > 1:
        raise ValueError(f"--yaml {args.yaml}: of {len(cases)} cases; give one link and one number")
    out, printed, best, best_rows, shown = [], [], None, [], []
    for case in cases:
        rows = plan_rows(case, chosen, args.keep_inner)
        ours = [r for r in rows if r.name != HSDP]
        choice = choose(rows, case, args.keep_inner) if ours else None
        best = best or choice
        for row in rows:
            take = {"recommended": choice is not None and row is choice.row}
            out.append({**row.as_json(), **_facts(case, step, model), **take})
        if choice is not None:
            best_rows.append((case, choice.row))
        table = show.plan_table(rows, _width())
        parts = [show.title([case], model, step.source), "", table, ""]
        parts += [show.recommendation(choice)] if choice is not None else []
        printed.append("\n".join(parts))
        shown += rows
    if args.yaml:
        if best is None:
            raise ValueError("--yaml: hsdp is no exchange of this package, so there is no yaml")
        written = f"# fsdp-demo plan: {best.reason}\n{best.config.to_yaml()}"
        Path(args.yaml).write_text(written, encoding="utf-8")
    if len(best_rows) > 1:
        printed.append(f"The best of each case:\n{show.summary(best_rows)}")
    print(json.dumps(out, indent=2) if args.json else "\n\n".join([*printed, show.notes(shown)]))
    return [row.config for _, row in best_rows if row.config is not None]


def _width() -> int | None:
    """Columns of the terminal; None where the output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _solve(
    args: argparse.Namespace,
    cases: list[Situation],
    wanted: list[float],
    chosen: list[ExchangeConfig | str] | None,
    step: Step,
    model: str,
) -> None:
    from ..net.link import Link
    from ..tools.planner import gbit_s, plan_rows, show

    out = []
    for case in cases:
        for row in plan_rows(case, chosen, args.keep_inner):
            if row.chosen:
                continue
            for target in wanted:
                rate = gbit_s(case, row.config, target)
                there = replace(case, link=Link(rate and 1e9 * rate, case.link.rtt))
                (at,) = plan_rows(there, [row.config or row.name])
                facts = {"target_utilisation": target, "gbit_s": rate}
                out.append({**at.as_json(), **_facts(there, step, model), **facts})
    if args.json:
        print(json.dumps(out, indent=2))
        return
    if not args.link:  # else it stands above the plan
        print(show.title(cases, model, step.source), end="\n\n")
    print(show.targets_table(out, cases[0].link.rtt))


def _facts(case: Situation, step: Step, model: str) -> dict[str, Any]:
    """What all rows of a case have in common."""
    return {
        "model": model,
        "parameters": case.parameters,
        "islands": case.islands,
        "shards": case.shards,
        "link": str(case.link),
        "islands_per_uplink": case.islands_per_uplink,
        "step_seconds": case.step_seconds,
        "step_source": step.source,
    }


def _situation(args: argparse.Namespace) -> tuple[Situation, Step, str]:
    """All but islands and link; the step and where it is from; the model's name."""
    from ..tools.planner import Situation, asking, equal_layers, load
    from ..tools.planner.situation import check_shards, device

    if args.model is not None and args.params is not None:
        raise ValueError("two models: give --model NAME or --params N, not both")
    if args.model is None and args.params is None:
        raise ValueError("plan needs a model: give --model NAME or --params N")
    device(args.device)
    if args.shards is not None and args.shards < 1:
        raise ValueError(f"--shards {args.shards}: an island has 1 shard or more")
    if args.model is not None and args.layers is not None:
        raise ValueError(f"--layers {args.layers}: of --params alone; --model has its own")
    layers = 24 if args.layers is None else args.layers
    if args.model is not None:
        tensors, model = load(args.model), args.model
        check_shards(tensors, args.shards or 1)
    else:
        tensors = equal_layers(round(asking.number(args.params, "--params")), layers)
        model = f"{layers} equal layers"
    step, shards = _step(args, tensors)
    if args.bytes_per_param is not None and not 0 < args.bytes_per_param <= 8:
        raise ValueError(
            f"--bytes-per-param {args.bytes_per_param:g}: a value takes more than 0 and at most 8"
        )
    simulated = args.as_simulated or args.bytes_per_param is not None
    simulated |= args.no_compression_time and args.params is not None
    tokens = asking.number(args.tokens, "--tokens") if args.tokens else None
    if tokens and not step.tokens:
        raise ValueError(
            "--tokens is the length of the run: give --tokens-per-step, too, the tokens of one "
            "island's step"
        )
    situation = Situation(
        tensors,
        islands=2,
        step_seconds=step.seconds,
        shards=shards,
        device=args.device,
        compression=(
            asking.seconds(args.compression_time, "--compression-time")
            if args.compression_time
            else None
        ),
        memory_bytes=asking.memory(args.memory) if args.memory else None,
        tokens=tokens,
        tokens_per_step=step.tokens,
        system=asking.system(simulated, args.bytes_per_param, not args.no_compression_time),
    )
    return situation, step, model


def _step(args: argparse.Namespace, tensors: Any) -> tuple[Step, int]:
    """The step's time, and the shards of an island."""
    from ..tools.planner import asking
    from ..tools.planner.asking import Step

    given = [
        name
        for name, value in (
            ("--step-time", args.step_time),
            ("--step-from", args.step_from),
            ("-- SCRIPT", args.script),
        )
        if value
    ]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both say how long a step takes: give one")
    tokens = (
        asking.number(args.tokens_per_step, "--tokens-per-step") if args.tokens_per_step else None
    )
    shards = args.shards or 1
    if args.step_time:
        return Step(asking.seconds(args.step_time, "--step-time"), tokens, "given"), shards
    if args.step_from:
        step, summary = asking.step_from(args.step_from)
        return replace(step, tokens=tokens or step.tokens), args.shards or summary.get("procs", 1)
    if args.script:
        from ..tools.planner.measure import measured_step

        return Step(*measured_step(args.script, args.measure_steps, tokens)), shards
    if (measured := asking.measured_step(args.link)) is not None:
        return replace(measured, tokens=tokens), shards
    return asking.guess(tensors, shards, args.device, tokens), shards
