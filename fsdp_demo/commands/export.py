"""`fsdp-demo export`: a run's model as a folder for `from_pretrained`."""

from __future__ import annotations

import argparse
import os

from ..launch.command_line import Commands

EXAMPLE = "fsdp-demo export outputs/pretrain outputs/model"


def add(commands: Commands) -> None:
    sub = commands.add_parser(
        "export",
        help="write a run's outer parameters as a folder for from_pretrained, with a model card",
    )
    sub.example(EXAMPLE)
    sub.add_argument(
        "folder",
        metavar="RUN",
        help="output folder of the run, with those of all islands, or one checkpoint of it",
    )
    sub.add_argument("out", metavar="OUT", help="folder to write; new or empty")
    sub.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of the checkpoints (default: the newest that suffices for the model)",
    )
    sub.add_argument("--island", type=int, metavar="I", help="this island's replica alone")
    sub.add_argument(
        "--model",
        metavar="CONFIG",
        help="config.json, folder or hub id of the architecture, if the checkpoints hold none",
    )
    sub.add_argument(
        "--tokenizer", metavar="ID", help="hub id or folder (default: the one saved with the run)"
    )
    sub.add_argument("--push-to-hub", metavar="REPO", help="upload the folder to this repository")
    sub.set_defaults(run_command=export)


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
        push_to_hub=args.push_to_hub,
    )
    print(
        f"{args.out}: step {chosen.step}, {chosen.says}"
        + (f"; uploaded to {args.push_to_hub}" if args.push_to_hub else "")
    )
    return 0
