"""Run an island's launcher and end with the status that its ranks ended with.

`accelerate launch` and `torchrun` end with status 1 whatever a rank's status was. Here they run unchanged in this process,
and the status of the rank that failed first becomes the status of the process (128 + number for a signal, as in a shell); `deepspeed`
keeps most statuses and loses some (`launch_deepspeed.py`):

    python -m fsdp_demo.launch torchrun --nproc-per-node 2 train.py
    python -m fsdp_demo.launch accelerate launch --num_processes 2 train.py
    python -m fsdp_demo.launch deepspeed --num_gpus 2 train.py

A rank that left by itself with status 75 (`fsdp_demo.guard`: saved, can go on) makes it 75, also where another rank of
the island then failed with status 1 because of it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SAVED = 75
"""Exit status of a rank that saved what it has and can be resumed (EX_TEMPFAIL of sysexits.h)."""

STATUS_FOLDER = "ISLAND_STATUS"
"""Variable with the folder where every rank that ends through `fsdp_demo.guard` writes its status, file `rank<R>`."""

LAUNCHERS = {
    "accelerate": "accelerate.commands.accelerate_cli",
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
}


class _FirstStop(logging.Handler):
    """Notes when the launcher first told a rank to stop: what a rank saved before that, it saved of its own accord."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.at = float("inf")

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Sending process"):
            self.at = min(self.at, record.created)


def saved_before(folder: str | None, moment: float) -> bool:
    """Did a rank write status 75 into `folder` before `moment` (seconds since the epoch)?"""
    files = sorted(Path(folder).glob("rank*")) if folder else []
    return any(file.stat().st_mtime < moment and file.read_text().strip() == str(SAVED) for file in files)


def shell_status(code: int) -> int:
    """A process's return code as a shell shows it.

    >>> shell_status(-9)
    137
    """
    return 128 - code if code < 0 else code


def failed_status(error: ChildFailedError, folder: str | None, stopped_at: float) -> int:
    """The status of an island whose launcher reports failed ranks; `failures` are in the order they were seen."""
    first = shell_status(next(iter(error.failures.values())).exitcode)
    return SAVED if first == 1 and saved_before(folder, stopped_at) else first


def main(argv: list[str] | None = None) -> int:
    """Run `argv[0]` (a name in `LAUNCHERS`) with the arguments after it; returns the island's status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in LAUNCHERS:
        raise ValueError(f"launcher {argv[:1]}: expected one of {sorted(LAUNCHERS)} and its arguments")
    if argv[0] == "deepspeed":
        from .launch_deepspeed import run

        return run(argv)
    folder, stop = os.environ.get(STATUS_FOLDER), _FirstStop()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(stop)
    sys.argv = list(argv)
    try:
        importlib.import_module(LAUNCHERS[argv[0]]).main()
    except ChildFailedError as error:
        return failed_status(error, folder, stop.at)
    except SignalException as error:
        # Told to stop by a signal, and passed it on. Ranks that saved and left make this a clean stop.
        return SAVED if saved_before(folder, time.time() + 1) else 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
