"""The parts of an exchange's state on disk, by their heads: who saved what, and how one part is
read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..exchange.saved_state import ExchangeState
from ..version import __version__
from .files import FRESH, OTHER, read_head, read_part


@dataclass(frozen=True)
class PartSet:
    """Parts of an exchange's state on disk: of one replica or of several; only the heads have been
    read.

    Attributes:
        folders: where they lie.
        heads: of all parts, ordered by island and rank.
    """

    folders: tuple[Path, ...]
    heads: list[dict[str, Any]]
    paths: dict[tuple[int, int], Path] = field(repr=False)

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return int(self.heads[0]["step"])

    @property
    def applied(self) -> dict[str, int]:
        """For each channel the step of the last message that was applied; empty where that was not
        saved.
        """
        return dict(self.heads[0].get("applied", {}))

    @property
    def islands(self) -> list[int]:
        """The replicas of which parts are here."""
        return sorted({h["island"] for h in self.heads})

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(island, rank) of the parts that replicas found here also wrote, or should have."""
        sizes = {h["island"]: h["world"] for h in self.heads}
        return [
            (i, r) for i, world in sizes.items() for r in range(world) if (i, r) not in self.paths
        ]

    @property
    def complete(self) -> bool:
        """Whether every replica found here is here with all its ranks."""
        return not self.missing

    def head(self, rank: int, island: int | None = None) -> dict[str, Any]:
        """The head of one part; `island` may be left out where only one is here.

        Raises:
            ValueError: that part is not here.
        """
        island = self._island(island)
        for h in self.heads:
            if (h["island"], h["rank"]) == (island, rank):
                return h
        have = [h["rank"] for h in self.heads if h["island"] == island]
        raise ValueError(
            f"{self.where()} lacks the part of island {island}, rank {rank} (has ranks {have}): it "
            "was saved by fewer ranks, or a file is "
            f"lost; {OTHER}, {FRESH}"
        )

    def of_island(self, island: int) -> list[dict[str, Any]]:
        """The heads of all ranks of an island.

        Raises:
            ValueError: one is not here.
        """
        world = next(int(h["world"]) for h in self.heads if h["island"] == island)
        return [self.head(rank, island) for rank in range(world)]

    def state(self, rank: int, island: int | None = None) -> dict[str, Any]:
        """The `Exchange.state_dict()` that one rank saved, with its tensors (CPU).

        Raises:
            ValueError: the part is missing, cut or damaged.
        """
        head = self.head(rank, island)
        path = self.paths[head["island"], rank]
        state: dict[str, Any] = read_part(path)[1]
        return state

    def outline(self, rank: int, island: int | None = None) -> ExchangeState:
        """What one rank saved, with the key of each tensor, {"tensor": KEY}, in its place: only the
        json is read.

        Raises:
            ValueError: the part is missing or torn, or holds what this release does not know.
        """
        head = self.head(rank, island)
        path = self.paths[head["island"], rank]
        try:
            return ExchangeState.from_tree(read_head(path)[1])
        except (KeyError, TypeError) as error:  # the checksum fits: it was written so
            raise ValueError(
                f"{path} holds what this fsdp_demo, {__version__}, does not know ({error!r:.80}): "
                f"it was written by {head.get('package')}; "
                f"install that one, {FRESH}"
            ) from None

    def _island(self, island: int | None) -> int:
        if island is None and len(self.islands) > 1:
            raise ValueError(
                f"{self.where()} holds parts of islands {self.islands}: say of which one"
            )
        return self.islands[0] if island is None else island

    def where(self) -> str:
        """Where they lie, for errors."""
        return ", ".join(str(f) for f in self.folders)
