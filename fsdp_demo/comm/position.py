"""Where a rank stands inside its island."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import counted


@dataclass(frozen=True)
class ShardPosition:
    """A rank's place inside its island: shard of `num_shards`, copy of `num_copies`.

    Checkpoints, and what islands tell each other, name the two numbers "shards" and "copies".
    """

    num_shards: int = 1
    shard: int = 0
    num_copies: int = 1
    copy: int = 0

    @property
    def form(self) -> str:
        """How the island holds the model: `2 shards x 1 copy`."""
        return form(self.num_shards, self.num_copies)


def form(shards: int, copies: int) -> str:
    """`1 shard x 2 copies`."""
    return f"{counted(shards, 'shard')} x {counted(copies, 'copy', 'copies')}"
