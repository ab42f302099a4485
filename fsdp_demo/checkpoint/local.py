"""The checkpoints in one local folder of a replica, over all its disks: what is whole there, and
how a save there is sealed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import Superseded
from ..peers.votes import Ranks
from ..rendezvous.topology import Topology
from . import folders
from .choice import look
from .files import OTHER
from .folders import MANIFEST, NEWER, Fence, misfits

log = logging.getLogger("fsdp_demo")


class LocalFolder:
    """The folder `root`. All ranks of the replica make it together.

    Attributes:
        disk: the ranks that see the same files under `root` as this one, itself included.
        share: the number of this rank among them, and how many they are.
        fence: the lock of this life.
    """

    def __init__(self, root: Path, topology: Topology, ranks: Ranks):
        self.root, self.topology, self.ranks = root, topology, ranks
        self.fence = Fence(root, topology.run, topology.name)
        self.disk = folders.sharers(root, ranks)
        self.share = self.disk.index(ranks.rank), len(self.disk)

    def once_per_disk(self, work: Callable[[], Any], ranks: Ranks | None = None) -> None:
        """Let the first rank on each disk do something; `ranks`: all these come together."""
        (ranks or self.ranks).together(lambda: self.share[0] or work(), str(self.root))

    def whole(self) -> dict[int, Path]:
        """The checkpoints whose manifest fits the sizes of the files, by step, ascending."""
        return {step: path for step, path in folders.found(self.root) if not misfits(path)}

    def notes(
        self, name: str = "", generations: bool = False
    ) -> tuple[list[list[Any]], dict[int, str], str]:
        """Notes of what is whole on all disks (`HeldCheckpoint.note`), the generations by step if
        they are asked for, and why the newest that are not whole were left out. name: the folder of
        this name only. All ranks come together. Raises ValueError: of a newer release.
        """
        notes, damaged = self.ranks.from_first(lambda: self._notes(name))
        if not generations and len(self.disk) == self.ranks.world:
            return notes, {}, damaged

        def look() -> list[Any]:
            return [[step, folders.generation(folder)] for step, folder in self.whole().items()]

        there = self.ranks.everyone(self.ranks.together(look, str(self.root)))
        if len(self.disk) < self.ranks.world:  # nodes with a disk each
            common = [pair for pair in there[0] if all(pair in pairs for pairs in there)]
            lacking = [n[0] for n in notes if not any(n[0] == step for step, _ in common)]
            if lacking:
                damaged += f"{self.root}: steps {lacking} are not whole on the disk of a node"
                notes = [note for note in notes if note[0] not in lacking]
        return notes, dict(there[0]), damaged

    def _notes(self, name: str) -> tuple[list[list[Any]], str]:
        out: dict[int, list[Any]] = {}
        bad, found = [], folders.found(self.root)
        for step, folder in [*found, *folders.unsealed(self.root, found)]:
            if name and folder.name != name:
                continue
            why = misfits(folder)
            if why.startswith(NEWER):
                raise ValueError(f"{folder}: {why}: install that release, or move this folder away")
            try:
                if why:
                    raise ValueError(f"{folder} is not complete: {why}")
                out[step] = look(folder / "exchange", step, self.topology.islands).note()
            except ValueError as error:
                log.warning("%s; it is left out", error)
                bad.append(str(error).partition(OTHER)[0].rstrip(":; ")[:300])
        return [*out.values()], "; ".join(bad[-2:])

    def seal(self, step: int, folder: Path, generation: str) -> None:
        """Write the manifest of this rank's disk: from then on the checkpoint is there."""
        self.fence.check()
        folders.seal(folder, step, len(self.disk), generation)
        try:
            self.fence.check()
        except Superseded:
            (folder / MANIFEST).unlink(missing_ok=True)
            raise
