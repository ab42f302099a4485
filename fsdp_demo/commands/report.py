"""`fsdp-demo report`: what runs have left in their folders, as one html file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..launch.command_line import Commands

EXAMPLE = "fsdp-demo report outputs/demo outputs/diloco --out compare.html --md compare.md"


def add(commands: Commands) -> None:
    """Add the command to the table."""
    sub = commands.add_parser(
        "report",
        help="make one html file of a run, or of several to compare",
        description="Reads what the recipes and ExchangeCallback leave in the output folder of a "
        "run, also of one that was killed or still trains. The html needs no other file.",
    )
    sub.example(EXAMPLE)
    sub.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run")
    sub.add_argument(
        "--out",
        metavar="FILE",
        help="the html (default: report.html in RUN, or in this folder for several)",
    )
    sub.add_argument("--png", metavar="FILE", help="a picture, too; needs matplotlib")
    sub.add_argument("--md", metavar="FILE", help="the comparison as a markdown table, too")
    sub.set_defaults(run_command=report)


def report(args: argparse.Namespace) -> int:
    """Write the files and name them."""
    from ..tools.report.page import make

    for flag, name in (("--out", args.out), ("--png", args.png), ("--md", args.md)):
        if name and not Path(name).parent.is_dir():
            raise ValueError(f"{flag} {name}: there is no folder {Path(name).parent}")
    for path in make(args.runs, args.out, args.png, args.md):
        print(path)
    return 0
