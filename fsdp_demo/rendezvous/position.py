"""Where a rank stands inside its island."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..errors import counted
from ..status import end_by_errors
from ..store.client import Store, StoreClient, WorldStore, connect


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


# Which replica of which run a rank belongs to, and how its store is reached: the data of a
# `Topology`, for the modules that it is made of.

ANSWER = 15.0
"""Seconds that a question to the store may take once the islands have met. A store that is started
again on its file answers well within them."""


@dataclass
class Replica:
    """Where a rank stands: see `topology.Topology`, which says how its peer group is reached."""

    kind: str = "single"
    island: int = 0
    islands: int = 1
    name: str = "island0"
    run: str = "run"
    endpoint: str = ""
    address: str = ""
    timeout: float = 600.0
    rank: int = 0
    world: int = 1
    group: Any = None
    store: Any = None
    meets_at: str = ""
    stop_timeout: float = 25.0  # torch's launcher kills its ranks after 30
    dead: float = 10.0
    stall: float = 0.0
    least: int = 1
    count: int = 0
    suffice: int = 0
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.count = self.count or self.islands
        if self.islands > 1:
            end_by_errors()

    @property
    def elastic(self) -> bool:
        """Whether islands may come and go."""
        return self.kind == "islands"

    @property
    def one_world(self) -> bool:
        """Whether all replicas are of one torch.distributed world (a mesh): they are started, saved
        and stopped together, in one folder, from one data loader. Nobody comes or goes.
        """
        return self.kind == "mesh"

    @property
    def question(self) -> float:
        """Seconds that one question to the store may take."""
        return min(self.timeout, ANSWER)

    def open_store(self, limit: float | None = None) -> Store:
        """A connection of its own to the store at ISLAND_ENDPOINT; in a mesh that of the world, or
        the one that was given. Each question has a deadline.

        Args:
            limit: seconds until it must stand; default `timeout`; 0: the first question makes it.

        Raises:
            StoreSilent: nobody answers there by then.
        """
        if self.one_world:
            store = self.store or dist.distributed_c10d._get_default_store()
            return WorldStore(store, "the world's rendezvous", self.question)
        if limit == 0:
            return StoreClient(self.endpoint, self.token, self.question)
        limit = self.timeout if limit is None else limit
        return connect(self.endpoint, limit, self.question, self.token)
