"""Small notes that the islands leave each other in the store: who holds which checkpoints. No data of the training."""

from __future__ import annotations

import json
import time
from typing import Any

from .topology import Topology
from .transport import PeerLost

_made = 0  # how many this process has made: each has keys of its own


class Board:
    """The notes of one rank per island. Islands meet at ISLAND_ENDPOINT, the replicas of a mesh in the store of their world."""

    def __init__(self, topology: Topology):
        global _made
        _made += 1
        self.topology, self._number = topology, _made
        self._store: Any = None

    def meet(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """Leave a note and wait for those of all islands; in order of the islands.

        Raises:
            ValueError: the run id was used before.
            PeerLost: no store, or islands that did not come in time.
        """
        t = self.topology
        if t.islands == 1:
            return [note]
        store = self._connect()
        if store.add(f"start/{t.island}", 1) > 1:
            raise ValueError(
                f"ISLAND_RUN={t.run!r} was already started by an island with ISLAND_RANK={t.island}: set a new ISLAND_RUN on all islands "
                "(a run id is used once), and a different ISLAND_RANK on each"
            )
        store.set(f"note/{t.island}", json.dumps(note))
        deadline, keys = time.monotonic() + t.timeout, [f"note/{i}" for i in range(t.islands)]
        while missing := [i for i, key in enumerate(keys) if not store.check([key])]:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"waited {t.timeout:g} s for islands {missing} to say which checkpoints they hold: check that they run, and their "
                    "ISLAND_ENDPOINT, ISLAND_RUN and ISLAND_COUNT"
                )
            time.sleep(0.02)
        return [json.loads(store.get(key)) for key in keys]

    def publish(self, steps: list[int]) -> None:
        """Say which steps this island holds."""
        if self.topology.islands > 1:
            self._connect().set(f"held/{self.topology.island}", json.dumps(steps))

    def others(self) -> list[list[int]]:
        """What the other islands have published; nothing yet counts as nothing held."""
        if self.topology.islands == 1:
            return []
        store, keys = self._connect(), [f"held/{i}" for i in range(self.topology.islands) if i != self.topology.island]
        return [json.loads(store.get(key)) if store.check([key]) else [] for key in keys]

    def close(self) -> None:
        """Drop the connection."""
        self._store = None

    def _connect(self) -> Any:
        if self._store is None:
            t = self.topology
            self._store = t.open_store().under(f"{t.prefix()}/checkpoints{self._number}")
        return self._store

