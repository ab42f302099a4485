"""One life at a time writes into a folder: a lock that the newest one replaces.

A process that was stopped, suspended or cut off may wake when its successor has begun. It looks at
the lock before it gives anything its name, finds another token there, and writes nothing more.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from ..comm.ranks import Ranks
from ..errors import Superseded, see
from .files import in_one_piece

log = logging.getLogger("fsdp_demo")

LOCK = ".life.json"


class Fence:
    """The lock of one replica.

    Args:
        roots: folders of this replica; the first must be writable when a life begins, others (a
            second one for emergencies) need not.
        run: run id, for people who look into the file.

    Attributes:
        token: of this life; empty before `begin`, which the ranks of a replica call with one token.
    """

    def __init__(self, roots: Sequence[Path], run: str):
        self.roots, self.run, self.token = list(roots), run, ""

    def take(self, ranks: Ranks) -> None:
        """From now on this life owns the folders. All ranks of the replica come together; the first
        one writes the lock.
        """
        token = ranks.from_first(lambda: secrets.token_hex(6))
        ranks.together(lambda: self.begin(token, writes=ranks.rank == 0), str(self.roots[0]))

    def begin(self, token: str, writes: bool = True) -> None:
        """From now on this life owns the folders. `writes`: this rank writes the lock, for all of
        its replica.
        """
        self.token = token
        if not writes:
            return
        text = json.dumps(
            {"run": self.run, "token": token, "host": socket.gethostname(), "pid": os.getpid()}
        )
        for i, root in enumerate(self.roots):
            try:
                root.mkdir(parents=True, exist_ok=True)
                in_one_piece(root / LOCK, lambda part: part.write_text(text, encoding="utf-8"))
            except OSError as error:
                if i == 0:
                    raise
                log.warning("%s cannot be written: %s", root, error)

    def check(self) -> None:
        """Call it before anything in the folders gets its name. A lock that is gone or cannot be
        read hinders nobody.

        Raises:
            Superseded: the lock is another life's.
        """
        for root in self.roots if self.token else ():
            try:
                lock = json.loads((root / LOCK).read_text(encoding="utf-8"))
                token, run = lock["token"], lock["run"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
            if token != self.token:
                log.error(
                    "%s belongs to a later life of this run (%s): nothing is written here by run "
                    "%s any more",
                    root,
                    run,
                    self.run,
                )
                raise Superseded(
                    f"{root} belongs to a later life (run {run!r}) than this process (run "
                    f"{self.run!r}), which was taken for dead: nothing "
                    f"is saved; end it{see('later-life')}"
                )
