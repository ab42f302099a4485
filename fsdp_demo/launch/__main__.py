"""Run what starts an island, and end with the status that its ranks ended with.

`accelerate launch` and `torchrun` end with status 1 whatever a rank's status was. Here they run
unchanged in a process of their own, and the status of the rank that failed first becomes the status
of the process (128 + number for a signal, as in a shell); `deepspeed` keeps most statuses and loses
some (`deepspeed.py`):

    python -m fsdp_demo.launch torchrun --nproc-per-node 2 train.py
    python -m fsdp_demo.launch accelerate launch --num_processes 2 train.py
    python -m fsdp_demo.launch deepspeed --num_gpus 2 train.py

A rank that left by itself with status 75 (`fsdp_demo.guard`: saved, can go on) makes it 75, also
where another rank of the island then failed with status 1 because of it.

With `--restarts N` before the launcher's name the island is started again, at most N times, when it
ended with 75 or was killed by a signal (`processes.supervise`); `--resume-args "..."` is added to
the script's arguments then. The script finds the number of its start in `ISLAND_ATTEMPT` (0, 1,
...):

    python -m fsdp_demo.launch --restarts 3 torchrun --nproc-per-node 2 train.py --resume auto

With `--from slurm|mpi|kubernetes` the variables of that engine say which island this is
(`engines.py`).

With `--exchange PRESET` every Trainer of transformers or Lightning that trains below has the
exchange, without a change in its script (`unedited.py`). Then any command may stand here: `python
train.py`, `trl sft --config sft.yaml`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from ..rendezvous.environment import stop_signals, whole
from ..status import DECIDE, SAVED, has_trained
from ..status import FOLDER as STATUS_FOLDER
from . import engines, unedited
from .command_line import CommandParser, option
from .notice import watch
from .processes import (
    ATTEMPT,
    HEARD,
    LAUNCHED,
    LAUNCHERS,
    SIGNALS,
    Launcher,
    adopt_orphans,
    end_strays,
    path_with_site,
    shell_status,
    supervise,
    was_told,
)

EXAMPLE = "python -m fsdp_demo.launch --restarts 3 torchrun --nproc-per-node 8 train.py"


def _parser() -> CommandParser:
    usage = (
        "python -m fsdp_demo.launch [--from ENGINE] [--restarts N] [--resume-args ARGS] "
        "[--exchange PRESET|YAML] [--set KEY=VALUE] [--resume auto] [--notice aws|gcp|COMMAND] "
        "COMMAND"
    )
    parser = CommandParser(prog="python -m fsdp_demo.launch", usage=usage, example=EXAMPLE)
    parser.add_argument(
        "--from",
        dest="engine",
        choices=tuple(engines.ENGINES),
        help="take ISLAND_* from the variables of what has started this process",
    )
    parser.add_argument(
        "--restarts", type=int, default=0, help="start again so often after status 75 or a signal"
    )
    parser.add_argument(
        "--resume-args", default="", help="added to the script's arguments when it is started again"
    )
    unedited.add_arguments(parser)
    option(
        parser,
        "--notice aws|gcp|COMMAND",
        "ask every 5 s whether this machine is taken away (COMMAND: it is, if that ends with "
        "0), and act then as at SIGTERM",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def _parse(argv: list[str]) -> tuple[int, list[str], list[str]]:
    """Restarts, arguments for them, and the launcher's words. Wrong ones end with status 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.words or args.words[0] not in LAUNCHERS and not shutil.which(args.words[0]):
        found = repr(args.words[0]) if args.words else "none"
        parser.error(
            f"command {found}: expected {', '.join(sorted(LAUNCHERS))}, or another command that is "
            "there, and its arguments. For a script of one process write: python SCRIPT"
        )
    if args.restarts < 0:
        parser.error(f"--restarts {args.restarts}: must be 0 or more")
    words, resume = args.words, shlex.split(args.resume_args)
    try:
        os.environ |= unedited.variables(args)
        if args.engine is not None:
            told, words = engines.told(args.engine, os.environ, words)
            os.environ |= told
            if whole(told, ATTEMPT, 0):  # the engine has started this island before
                words, resume = [*words, *resume], []
        # torch's launchers handle these themselves, where they hear them
        handled = dict.fromkeys([*SIGNALS, *(s.name for s in stop_signals(os.environ))])
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(handled))
    except ValueError as error:
        parser.error(str(error))
    if args.notice is not None:
        watch(args.notice)
    return args.restarts, resume, words


def main(argv: list[str] | None = None) -> int:
    """Run a launcher (a name in `LAUNCHERS`) or another command; returns the island's status."""
    restarts, resume, argv = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(LAUNCHED, str(time.time()))
    with tempfile.TemporaryDirectory(prefix="fsdp-demo-") as folder:
        os.environ.setdefault(STATUS_FOLDER, folder)
        if restarts:
            return supervise(argv, restarts, resume)
        if argv[0] == "deepspeed":
            from .deepspeed import run

            os.environ["PYTHONPATH"] = path_with_site(os.environ)
            status = run(argv)
        else:
            status = _run(argv)
        exchange = os.environ.get("ISLAND_EXCHANGE", "").strip()
        if status == 0 and exchange and not has_trained(os.environ[STATUS_FOLDER]):
            sys.stderr.write(unedited.LINES.format(exchange=exchange))
            return DECIDE
        return status


def _run(argv: list[str]) -> int:
    """torch's launchers (`torch_launcher.py`) or another command, in a process of its own."""
    adopt_orphans()
    folder, own = os.environ[STATUS_FOLDER], argv[0] in LAUNCHERS
    heard = Path(folder) / HEARD
    heard.parent.mkdir(parents=True, exist_ok=True)
    heard.unlink(missing_ok=True)  # of an earlier start
    launcher = Launcher(heard if own else None)
    env = {**os.environ, "PYTHONPATH": path_with_site(os.environ)}
    with launcher.listening():
        first = [sys.executable, "-m", "fsdp_demo.launch.torch_launcher"] if own else []
        status = launcher.run([*first, *argv], env, session=True)
        if status > 128:  # it was killed, as `accelerate launch` of one process is by SIGTERM
            end_strays()
            if launcher.told and was_told(folder, SAVED):
                return SAVED
    return status if own else _of_ranks(status, folder)


def _of_ranks(status: int, folder: str) -> int:
    """The status of an ended island: what ranks have written counts for more than 1 or an abort.
    `sys.exit(-9)` with the return code of a rank (`swift sft`) is status 247, here 137.
    """
    if 224 < status < 255:
        status = shell_status(status - 256)
    if status in (1, 128 + signal.SIGABRT):
        return next((code for code in (DECIDE, SAVED) if was_told(folder, code)), status)
    return status


if __name__ == "__main__":
    sys.exit(main())
