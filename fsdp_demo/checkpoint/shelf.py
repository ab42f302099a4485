"""What lies in the folders of one replica, and what of it the replica can go on from."""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from pathlib import Path

from ..comm.ranks import Ranks
from ..comm.topology import Topology
from ..errors import see
from . import folders
from .choice import NOWHERE, Held, Place, look
from .files import read_head
from .folders import NEWER, misfits

log = logging.getLogger("fsdp_demo")


class Shelf:
    """Finds checkpoints, and what ranks have left on their way out.

    Args:
        root: folder of the replica.
        topology: of this rank.
        ranks: words between the ranks of the replica.
        second: another folder for what ranks leave, where the first cannot be written; several runs
            and islands may share it.
    """

    def __init__(self, root: Path, topology: Topology, ranks: Ranks, second: Path | None = None):
        self.root, self.topology, self.ranks = root, topology, ranks
        self.roots = [root, *([self._beside(second)] if second is not None else [])]
        self.chosen: Held | None = None

    def _beside(self, second: Path) -> Path:
        """This replica's own place in a folder that runs share: what another run left there must
        not count as held.
        """
        whole = os.path.abspath(self.root)
        return (
            second
            / f"{self.root.parent.name or 'run'}-{zlib.crc32(whole.encode()):08x}"
            / self.root.name
        )

    def path(self, step: int) -> Path:
        """The folder of a complete checkpoint."""
        return self.root / f"checkpoint-{step}"

    def emergency(self, step: int) -> Path:
        """The folder of what this rank saved alone at `step`: where its part is whole, else the
        first place for it (`save_alone`).
        """
        places = [root / f"emergency-{step}" for root in self.roots]
        return next((p for p in places if _left(p, self.topology) is not None), places[0])

    def complete(self) -> list[int]:
        """The steps of the checkpoints whose manifest is there and fits the sizes of the files."""
        return [s for s in folders.steps(self.root, "checkpoint") if not misfits(self.path(s))]

    def crash_saves(self) -> list[int]:
        """The steps at which this rank has left a whole part of its own."""
        found = {
            s: self.emergency(s) for root in self.roots for s in folders.steps(root, "emergency")
        }
        return sorted(s for s, place in found.items() if _left(place, self.topology) is not None)

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
        for root in self.roots:
            folders.take_back(root)

    def has(self, step: int) -> str:
        """What this replica has of `step`: "checkpoint", "emergency" or "" (all ranks come
        together).
        """
        chosen = self.chosen
        if chosen is not None and chosen.step == step and chosen.kind == "emergency":
            return "" if self.ranks.any(step not in self.crash_saves()) else "emergency"
        if not self.ranks.any(step not in self.complete()):
            return "checkpoint"
        return "" if self.ranks.any(step not in self.crash_saves()) else "emergency"

    def held(self) -> list[Held]:
        """What all ranks of the replica can resume from, the same list on all."""
        regular, left = self.ranks.from_first(
            lambda: ([h.note() for h in self._readable()], self.crash_saves())
        )
        out = [Held(*h) for h in regular]
        for step in left:  # of rank 0: all must have left theirs, between the same exchanges
            mine = _left(self.emergency(step), self.topology)
            missing, applied = self.ranks.any(mine is None), mine[0] if mine is not None else ""
            if self.ranks.same(zlib.crc32(applied.encode())) and not missing and mine is not None:
                out.append(Held(step, "emergency", *mine))
        return sorted(out)

    def _readable(self) -> list[Held]:
        """The complete checkpoints; those that are not are named in the log, and those of a newer
        release refused.
        """
        out = []
        for step in folders.steps(self.root, "checkpoint"):
            why = misfits(self.path(step))
            if why.startswith(NEWER):
                raise ValueError(
                    f"{self.path(step)}: {why}: install that release, or move this folder away"
                )
            try:
                if why:
                    raise ValueError(f"{self.path(step)} is not complete: {why}")
                out.append(
                    Held(
                        step,
                        "checkpoint",
                        *look(self.path(step) / "exchange", self.topology.islands),
                    )
                )
            except ValueError as error:
                log.warning("%s; it is left out", error)
        return out

    def regular(self, step: int) -> Held:
        """A complete checkpoint, with what its heads say if they can be read."""
        try:
            return Held(
                step, "checkpoint", *look(self.path(step) / "exchange", self.topology.islands)
            )
        except ValueError:
            return Held(step)


def _left(folder: Path, topology: Topology) -> Place | None:
    """What the part says that this rank left on its way out; None where there is none, it is torn,
    or it is of an island of another number of ranks: others load regular checkpoints.
    """
    try:
        head = read_head(folder / f"rank{topology.rank}.json")[0]
        if int(head.get("world", topology.world)) != topology.world:
            return None
        if not head.get("exchange") and not (folder / "exchange").is_dir():
            return NOWHERE
        return look(folder / "exchange", topology.islands, [topology.rank])
    except (OSError, ValueError):
        return None
