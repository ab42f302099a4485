"""TCPStores for the ranks, each in a process of its own: its threads must not run where ranks are
forked.

A store of its own for every call: on a machine without a name server torch's store holds every 25th
connection for five seconds.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket

import torch.distributed as dist

from . import child


class Stores:
    """Stores by name. They end when they are told to, or with this process."""

    def __init__(self, close: list[int]):
        self._close = close  # descriptors that belong to the server alone
        self._held: dict[str, tuple[int, int]] = {}  # name: (process id, port)

    def endpoint(self, name: str) -> str:
        """host:port of the store of this name, which is started if there is none."""
        if name not in self._held:
            self._held[name] = self._start()
        return f"127.0.0.1:{self._held[name][1]}"

    def end(self, name: str) -> None:
        """End the store of this name, if there is one."""
        if name in self._held:
            pid, _ = self._held.pop(name)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def end_all(self) -> None:
        """End all."""
        for name in list(self._held):
            self.end(name)

    def _start(self) -> tuple[int, int]:
        # connections wait here until the store accepts them
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        port, parent = listener.getsockname()[1], os.getpid()
        pid = os.fork()
        if pid:
            listener.close()
            return pid, port
        try:
            child.end_with(parent)
            for fd in self._close:
                os.close(fd)
            wait = datetime.timedelta(seconds=60)
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                None,
                True,
                wait,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            while store is not None:
                signal.pause()
        finally:
            os._exit(1)
