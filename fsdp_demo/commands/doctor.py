"""`fsdp-demo doctor`: what stands between the islands, and what is wrong with it."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

from ..launch.command_line import Commands


def add(commands: Commands) -> None:
    """Add the parser of `fsdp-demo doctor`."""
    sub = commands.add_parser(
        "doctor",
        help="measure links, disks and steps of all islands, say what is wrong and its cure",
        description="Start it on every island with the variables ISLAND_* of the run. All print "
        "the same findings.",
    )
    sub.example(
        "ISLAND_ENDPOINT=10.0.0.1:29400 ISLAND_COUNT=2 ISLAND_RANK=0 fsdp-demo doctor --json "
        "doctor.json"
    )
    sub.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time for the links, all pairs together (default: 20)",
    )
    sub.add_argument("--json", metavar="FILE", help="write all numbers into this file, on island 0")
    sub.add_argument(
        "--folder",
        metavar="FOLDER",
        help="where checkpoints will lie: the disk that is measured (default: this folder)",
    )
    sub.add_argument("--no-disk", action="store_true", help="do not measure the disk")
    sub.add_argument(
        "--model",
        metavar="CONFIG",
        help="measure the step time of this architecture: config.json, folder, name of "
        "recipes/models or hub id",
    )
    sub.add_argument(
        "--step-time",
        type=float,
        metavar="SECONDS",
        help="the step time of this island, where it is known already",
    )
    sub.set_defaults(run_command=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Examine this island with all others; 1 where something stops a run."""
    _check(args)
    if os.environ.get("RANK", "0") != "0":
        return 0  # a launcher's other ranks: one process per island measures
    from ..rendezvous.topology import Topology
    from ..tools.doctor.examine import examine
    from ..tools.doctor.facts import disk_mb_s
    from ..tools.doctor.findings import findings
    from ..tools.doctor.reading import as_json, text

    def say(text: str) -> None:
        print(f"doctor: {text}", file=sys.stderr, flush=True)

    topology = Topology.from_env()
    disk = None if args.no_disk else disk_mb_s(args.folder or ".")
    step = args.step_time
    if args.model is not None:
        from ..tools.doctor.facts import step_seconds

        say(f"measuring training steps of {args.model}, which may take minutes on a CPU")
        step = step_seconds(args.model)
    seen = examine(topology, args.seconds, disk, step, say)
    found = findings(seen)
    print(text(seen, found), flush=True)
    if args.json and topology.island == 0:
        Path(args.json).write_text(json.dumps(as_json(seen, found), indent=1) + "\n", "utf-8")
    return int(any(finding.stops for finding in found))


def _check(args: argparse.Namespace) -> None:
    for name in ("seconds", "step_time"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {value:g}: must be a number of seconds above 0")
    if args.model is not None and args.step_time is not None:
        raise ValueError("--model and --step-time both give the step time: leave one of them out")
    if args.no_disk and args.folder is not None:
        raise ValueError("--folder says which disk is measured: leave out --no-disk")
    parent = Path(args.json).parent if args.json else None
    if parent is not None and not parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {parent}")
