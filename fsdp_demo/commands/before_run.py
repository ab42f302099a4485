"""The commands before a run: `presets` lists the methods, `doctor` says what stands between the
islands, `rehearse` runs several islands on this machine. `plan` has a file of its own.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

from ..launch import unedited
from ..launch.command_line import Commands, option
from ..net.link import Link, parse_rtt


def add_presets(commands: Commands) -> None:
    """Add the parser of `fsdp-demo presets`."""
    sub = commands.add_parser(
        "presets",
        help="list the methods, or show one",
        example="fsdp-demo presets demo --yaml",
        run=presets,
    )
    sub.add_argument("name", nargs="?", metavar="NAME", help="the preset to show")
    option(sub, "--yaml", "print it as yaml, to change and pass as a file")


def presets(args: argparse.Namespace) -> int:
    """List the presets, the recommended ones first, or describe one."""
    import fsdp_demo

    from ..config.methods import RECOMMENDED, UNPUBLISHED

    known = fsdp_demo.presets()
    if args.name is None:
        width = max(map(len, known))
        for name in sorted(known, key=lambda name: name not in RECOMMENDED):
            group = "recommended" if name in RECOMMENDED else UNPUBLISHED.get(name, "paper")
            about = (inspect.getdoc(known[name]) or "").partition("\n\n")[0]
            about = textwrap.shorten(about, 100, placeholder=" ...")
            print(f"{name:{width}}  {group:11}  {about}")
        return 0
    config = fsdp_demo.preset(args.name)  # a wrong name: ValueError with the nearest right one
    if args.yaml:
        print(config.to_yaml(), end="")
    else:
        takes = inspect.signature(known[args.name]).parameters.items()
        print(inspect.getdoc(known[args.name]) or "")
        print("\nkeywords and defaults: " + ", ".join(f"{k}={p.default}" for k, p in takes))
        print(f"\n{config.describe()}")
    return 0


def add_doctor(commands: Commands) -> None:
    """Add the parser of `fsdp-demo doctor`."""
    sub = commands.add_parser(
        "doctor",
        help="measure links, disks and steps of all islands, say what is wrong and its cure",
        description="Start it on every island with the variables ISLAND_* of the run. All print "
        "the same findings.",
        example="ISLAND_ENDPOINT=10.0.0.1:29400 ISLAND_COUNT=2 ISLAND_RANK=0 fsdp-demo doctor "
        "--json doctor.json",
        run=doctor,
    )
    option(
        sub,
        "--seconds SECONDS",
        "time for the links, all pairs together (default: 20)",
        default=20.0,
    )
    option(sub, "--json FILE", "write all numbers into this file, on island 0")
    option(
        sub,
        "--folder FOLDER",
        "where checkpoints will lie: the disk that is measured (default: this folder)",
    )
    option(sub, "--no-disk", "do not measure the disk")
    option(
        sub,
        "--model CONFIG",
        "measure the step time of this architecture: config.json, folder, name of "
        "recipes/models or hub id",
    )
    option(
        sub,
        "--step-time SECONDS",
        "the step time of this island, where it is known already",
        type=float,
    )


def doctor(args: argparse.Namespace) -> int:
    """Examine this island with all others; 1 where something stops a run."""
    _check_doctor(args)
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


def _check_doctor(args: argparse.Namespace) -> None:
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


def add_rehearse(commands: Commands) -> None:
    """Add the parser of `fsdp-demo rehearse`."""
    sub = commands.add_parser(
        "rehearse",
        help="run several islands on this machine, as they would run on several",
        usage="fsdp-demo rehearse --islands N --procs P [options] -- SCRIPT ARGS",
        example="fsdp-demo rehearse --islands 2 --procs 1 --link 100Mbit --rtt 40ms -- train.py",
        run=rehearse,
    )
    option(sub, "--islands N", "number of islands", type=int, required=True)
    option(sub, "--procs P", "processes (ranks) per island", type=int, required=True)
    option(
        sub, "--link RATE", "rate of each island's link, for example 100Mbit (default: not limited)"
    )
    option(sub, "--rtt TIME", "round trip between islands, for example 40ms (default: 0)")
    sub.add_argument(
        "--launcher",
        default="accelerate",
        choices=("accelerate", "torchrun", "deepspeed", "command"),
        help="default: accelerate; command: a whole command stands behind --",
    )
    option(sub, "--run ID", "run id (ISLAND_RUN)", default="rehearse")
    option(sub, "--cpu", "use the CPU even where there are GPUs")
    option(
        sub, "--grace SECONDS", "left to the others when an island dies (default: 40)", default=40.0
    )
    option(
        sub, "--restarts N", "start an island that saved and left, or was killed, again", default=0
    )
    option(sub, "--resume-args ARGS", "added to the script's arguments then", default="")
    unedited.add_arguments(sub)
    sub.set_defaults(takes_script=True)


def rehearse(args: argparse.Namespace) -> int:
    """Run N islands on this machine and return the worst exit status."""
    from ..launch.rehearsal import Rehearsal
    from ..launch.rehearse import Supervisor

    args.variables = unedited.variables(args)
    given = {field.name: getattr(args, field.name) for field in fields(Rehearsal)}
    given |= {"script": tuple(args.script), "link": _link(args.link, args.rtt)}
    plan = Rehearsal(**given)
    return Supervisor(plan, sys.stdout).run()


def _link(rate: str | None, rtt: str | None) -> Link | None:
    """The link of `--link` and `--rtt`; the latter counts where both name a round trip."""
    if rate is None and rtt is None:
        return None
    try:
        link = Link() if rate is None else Link.parse(rate)
        return link if rtt is None else Link(link.bits_per_second, parse_rtt(rtt))
    except ValueError as error:
        raise ValueError(f"--link/--rtt: {error}") from None
