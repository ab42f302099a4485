"""An exchange for scripts that are not edited, asked for at the launch: flags of `launch` and
`rehearse`, the variables that carry them to every process below, and what is said where no Trainer
was found there. `site/sitecustomize.py` reads the variables.
"""

from __future__ import annotations

import argparse
import os
import shlex

from ..config.load import load_config
from .command_line import option

LINES = """\
fsdp_demo.launch: --exchange {exchange} did nothing: no Trainer of transformers or Lightning \
has trained below this command (docs/yaml.md). A loop of its own needs two lines, and no --exchange:
    exchange = fsdp_demo.attach(optimizer, "{exchange}", model=model)   # before the first step
    exchange.finish()                                                   # after the last one
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--exchange`, `--set` and `--resume`."""
    option(
        parser,
        "--exchange PRESET|YAML",
        "for every Trainer of transformers or Lightning below, whose script is not edited",
    )
    option(
        parser,
        "--set KEY=VALUE",
        "a change to it; may be repeated",
        dest="changes",
        action="append",
        default=[],
    )
    parser.add_argument(
        "--resume",
        choices=("auto",),
        help="these Trainers go on from the newest checkpoint, if there is one; a restart does",
    )


def variables(args: argparse.Namespace) -> dict[str, str]:
    """The variables that say what these flags do; none without `--exchange`. Raises ValueError:
    `--set` or `--resume` without `--exchange`; what `load_config` refuses.
    """
    if args.exchange is None:
        if args.changes or args.resume:
            flag = "--set" if args.changes else "--resume"
            raise ValueError(f"{flag} is of an exchange: give --exchange PRESET, too")
        return {}
    try:
        load_config(args.exchange, args.changes)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    is_file = os.path.isfile(args.exchange)
    return {
        "ISLAND_EXCHANGE": os.path.abspath(args.exchange) if is_file else args.exchange,
        "ISLAND_EXCHANGE_SET": shlex.join(args.changes),
        **({"ISLAND_RESUME": args.resume} if args.resume else {}),
    }
