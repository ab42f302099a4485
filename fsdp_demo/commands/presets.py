"""`fsdp-demo presets`: the methods there are."""

from __future__ import annotations

import argparse
import inspect

from ..launch.command_line import Commands

EXAMPLE = "fsdp-demo presets demo --yaml"


def add(commands: Commands) -> None:
    sub = commands.add_parser("presets", help="list the methods, or show one")
    sub.example(EXAMPLE)
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
            print(
                f"{name:{width}}  {group:11}  "
                f"{(inspect.getdoc(known[name]) or '').partition(chr(10))[0]}"
            )
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
