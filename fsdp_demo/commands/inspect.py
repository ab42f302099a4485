"""`fsdp-demo inspect`: what a checkpoint holds."""

from __future__ import annotations

import argparse
import json

from ..launch.command_line import Commands

EXAMPLE = "fsdp-demo inspect outputs/pretrain"


def add(commands: Commands) -> None:
    sub = commands.add_parser(
        "inspect",
        help="say what a checkpoint holds: step, preset, islands, states and sizes, what is "
        "missing",
    )
    sub.example(EXAMPLE)
    sub.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint-N, or the folder of a run for all of its checkpoints",
    )
    sub.add_argument(
        "--json", action="store_true", help="print a list of objects, one per checkpoint"
    )
    sub.set_defaults(run_command=inspect_checkpoint)


def inspect_checkpoint(args: argparse.Namespace) -> int:
    """Say what a checkpoint, or every checkpoint of a run, holds; 1 if one of them is not whole."""
    from ..checkpoint.inspect import inspect as look
    from ..checkpoint.inspect import shared, texts

    found = look(args.checkpoint)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(texts(found))
        if len(found) > 1:
            print(f"\n{shared(found)}")
    return 0 if all(one["complete"] for one in found) else 1
