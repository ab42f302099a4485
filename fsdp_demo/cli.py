"""The command `fsdp-demo`: its table of commands, and the exit status of each error."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from .commands import after_run, before_run, doctor, during_run, plan
from .errors import PeerLost
from .launch.command_line import USAGE_ERROR, CommandParser
from .version import __version__

DAY = {
    "before a run": {
        "presets": before_run.add_presets,
        "plan": plan.add,
        "doctor": doctor.add,
        "rehearse": before_run.add_rehearse,
    },
    "during a run": {"store": during_run.add_store, "status": during_run.add_status},
    "after a run": {
        "report": after_run.add_report,
        "inspect": after_run.add_inspect,
        "export": after_run.add_export,
    },
}
"""The functions that add each command's parser, in the order of a user's day."""

LAUNCH = "python -m fsdp_demo.launch"
LAUNCH_HELP = "run one island's launcher (torchrun, accelerate, deepspeed) and keep its exit status"


def parser() -> CommandParser:
    """The command table."""
    top = CommandParser(
        prog="fsdp-demo", description="One model on several islands that a slow network joins."
    )
    top.add_argument("--version", action="version", version=f"fsdp-demo {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=CommandParser)
    for adders in DAY.values():
        for add in adders.values():
            add(commands)
    return top


def overview(top: CommandParser) -> str:
    """What there is, in the order of a user's day: what `fsdp-demo` alone prints."""
    (action,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    helps = {a.dest: a.help or "" for a in action._choices_actions}
    width = max(map(len, helps))
    lines = [f"fsdp-demo {__version__}: {top.description}"]
    for title, adders in DAY.items():
        lines += ["", f"{title}:"]
        lines += [f"  fsdp-demo {name:{width}}  {helps[name]}" for name in adders]
        if title == "during a run":
            lines += [f"  {LAUNCH}", f"  {'':{width + 10}}  {LAUNCH_HELP}"]
    return "\n".join([*lines, "", "fsdp-demo COMMAND --help shows flags and an example."])


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
            print(overview(top))
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
