"""Durable stores in processes of their own, for tests that run in a rank (`run_ranks(fn, 1, 1)`),
where a fork is cheap and safe.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from . import child

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
        reader, writer = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            try:
                child.end_with(parent)
                os.close(reader)
                self._serve(writer)
            finally:
                os._exit(1)
        os.close(writer)
        self.port = int(os.read(reader, 9) or b"0")
        os.close(reader)
        assert self.port, "the store did not start: see the log of the rank"

    def _serve(self, writer: int) -> None:
        from fsdp_demo.store.server import StoreServer

        store = StoreServer(f"127.0.0.1:{self.port}", self._file, self._token, **self._bounds)
        os.write(writer, b"%d" % store.port)
        os.close(writer)
        store.serve_while(lambda: True)

    def kill(self) -> None:
        """End it, as SIGKILL does."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def freeze(self) -> None:
        """Stop it, and wait until it stands still."""
        os.kill(self._pid, signal.SIGSTOP)
        status = Path(f"/proc/{self._pid}/stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)

    def wake(self) -> None:
        """Let it go on."""
        os.kill(self._pid, signal.SIGCONT)

    def client(self, deadline: float = 10.0, token: str | None = None, port: int = 0) -> Any:
        """A client of its own, of the store or of a relay before it."""
        from fsdp_demo.store.client import StoreClient

        return StoreClient(
            f"127.0.0.1:{port or self.port}", self._token if token is None else token, deadline
        )
