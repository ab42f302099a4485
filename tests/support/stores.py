"""Stores for the ranks, each in a process of its own: its threads must not run where ranks are
forked.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import child


def server_of(store: int) -> int:
    """The process in which `fsdp-demo store`, which has this id, serves; it may be starting."""
    children, found = Path(f"/proc/{store}/task/{store}/children"), ""
    while not found:
        time.sleep(0.01)
        found = children.read_text()
    return int(found.split()[0])


def forked(*store: Any, close: Sequence[int] = (), **bounds: int) -> tuple[int, int]:
    """Process id and port of a `StoreServer(*store, **bounds)` that a fork of this process serves,
    which closes these descriptors.
    """
    reader, writer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(writer)
        port = int(os.read(reader, 9) or b"0")
        os.close(reader)
        assert port, "the store did not start: see the log of the rank, or of the rank server"
        return pid, port
    try:
        child.end_with(parent)
        for fd in (reader, *close):
            os.close(fd)
        from fsdp_demo.store.server import StoreServer

        served = StoreServer(*store, **bounds)
        os.write(writer, b"%d" % served.port)
        os.close(writer)
        served.serve_while(lambda: True)
    finally:
        os._exit(1)


def freeze(pid: int) -> None:
    """Stop a process, and wait until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


SHARED = ""  # the name of the store for calls whose run ids are drawn: no two runs meet in it
CALLS = 50  # that it serves until it is made anew: their keys stay


class Stores:
    """Stores by name. They end when they are told to, or with this process."""

    def __init__(self, close: list[int]):
        self._close = close  # descriptors that belong to the server alone
        self._held: dict[str, tuple[int, int]] = {}  # name: (process id, port)
        self._calls = 0  # of the shared store

    def endpoint(self, name: str) -> str:
        """host:port of the store of this name, which is started if there is none."""
        if name == SHARED:
            self._calls += 1
            if self._calls % CALLS == 0 or not self._lives(name):
                self.end(name)
        if name not in self._held:
            self._held[name] = forked("127.0.0.1:0", ":memory:", close=self._close)
        return f"127.0.0.1:{self._held[name][1]}"

    def end(self, name: str) -> None:
        """End the store of this name, if there is one."""
        if name in self._held:
            pid, _ = self._held.pop(name)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _lives(self, name: str) -> bool:
        if name not in self._held:
            return False
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT  # `end` takes its status
        return os.waitid(os.P_PID, self._held[name][0], look) is None

    def end_all(self) -> None:
        """End all."""
        for name in list(self._held):
            self.end(name)


class InThread:
    """A store that a thread of this process serves, until `end`."""

    def __init__(self, store: Any):
        self.endpoint, self._end = store.endpoint, threading.Event()
        wanted = (lambda: not self._end.is_set(),)
        how = {"args": wanted, "name": "store", "daemon": True}
        self._thread = threading.Thread(target=store.serve_while, **how)
        self._thread.start()

    def end(self) -> None:
        """Stop serving."""
        self._end.set()
        self._thread.join()
