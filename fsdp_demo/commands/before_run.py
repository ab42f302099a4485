"""The commands before a run that need no file of their own: `presets` lists the methods, `rehearse`
runs several islands on this machine.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from dataclasses import fields

from ..launch import unedited
from ..launch.command_line import Commands
from ..net.link import Link, parse_rtt


def add_presets(commands: Commands) -> None:
    """Add the parser of `fsdp-demo presets`."""
    sub = commands.add_parser("presets", help="list the methods, or show one")
    sub.example("fsdp-demo presets demo --yaml")
    sub.add_argument("name", nargs="?", metavar="NAME", help="the preset to show")
    sub.add_argument(
        "--yaml", action="store_true", help="print it as yaml, to change and pass as a file"
    )
    sub.set_defaults(run_command=presets)


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


def add_rehearse(commands: Commands) -> None:
    """Add the parser of `fsdp-demo rehearse`."""
    sub = commands.add_parser(
        "rehearse",
        help="run several islands on this machine, as they would run on several",
        usage="fsdp-demo rehearse --islands N --procs P [options] -- SCRIPT ARGS",
    )
    sub.example("fsdp-demo rehearse --islands 2 --procs 1 --link 100Mbit --rtt 40ms -- train.py")
    sub.add_argument("--islands", type=int, required=True, metavar="N", help="number of islands")
    sub.add_argument(
        "--procs", type=int, required=True, metavar="P", help="processes (ranks) per island"
    )
    sub.add_argument(
        "--link",
        metavar="RATE",
        help="rate of each island's link, for example 100Mbit (default: not limited)",
    )
    sub.add_argument(
        "--rtt", metavar="TIME", help="round trip between islands, for example 40ms (default: 0)"
    )
    sub.add_argument(
        "--launcher",
        default="accelerate",
        choices=("accelerate", "torchrun", "deepspeed", "command"),
        help="default: accelerate; command: a whole command stands behind --",
    )
    sub.add_argument("--run", default="rehearse", metavar="ID", help="run id (ISLAND_RUN)")
    sub.add_argument("--cpu", action="store_true", help="use the CPU even where there are GPUs")
    sub.add_argument(
        "--grace",
        type=float,
        default=40.0,
        metavar="SECONDS",
        help="left to the others when an island dies (default: 40)",
    )
    sub.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start an island that saved and left, or was killed, again",
    )
    sub.add_argument(
        "--resume-args", default="", metavar="ARGS", help="added to the script's arguments then"
    )
    unedited.add_arguments(sub)
    sub.set_defaults(run_command=rehearse, takes_script=True)


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
