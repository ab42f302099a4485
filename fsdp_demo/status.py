"""How a rank that leaves in order tells its launcher why: exit statuses of sysexits.h."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

SAVED = 75
"""The rank saved what it has and can be resumed (EX_TEMPFAIL: try again later)."""

DECIDE = 78
"""To start again changes nothing: somebody must choose, or change something, first (EX_CONFIG)."""

FOLDER = "ISLAND_STATUS"
"""Variable with the folder where every rank that ends so writes its status, file `rank<R>`:
launchers turn every status into 1.
"""


def tell_launcher(rank: int, status: int) -> None:
    """Write the status of a rank of this island where `fsdp_demo.launch` and rehearsals look for
    it.
    """
    folder = os.environ.get(FOLDER)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank{rank}").write_text(str(status))


def leave(status: int) -> NoReturn:
    """End the process at once, with what was logged and printed: a regular exit could wait for
    peers that are gone.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
