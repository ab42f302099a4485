"""How a rank that leaves in order tells its launcher why: exit statuses of sysexits.h."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from .errors import NeedsDecision, PeerLost

SAVED = 75
"""The rank saved what it has and can be resumed (EX_TEMPFAIL: try again later)."""

DECIDE = 78
"""To start again changes nothing: somebody must choose, or change something, first (EX_CONFIG)."""

FOLDER = "ISLAND_STATUS"
"""Variable with the folder where every rank that ends so writes its status, file `rank<R>`, or
`rank<R>.<N>` where torchrun has started it N times again: launchers turn every status into 1.
"""


def tell_launcher(rank: int, status: int) -> None:
    """Write a rank's status where `fsdp_demo.launch` and rehearsals look for it."""
    folder = os.environ.get(FOLDER)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"rank{rank}" if again == "0" else f"rank{rank}.{again}"
        (Path(folder) / name).write_text(str(status))


_TRAINED = "trained"  # in that folder: a Trainer of this island has trained


def tell_of_training() -> None:
    """Say there that a Trainer trains: without an exchange asked for, its end is no success."""
    folder = os.environ.get(FOLDER)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / _TRAINED).touch()


def has_trained(folder: str) -> bool:
    """Whether a rank has said so there."""
    return (Path(folder) / _TRAINED).exists()


def status_of(error: BaseException | None) -> int:
    """The status of a process that this error ends: 75 where others or the store caused it and no
    save has failed, 78 where a person must decide, else 1.

    >>> errors = PeerLost("island 1"), NeedsDecision("which step?"), RuntimeError("a bug")
    >>> [status_of(error) for error in errors]
    [75, 78, 1]
    """
    if isinstance(error, NeedsDecision):
        return DECIDE
    return SAVED if isinstance(error, PeerLost) and not error.unsaved else 1


_hooked = False


def end_by_errors() -> None:
    """From now on a `PeerLost` or `NeedsDecision` that nobody catches ends this process with
    `status_of` it, in plain loops, under the Trainer and DeepSpeed, and its launcher hears that. A
    `NeedsDecision` is one line in the log, without a traceback. An interactive interpreter goes on
    behind both instead.
    """
    global _hooked
    if _hooked or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    _hooked, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank, status = int(os.environ.get("RANK", "0")), status_of(error)
        if status != DECIDE:
            before(kind, error, trace)
        elif rank == 0:
            logging.getLogger("fsdp_demo").error("%s", error)
        if status != 1:
            tell_launcher(rank, status)
            # the interpreter ends with it, as regularly as after any other error
            raise SystemExit(status)

    sys.excepthook = hook


_thread = threading.local()


def host_thread() -> None:
    """Say that this thread trains for a host that ends the process, and tells exchanges to stop, by
    itself: from now on `leave` raises SystemExit in it.
    """
    _thread.hosted = True


def is_hosted() -> bool:
    """Whether this thread has said so."""
    return getattr(_thread, "hosted", False)


_ends_at = math.inf
_last: list[weakref.WeakMethod[Callable[[], None]]] = []


def end_within(seconds: float) -> None:
    """Say that this process ends so many seconds from now, at the latest."""
    global _ends_at
    _ends_at = min(_ends_at, time.monotonic() + seconds)


def seconds_left() -> float:
    """Seconds until that end, less a second for the end itself; inf where none was said."""
    return _ends_at - time.monotonic() - 1.0


def before_leaving(work: Callable[[], None]) -> None:
    """Let a method of an object that lives be called by `do_last`."""
    _last.append(weakref.WeakMethod(work))


def do_last() -> None:
    """What is left to do before a process that has saved ends in order. All ranks of a replica come
    together."""
    for work in [method() for method in _last]:
        if work is not None:
            work()


def leave(status: int) -> NoReturn:
    """End the process at once, with all logged and printed: an exit could wait for lost peers."""
    if is_hosted():
        raise SystemExit(status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
