"""What is left of a training once nobody holds it any more."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT = {"presence", "tqdm_monitor"}
"""Threads that outlive a run: the island lives until its process ends, and so does tqdm."""


def references(**objects: Any) -> dict[str, Callable[[], Any]]:
    """Weak references to these objects, and to the parts of an `exchange` among them."""
    if (exchange := objects.get("exchange")) is not None:
        objects |= {"runtime": exchange._runtime, "channel": exchange.channels[0]}
    return {name: weakref.ref(thing) for name, thing in objects.items()}


def left(life: Callable[..., dict[str, Callable[[], Any]]], *args: Any) -> list[str]:
    """Call life(*args), which returns `references`; the names of objects, threads and sockets that
    are still there when it has ended.
    """
    threads, sockets = set(threading.enumerate()), _sockets()
    found = life(*args)
    gc.collect()
    kept = [name for name, reference in found.items() if reference() is not None]
    end = time.monotonic() + 20
    while (over := _more(threads, sockets)) and time.monotonic() < end:
        time.sleep(0.05)
        gc.collect()  # what the threads held
    return kept + over


def _more(threads: set[threading.Thread], sockets: int) -> list[str]:
    names = [t.name for t in threading.enumerate() if t not in threads and t.name not in KEPT]
    beyond = _sockets() - sockets - 1  # the one of the presence
    return names + ([f"{beyond} sockets"] if beyond > 0 else [])


def _sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith("socket")
        except OSError:  # it was the folder's own
            continue
    return found
