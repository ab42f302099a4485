"""One life at a time writes into a folder: a lock that the newest one replaces.

A process that was stopped, suspended or cut off may wake when its successor has begun. It looks at
the lock before it gives anything its name, finds another token there, and writes nothing more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
from pathlib import Path

from ..errors import UNREADABLE, Superseded, see
from ..files import in_one_piece, read_json
from ..peers.votes import Ranks

log = logging.getLogger("fsdp_demo")

LOCK = ".life.json"


class Fence:
    """The lock of one replica.

    Args:
        root: folder of this replica.
        run: run id, for people who look into the file.
        name: of the replica; another one of the same run has mistaken this folder for its own.

    Attributes:
        token: of this life; empty before `begin`, which the ranks of a replica call with one token.
    """

    def __init__(self, root: Path, run: str, name: str = ""):
        self.root, self.run, self.name, self.token = root, run, name, ""

    def take(self, ranks: Ranks) -> None:
        """From now on this life owns the folder. All ranks of the replica come together; the first
        one writes the lock.
        """
        token = ranks.from_first(lambda: secrets.token_hex(6))
        ranks.together(lambda: self.begin(token, writes=ranks.rank == 0), str(self.root))

    def begin(self, token: str, writes: bool = True) -> None:
        """From now on this life owns the folder. `writes`: this rank writes the lock, for all of
        its replica.
        """
        self.token = token
        if not writes:
            return
        whose = {"run": self.run, "name": self.name, "token": token}
        text = json.dumps({**whose, "host": socket.gethostname(), "pid": os.getpid()})
        self.root.mkdir(parents=True, exist_ok=True)
        in_one_piece(self.root / LOCK, lambda part: part.write_text(text, encoding="utf-8"))

    def check(self) -> None:
        """Call it before anything in the folder gets its name. A lock that is gone or cannot be
        read hinders nobody.

        Raises:
            Superseded: the lock is another life's, or another replica's of this run.
        """
        if not self.token:
            return
        try:
            lock = read_json(self.root / LOCK)
            token, run, name = lock["token"], lock["run"], lock.get("name", "")
        except (OSError, *UNREADABLE):
            return
        if token != self.token:
            raise self._superseded(run, name)

    def _superseded(self, run: str, name: str) -> Superseded:
        """Another process owns the folder: a later start, or another replica of this one."""
        root = self.root
        if run == self.run and name and self.name and name != self.name:
            return Superseded(
                f"{root} is also the folder of {name!r}: {self.name!r} saves nothing there; give "
                f"each island a folder of its own{see('later-life')}"
            )
        log.error(
            "%s belongs to a later life of this run (%s): nothing is written here by run %s any "
            "more",
            root,
            run,
            self.run,
        )
        return Superseded(
            f"{root} belongs to a later life (run {run!r}) than this process (run {self.run!r}), "
            f"which was taken for dead: nothing is saved; end it{see('later-life')}"
        )


def place(root: Path) -> str:
    """A folder as the processes of one machine know it, be it there or not, under whatever path:
    equal texts are the same folder. Those of different machines differ.
    """
    whole = Path(os.path.realpath(root))
    there = next(p for p in (whole, *whole.parents) if p.exists())
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        machine = socket.gethostname()
    of = there.stat()
    # containers may share a machine and have other disks under one path
    text = f"{machine} {of.st_dev} {of.st_ino} {whole.relative_to(there)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
