"""Run an island's launcher and end with the status that its ranks ended with.

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
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from ..status import FOLDER as STATUS_FOLDER
from ..status import SAVED
from .command_line import CommandParser
from .processes import (
    HEARD,
    LAUNCHED,
    LAUNCHERS,
    Launcher,
    adopt_orphans,
    end_strays,
    path_with_site,
    saved_before,
    supervise,
)

EXAMPLE = "python -m fsdp_demo.launch --restarts 3 torchrun --nproc-per-node 8 train.py"


def _parse(argv: list[str]) -> tuple[int, list[str], list[str]]:
    """Restarts, arguments for them, and the launcher's words. Wrong ones end with status 2."""
    usage = (
        "python -m fsdp_demo.launch [--restarts N] [--resume-args ARGS] "
        "{accelerate,deepspeed,torchrun} WORDS"
    )
    parser = CommandParser(prog="python -m fsdp_demo.launch", usage=usage)
    parser.example(EXAMPLE)
    parser.add_argument(
        "--restarts", type=int, default=0, help="start again so often after status 75 or a signal"
    )
    parser.add_argument(
        "--resume-args", default="", help="added to the script's arguments when it is started again"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if not args.words or args.words[0] not in LAUNCHERS:
        found = repr(args.words[0]) if args.words else "none"
        parser.error(
            f"launcher {found}: expected {', '.join(sorted(LAUNCHERS))}, and its arguments. For a "
            "script of one process write: torchrun --nproc-per-node 1 SCRIPT"
        )
    if args.restarts < 0:
        parser.error(f"--restarts {args.restarts}: must be 0 or more")
    return args.restarts, shlex.split(args.resume_args), args.words


def main(argv: list[str] | None = None) -> int:
    """Run a launcher (a name in `LAUNCHERS`) with its arguments; returns the island's status."""
    restarts, resume, argv = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(LAUNCHED, str(time.time()))
    with tempfile.TemporaryDirectory(prefix="fsdp-demo-") as folder:
        os.environ.setdefault(STATUS_FOLDER, folder)
        if restarts:
            return supervise(argv, restarts, resume)
        if argv[0] == "deepspeed":
            from .deepspeed import run

            return run(argv)
        return _run(argv)


def _run(argv: list[str]) -> int:
    """torch's launchers, in a process of their own (`torch_launcher.py`)."""
    adopt_orphans()
    folder = os.environ[STATUS_FOLDER]
    heard = Path(folder) / HEARD
    heard.parent.mkdir(parents=True, exist_ok=True)
    heard.unlink(missing_ok=True)  # of an earlier start
    launcher = Launcher(heard)
    env = {**os.environ, "PYTHONPATH": path_with_site(os.environ)}
    with launcher.listening():
        command = [sys.executable, "-m", "fsdp_demo.launch.torch_launcher", *argv]
        status = launcher.run(command, env, session=True)
        if status > 128:  # it was killed, as `accelerate launch` of one process is by SIGTERM
            end_strays()
            if launcher.told and saved_before(folder, time.time() + 1):
                return SAVED
    return status


if __name__ == "__main__":
    sys.exit(main())
