"""Run an island's launcher and end with the status that its ranks ended with.

`accelerate launch` and `torchrun` end with status 1 whatever a rank's status was. Here they run
unchanged in this process, and the status of the rank that failed first becomes the status of the
process (128 + number for a signal, as in a shell); `deepspeed` keeps most statuses and loses some
(`deepspeed.py`):

    python -m fsdp_demo.launch torchrun --nproc-per-node 2 train.py
    python -m fsdp_demo.launch accelerate launch --num_processes 2 train.py
    python -m fsdp_demo.launch deepspeed --num_gpus 2 train.py

A rank that left by itself with status 75 (`fsdp_demo.guard`: saved, can go on) makes it 75, also
where another rank of the island then failed with status 1 because of it.

With `--restarts N` before the launcher's name the island is started again, at most N times, when it
ended with 75 or was killed by a signal (`restarts.py`); `--resume-args "..."` is added to the
script's arguments then. The script finds the number of its start in `ISLAND_ATTEMPT` (0, 1, ...):

    python -m fsdp_demo.launch --restarts 3 torchrun --nproc-per-node 2 train.py --resume auto
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..status import DECIDE, SAVED
from ..status import FOLDER as STATUS_FOLDER
from .command_line import CommandParser
from .processes import LAUNCHED, LAUNCHERS, reserve_port, saved_before, shell_status

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

EXAMPLE = "python -m fsdp_demo.launch --restarts 3 torchrun --nproc-per-node 8 train.py"


class _FirstStop(logging.Handler):
    """Notes when the launcher first told a rank to stop: what a rank saved before that, it saved of
    its own accord.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.at = float("inf")

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Sending process"):
            self.at = min(self.at, record.created)


def failed_status(error: ChildFailedError, folder: str | None, stopped_at: float) -> int:
    """The status of an island whose launcher reports failed ranks; `failures` are in the order they
    were seen.

    78 of any rank is the island's. Status 1 beside a rank that was killed in the same second is
    taken to follow from that; the launcher itself kills what it has told to end only half a minute
    later.
    """
    failures = list(error.failures.values())
    first = failures[0]
    if any(f.exitcode == DECIDE for f in failures):
        return DECIDE
    # torch aborts if an interpreter ends with live groups
    if first.exitcode in (1, -signal.SIGABRT) and saved_before(folder, stopped_at):
        return SAVED
    near = (f for f in failures if abs(f.timestamp - first.timestamp) < 5)
    killed = [f for f in near if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    return shell_status(killed[0].exitcode if first.exitcode == 1 and killed else first.exitcode)


def _at_starts(folder: str | None, stop: _FirstStop) -> None:
    """With `--max-restarts` a launcher starts its ranks several times: what those of an earlier
    start have left counts no more. A single rank gets no store from its launcher.
    """
    agent: Any = importlib.import_module(
        "torch.distributed.elastic.agent.server.local_elastic_agent"
    ).LocalElasticAgent
    start = agent._start_workers

    def anew(self: Any, group: Any) -> Any:
        stop.at = float("inf")
        for file in Path(folder).glob("rank*") if folder else ():
            file.unlink(missing_ok=True)
        if [worker.world_size for worker in group.workers] == [1]:
            # What its script starts by itself (`mp.spawn`, `debug_launcher`) has its variables.
            # Those ranks would take the launcher's store for granted, and wait for it at an address
            # that nobody serves. So the rank serves one itself, where it needs one.
            type(group.spec.rdzv_handler).use_agent_store = False
            group.master_port = reserve_port()
        return start(self, group)

    agent._start_workers = anew


def _told_once() -> None:
    """Let torch's launchers take one SIGTERM. Slurm tells all processes of a step, and a supervisor
    passes on what it is told: a second one would break off the wait for ranks that save."""
    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    handler = api._terminate_process_handler

    def once(number: int, frame: Any) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        handler(number, frame)

    api._terminate_process_handler = once


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
    """Run a launcher (a name in `LAUNCHERS`) with the arguments after it; returns the island's
    status.
    """
    restarts, resume, argv = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(LAUNCHED, str(time.time()))
    with tempfile.TemporaryDirectory(prefix="fsdp-demo-") as folder:
        os.environ.setdefault(STATUS_FOLDER, folder)
        if restarts:
            from .restarts import supervise

            return supervise(argv, restarts, resume)
        if argv[0] == "deepspeed":
            from .deepspeed import run

            return run(argv)
        return _run(argv)


def _run(argv: list[str]) -> int:
    """torch's launchers, in this process."""
    gc.disable()  # imports take a fifth less, and what they make stays
    # late: a process that restarts launchers needs no torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder, stop = os.environ.get(STATUS_FOLDER), _FirstStop()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(stop)
    _at_starts(folder, stop)
    _told_once()
    if any(word.replace("_", "-").startswith("--max-restarts") for word in argv):
        # torch 2.13: ranks that are started again find the addresses of those before them in the
        # store that they share with their launcher, and connect to nobody. So rank 0 serves one of
        # its own (where the rendezvous is dynamic: --standalone, --rdzv-backend c10d).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    module = LAUNCHERS[argv[0]]
    if argv[:2] == ["accelerate", "launch"]:
        # accelerate's other commands take a second to import
        module, argv = "accelerate.commands.launch", ["accelerate launch", *argv[2:]]
    sys.argv = list(argv)
    main = importlib.import_module(module).main
    gc.enable()
    try:
        main()
    except ChildFailedError as error:
        return failed_status(error, folder, stop.at)
    except subprocess.CalledProcessError as error:  # `accelerate launch` of one process
        return shell_status(error.returncode)
    except SignalException as error:
        # Told to stop by a signal, and passed it on. Ranks that saved and left make this a clean
        # stop.
        return SAVED if saved_before(folder, time.time() + 1) else 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
