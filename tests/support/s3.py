"""A real S3 server on loopback (moto), in a process of its own, behind a relay that answers slowly,
with errors, or not at all.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from .relay import Relay

MISSING = "needs s3fs and moto, which tests/oldest.sh installs (row s3)"
_SAYS = (
    b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
)
ERROR = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_SAYS), _SAYS)
)


class S3:
    """The server, and the relay that clients reach it by.

    Attributes:
        url: of a folder in a bucket of its own.
        env: variables for clients.
    """

    def __init__(self) -> None:
        for name in ("s3fs", "moto.server"):
            pytest.importorskip(name, reason=MISSING)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert self._server.poll() is None, "moto did not start"
                time.sleep(0.1)
        self.relay = Relay(port)
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.relay.port}",
            **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "none"),
            **{"AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"},
            "NO_PROXY": "127.0.0.1",
        }
        self.url = f"s3://bucket/run-{uuid.uuid4().hex[:6]}"
        self.python("import s3fs; s3fs.S3FileSystem().mkdir('bucket')")

    def python(self, script: str, **more: str) -> str:
        """What a script, with these variables, has printed."""
        done = subprocess.run(
            [sys.executable, "-c", script],
            **{"env": {**os.environ, **self.env, **more}, "cwd": Path(__file__).parents[2]},
            **{"capture_output": True, "text": True, "check": True},
        )
        return done.stdout

    def fail(self, share: float = 1.0) -> None:
        """Let this share of the answers be a 500, whatever the server has done."""
        drawn = random.Random(0)

        def change(data: bytes, forth: bool) -> bytes:
            told = not forth and data.startswith(b"HTTP/1.1 2")
            return ERROR if told and drawn.random() < share else data

        self.relay.change = change

    def well(self) -> None:
        """Pass on everything, at once."""
        self.relay.change, self.relay.wait = (lambda data, forth: data), 0.0
        self.relay.let_go()

    def close(self) -> None:
        """End both."""
        self.relay.close()
        self._server.kill()
        self._server.wait()
