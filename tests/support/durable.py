"""Durable stores in processes of their own, for tests that run in a rank (`run_ranks(fn, 1, 1)`),
where a fork is cheap and safe.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from . import stores

TOKEN = "a token of the tests, long enough"


class Durable:
    """A store that can be killed, stopped and started again on its file and port.

    Attributes:
        endpoint: 127.0.0.1:port, the same after a restart.
    """

    def __init__(self, file: Path | str = ":memory:", token: str = "", **bounds: int):
        self._file, self._token, self._bounds, self._pid = file, token, bounds, 0
        self.port = 0
        self.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, again if it has ended."""
        where = (self.endpoint, self._file, self._token)
        self._pid, self.port = stores.forked(*where, **self._bounds)

    def kill(self) -> None:
        """End it, as SIGKILL does."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def freeze(self) -> None:
        """Stop it, and wait until it stands still."""
        stores.freeze(self._pid)

    def wake(self) -> None:
        """Let it go on."""
        os.kill(self._pid, signal.SIGCONT)

    def client(self, deadline: float = 10.0, token: str | None = None, port: int = 0) -> Any:
        """A client of its own, of the store or of a relay before it."""
        from fsdp_demo.store.client import StoreClient

        token = self._token if token is None else token
        return StoreClient(f"127.0.0.1:{port or self.port}", token, deadline)
