"""An island that comes back by itself: its launcher is started again when its ranks saved and left,
or were killed.

Each start is a process of its own (`python -m fsdp_demo.launch` without restarts), under the same
`ISLAND_RUN`: the islands agree in the store on the attempt in which they meet again
(`rendezvous/attempts.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..status import FOLDER as STATUS_FOLDER
from ..status import SAVED
from .processes import (
    ATTEMPT,
    LAUNCHED,
    adopt_orphans,
    descendants,
    reap,
    send,
    shell_status,
    start,
)

PATIENCE = 40.0  # seconds that ranks which a launcher left behind get to save


class _Island:
    """The launcher that runs now, and the signal that has told this process to end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.told = 0

    def on_signal(self, number: int, frame: object) -> None:
        """Pass SIGTERM on; Ctrl-C in a terminal reaches the launcher by itself."""
        self.told = number
        if self.process is not None and number == signal.SIGTERM:
            send([self.process.pid], number)

    def run(self, words: Sequence[str], env: dict[str, str]) -> int:
        """Start a launcher and wait for it; its status as a shell shows it."""
        command = [sys.executable, "-m", "fsdp_demo.launch", *words]
        self.process = start(command, env)
        if self.told:  # between two of them
            send([self.process.pid], signal.SIGTERM)
        return shell_status(self.process.wait())


def returns(status: int) -> bool:
    """Whether an island that ended with this status is started again: it saved and left, or was
    killed.

    >>> [status for status in (0, 1, 2, 75, 78, 137, 139) if returns(status)]
    [75, 137, 139]
    """
    return status == SAVED or status >= 128


def supervise(words: Sequence[str], restarts: int, resume: Sequence[str] = ()) -> int:
    """Run `python -m fsdp_demo.launch *words`, and again as long as it ends with a status that
    `returns`; the last status.

    A signal to end ends the island and no other is started.

    Args:
        restarts: how often it is started again at most.
        resume: what is added to the script's arguments from the second start on.
    """
    adopt_orphans()
    island = _Island()
    before = {
        number: signal.signal(number, island.on_signal)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for number in range(restarts + 1):
            # none reads what an earlier one has left
            folder = Path(os.environ[STATUS_FOLDER]) / f"attempt{number}"
            folder.mkdir(parents=True, exist_ok=True)
            env = {**os.environ, ATTEMPT: str(number), STATUS_FOLDER: str(folder)}
            if number:
                env[LAUNCHED] = str(time.time())
            status = island.run([*words, *(resume if number else ())], env)
            if island.told or number == restarts or not returns(status):
                break
            sys.stderr.write(
                f"fsdp_demo.launch: ended with status {status}; restart {number + 1} of "
                f"{restarts}\n"
            )
            _end_strays()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status


def _end_strays() -> None:
    """End what a launcher that was killed has left: its ranks would live beside their
    successors.
    """
    end = time.monotonic() + PATIENCE
    send(descendants(os.getpid()), signal.SIGTERM)
    while (left := descendants(os.getpid())) and time.monotonic() < end:
        reap(())
        time.sleep(0.1)
    send(left, signal.SIGKILL)
    reap(())
