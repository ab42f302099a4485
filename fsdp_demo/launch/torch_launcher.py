"""The process in which `python -m fsdp_demo.launch` runs one of torch's launchers, unchanged. It
ends with the status that the island's ranks ended with.

    python -m fsdp_demo.launch.torch_launcher torchrun --nproc-per-node 2 train.py
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..status import DECIDE, SAVED
from ..status import FOLDER as STATUS_FOLDER
from .processes import HEARD, LAUNCHERS, shell_status, was_told

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


class _Launcher(logging.Handler):
    """Reads torch's log: when it told ranks to stop (what a rank saved before that, it saved of its
    own accord), and whether a signal has told it to end.

    Args:
        folder: gets the file `HEARD` then.
    """

    def __init__(self, folder: str | None) -> None:
        super().__init__(logging.WARNING)
        self._folder = folder
        self.stops: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = str(record.msg)
        if text.startswith("Sending process"):
            self.stops.append(record.created)
        if self._folder and "death signal" in text:
            (Path(self._folder) / HEARD).touch()


def failed_status(error: ChildFailedError, folder: str | None, stops: list[float]) -> int:
    """The status of an island whose launcher reports failed ranks; `failures` are in the order they
    were seen.

    78 of any rank is the island's. Status 1 beside a rank that was killed in the same second is
    taken to follow from that; the launcher itself kills what it has told to end only half a minute
    later.

    Args:
        folder: where ranks write their status (`status.tell_launcher`).
        stops: when the launcher told ranks to stop: those of this start and of earlier ones.
    """
    failures = list(error.failures.values())
    first = failures[0]
    if any(f.exitcode == DECIDE for f in failures):
        return DECIDE
    stopped_at = min((at for at in stops if at > first.timestamp - 1), default=float("inf"))
    # torch aborts if an interpreter ends with live groups
    if first.exitcode in (1, -signal.SIGABRT) and was_told(folder, SAVED, stopped_at):
        return SAVED
    near = (f for f in failures if abs(f.timestamp - first.timestamp) < 5)
    killed = [f for f in near if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    return shell_status(killed[0].exitcode if first.exitcode == 1 and killed else first.exitcode)


def main(argv: list[str]) -> int:
    """Run a launcher of torch (`LAUNCHERS`) with its arguments; returns the island's status."""
    gc.disable()  # imports take a fifth less, and what they make stays
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder = os.environ.get(STATUS_FOLDER)
    seen = _Launcher(folder)
    logging.getLogger("torch.distributed.elastic").addHandler(seen)
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
    run = importlib.import_module(module).main
    gc.enable()
    try:
        run()
    except ChildFailedError as error:
        return failed_status(error, folder, seen.stops)
    except subprocess.CalledProcessError as error:  # `accelerate launch` of one process
        return shell_status(error.returncode)
    except SignalException as error:
        # Told to stop by a signal, and passed it on. Ranks that saved and left make this a clean
        # stop.
        return SAVED if was_told(folder, SAVED) else 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
