"""The commands for a run that has ended, or was killed: `report` makes a page of its files,
`inspect` says what a checkpoint holds, `export` writes its model for `from_pretrained`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from ..launch.command_line import Commands, option


def add_report(commands: Commands) -> None:
    """Add the parser of `fsdp-demo report`."""
    sub = commands.add_parser(
        "report",
        help="make one html file of a run, or of several to compare",
        description="Reads what the recipes and the callbacks leave in the output folder of a "
        "run, also of one that was killed or still trains. The html needs no other file.",
        example="fsdp-demo report outputs/demo outputs/diloco --out compare.html",
        run=report,
    )
    sub.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run")
    option(
        sub, "--out FILE", "the html (default: report.html in RUN, or in this folder for several)"
    )


def report(args: argparse.Namespace) -> int:
    """Write the page and name it."""
    from ..tools.report.page import make

    if args.out and not Path(args.out).parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {Path(args.out).parent}")
    print(make(args.runs, args.out))
    return 0


def add_inspect(commands: Commands) -> None:
    """Add the parser of `fsdp-demo inspect`."""
    sub = commands.add_parser(
        "inspect",
        help="say what a checkpoint holds: step, preset, islands, states and sizes, what is "
        "missing",
        example="fsdp-demo inspect outputs/pretrain",
        run=inspect,
    )
    sub.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint-N for all that it holds, or the folder of a run for a line on each",
    )
    option(sub, "--json", "print a list of objects, one per checkpoint")


def inspect(args: argparse.Namespace) -> int:
    """Say what a checkpoint, or every checkpoint of a run, holds; 1 if one of them is not whole."""
    from ..tools.inspect import inspect as look
    from ..tools.inspect_words import overview, text

    found = look(args.checkpoint)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(text(found[0]) if len(found) == 1 else overview(found))
    return 0 if all(one["complete"] for one in found) else 1


def add_export(commands: Commands) -> None:
    """Add the parser of `fsdp-demo export`."""
    sub = commands.add_parser(
        "export",
        help="write a run's outer parameters as a folder for from_pretrained, with a model card",
        example="fsdp-demo export outputs/pretrain outputs/model",
        run=export,
    )
    sub.add_argument(
        "folder",
        metavar="RUN",
        help="output folder of the run, with those of all islands, or one checkpoint of it",
    )
    sub.add_argument("out", metavar="OUT", help="folder to write; new or empty")
    option(
        sub,
        "--step N",
        "of the checkpoints (default: the Trainer's best, else the newest that suffices)",
        type=int,
    )
    option(sub, "--island I", "this island's replica alone", type=int)
    option(
        sub,
        "--model CONFIG",
        "config.json, folder or hub id of the architecture, if the checkpoints hold none",
    )
    option(sub, "--tokenizer ID", "hub id or folder (default: the one saved with the run)")


def export(args: argparse.Namespace) -> int:
    """Write a run's model as a folder for `from_pretrained`."""
    # on the CPU; else DeepSpeed, which transformers imports if it is there, warns that it found no
    # GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from ..integrations.export.pretrained import export as write
    except ImportError as error:
        raise ValueError(
            f"export needs transformers ({error}): pip install 'fsdp_demo[hf]'"
        ) from None
    chosen = write(
        args.folder,
        args.out,
        step=args.step,
        island=args.island,
        model=args.model,
        tokenizer=args.tokenizer,
    )
    print(f"{args.out}: step {chosen.step}{chosen.why}, {chosen.says}")
    return 0
