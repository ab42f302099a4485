"""An island that comes back by itself: its launcher is started again when its ranks saved and left,
or were killed.

Each start is a process of its own (`python -m fsdp_demo.launch` without restarts), under the same
`ISLAND_RUN`: the islands agree in the store on the attempt in which they meet again
(`rendezvous/attempts.py`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..status import FOLDER as STATUS_FOLDER
from ..status import SAVED
from .processes import ATTEMPT, LAUNCHED, Launcher, adopt_orphans, end_strays


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
    island = Launcher()
    with island.listening():
        for number in range(restarts + 1):
            # none reads what an earlier one has left
            folder = Path(os.environ[STATUS_FOLDER]) / f"attempt{number}"
            folder.mkdir(parents=True, exist_ok=True)
            env = {**os.environ, ATTEMPT: str(number), STATUS_FOLDER: str(folder)}
            if number:
                env[LAUNCHED] = str(time.time())
            again = resume if number else ()
            status = island.run([sys.executable, "-m", "fsdp_demo.launch", *words, *again], env)
            if island.told or number == restarts or not returns(status):
                break
            sys.stderr.write(
                f"fsdp_demo.launch: ended with status {status}; restart {number + 1} of "
                f"{restarts}\n"
            )
            end_strays()
    return status
