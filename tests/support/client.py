"""The test process's side of the rank server (`server.py`): starts it, asks it, and ends it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .ranks import Call, Outcome
from .server import PIPE

IMPORTS = 240.0  # seconds that the server may take besides: it imports the modules of the tests
# Plugins that a server does not need, some of which have threads; -s: its ranks have files of their
# own.
OPTIONS = (
    "-s -p no:xdist -p no:cacheprovider -p no:hypothesispytest -p tests.support.server".split()
)


class RankServer:
    """A rank server, started at the first question, and again after one that was broken off."""

    def __init__(self, root: Path, log: Path):
        self.root, self.log = root, log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def run(self, call: Call) -> list[Outcome]:
        """The ranks' outcomes, without values and logs."""
        return self.ask("call", call, call.timeout + call.grace + IMPORTS)

    def ask(self, word: str, what: Any, timeout: float = IMPORTS) -> Any:
        """The server's answer. Raises RuntimeError with its error, also if it died."""
        pipe = self._pipe or self._start()
        try:
            pipe.send_bytes(pickle.dumps((word, what)))
            if not pipe.poll(timeout):
                raise RuntimeError(f"the rank server did not answer within {timeout:.0f} s")
            good, answer = pipe.recv()
        except (EOFError, ConnectionError) as error:
            self.end()
            raise RuntimeError(f"the rank server died:\n{self._said()}") from error
        except BaseException:
            # also a time limit of pytest and Ctrl+C: what comes later would be the answer to
            # another question
            self.end()
            raise
        if not good:
            self.end()
            raise RuntimeError(f"the rank server: {answer}")
        return answer

    def end(self) -> None:
        """Kill it with all its ranks."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ISLAND_", "PYTEST_"))}
        # pyarrow starts a thread at its import
        env |= {PIPE: str(theirs.fileno()), "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *OPTIONS],
                env=env, cwd=self.root, pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        theirs.close()
        self._pipe = Connection(ours.detach())
        return self._pipe

    def _said(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
