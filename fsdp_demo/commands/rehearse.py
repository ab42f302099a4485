"""`fsdp-demo rehearse`: several islands on this machine."""

from __future__ import annotations

import argparse

from ..launch.command_line import Commands

EXAMPLE = "fsdp-demo rehearse --islands 2 --procs 1 --link 100Mbit --rtt 40ms -- train.py"
USAGE = "fsdp-demo rehearse --islands N --procs P [options] -- SCRIPT ARGS"


def add(commands: Commands) -> None:
    sub = commands.add_parser(
        "rehearse",
        help="run several islands on this machine, as they would run on several",
        usage=USAGE,
    )
    sub.example(EXAMPLE)
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
        choices=("accelerate", "torchrun", "deepspeed"),
        help="default: accelerate",
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
    sub.set_defaults(run_command=rehearse, takes_script=True)


def rehearse(args: argparse.Namespace) -> int:
    """Run N islands on this machine and return the worst exit status."""
    from ..launch.rehearsal import Rehearsal
    from ..launch.rehearse import rehearse as run
    from ..net.link import Link, parse_rate, parse_rtt

    link = None
    if args.link is not None or args.rtt is not None:
        try:
            link = (
                Link.parse(args.link)
                if args.link and "," in args.link
                else Link(args.link and parse_rate(args.link), 0.0)
            )
            link = Link(link.bits_per_second, parse_rtt(args.rtt)) if args.rtt else link
        except ValueError as error:
            raise ValueError(f"--link/--rtt: {error}") from None
    return run(
        Rehearsal(
            islands=args.islands,
            procs=args.procs,
            script=tuple(args.script),
            launcher=args.launcher,
            link=link,
            run=args.run,
            cpu=args.cpu,
            grace=args.grace,
            restarts=args.restarts,
            resume_args=args.resume_args,
        )
    )
