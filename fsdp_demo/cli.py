"""The command `fsdp-demo`: its table of commands, and the exit status of each error."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from .commands import after_run, before_run, during_run, plan
from .errors import PeerLost
from .launch.command_line import USAGE_ERROR, CommandParser
from .version import __version__

COMMANDS = (
    *(before_run.add_presets, plan.add, before_run.add_doctor, before_run.add_rehearse),
    *(during_run.add_store, during_run.add_status),
    *(after_run.add_report, after_run.add_inspect, after_run.add_export),
)
"""The functions that add a command's parser, in the order of a user's day."""

EPILOG = (
    "fsdp-demo COMMAND --help shows flags and an example. Beside these python -m fsdp_demo.launch "
    "runs one island's launcher (torchrun, accelerate, deepspeed) and keeps its exit status."
)


def parser() -> CommandParser:
    """The parser of `fsdp-demo` with those of all its commands."""
    top = CommandParser(
        prog="fsdp-demo",
        description="One model on several islands that a slow network joins.",
        epilog=EPILOG,
    )
    top.add_argument("--version", action="version", version=f"fsdp-demo {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=CommandParser)
    for add in COMMANDS:
        add(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for what the user got wrong, 1 where the store
    does not answer or a file cannot be read or written).
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # Everything after the first "--" is the script's, options and all.
    cut = argv.index("--") if "--" in argv else len(argv)
    script = argv[cut + 1 :]
    top = parser()
    args = top.parse_args(argv[:cut], argparse.Namespace(script=script))
    try:
        if "run_command" not in args:
            top.print_help()
            return 0
        if script and not getattr(args, "takes_script", False):
            top.error(f"{argv[0]} takes no script behind --, found {script[0]!r}")
        return int(args.run_command(args))
    except ValueError as error:
        print(f"fsdp-demo: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except PeerLost as error:
        print(f"fsdp-demo: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output is gone (`| head`); nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"fsdp-demo: error: {named}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
