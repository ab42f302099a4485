"""What lies in the folders of one replica, and what of it the replica can go on from."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from ..comm.ranks import Ranks
from ..comm.topology import Topology
from ..errors import see
from . import folders
from .choice import Held, look
from .folders import NEWER, misfits

log = logging.getLogger("fsdp_demo")


class Shelf:
    """Finds checkpoints.

    Args:
        root: folder of the replica.
        topology: of this rank.
        ranks: words between the ranks of the replica.
    """

    def __init__(self, root: Path, topology: Topology, ranks: Ranks):
        self.root, self.topology, self.ranks = root, topology, ranks

    def path(self, step: int) -> Path:
        """The folder of a complete checkpoint."""
        return self.root / f"checkpoint-{step}"

    def complete(self) -> list[int]:
        """The steps of the checkpoints whose manifest is there and fits the sizes of the files."""
        return [s for s in folders.steps(self.root) if not misfits(self.path(s))]

    def verify(self, folder: Path) -> None:
        """Compare all checksums of a checkpoint, this replica's or another's, each rank its share.
        All ranks of the replica come together.

        Raises:
            ValueError: on every rank, if a file is damaged.
        """
        rank, world = self.topology.rank, self.topology.world
        bad = self.ranks.together(lambda: folders.damaged(folder, rank, world), str(folder))
        if self.ranks.any(bool(bad)):
            what = (
                f"{', '.join(bad)}: checksum does not fit"
                if bad
                else "another rank found a file whose checksum does not fit"
            )
            raise ValueError(
                f"{folder} is damaged ({what}): remove this folder on one island, and all "
                "resume from the common step before it"
                f"{see('damaged-checkpoint')}"
            )

    def adopt(self) -> None:
        """A save that was cut off between its manifest and its name is whole: give it the name.
        Other leavings of a killed process go. What a start that came to nothing has put aside is
        there again."""
        for sign in ("part", "old"):
            for half in self.root.glob(f".checkpoint-*.{sign}") if self.root.is_dir() else ():
                whole = self.root / half.name[1 : -len(sign) - 1]
                if not misfits(half) and not whole.exists():
                    os.replace(half, whole)
                else:
                    shutil.rmtree(half, ignore_errors=True)
        folders.take_back(self.root)

    def has(self, step: int) -> bool:
        """Whether this replica has a complete checkpoint of `step` (all ranks come together)."""
        return not self.ranks.any(step not in self.complete())

    def held(self) -> list[Held]:
        """What the replica can resume from, the same list on all its ranks."""
        notes = self.ranks.from_first(lambda: [h.note() for h in self._readable()])
        return [Held(*note) for note in notes]

    def _readable(self) -> list[Held]:
        """The complete checkpoints; those that are not are named in the log, and those of a newer
        release refused.
        """
        out = []
        for step in folders.steps(self.root):
            why = misfits(self.path(step))
            if why.startswith(NEWER):
                raise ValueError(
                    f"{self.path(step)}: {why}: install that release, or move this folder away"
                )
            try:
                if why:
                    raise ValueError(f"{self.path(step)} is not complete: {why}")
                out.append(Held(step, *look(self.path(step) / "exchange", self.topology.islands)))
            except ValueError as error:
                log.warning("%s; it is left out", error)
        return out

    def regular(self, step: int) -> Held:
        """A complete checkpoint, with what its heads say if they can be read."""
        try:
            return Held(step, *look(self.path(step) / "exchange", self.topology.islands))
        except ValueError:
            return Held(step)
