"""What islands tell each other through the store while they are examined: the one place that all of
them reach.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from ..comm import attempts
from ..comm.store_client import Store
from ..comm.topology import Topology
from ..errors import PeerLost, counted, see

LOOK = 0.05  # seconds between two looks


def guest(topology: Topology) -> Topology:
    """The same island in a run of its own, `RUN.doctor`, so that the run that is to come, or that
    trains, is left alone.

    Raises:
        ValueError: the island would come later than the others.
    """
    if topology.kind == "islands" and topology.island >= topology.count:
        raise ValueError(
            f"ISLAND_RANK={topology.island} with ISLAND_COUNT={topology.count}: doctor examines "
            "the islands that begin a run; raise ISLAND_COUNT to examine more"
        )
    run = f"{topology.run}.doctor"
    return replace(topology, run=run, islands=topology.count, suffice=0, _rendezvous=None)


class Council:
    """The islands of one examination.

    Args:
        topology: of `guest`.

    Attributes:
        store: below the keys of this examination. secret: what only its islands know, where the
            store is not open.

    Raises:
        PeerLost: no store. ValueError: a process that lives plays the same island.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self.store: Store = topology.open_store()
        self.store.deadline = topology.question
        self.store = self.store.under(attempts.join(topology, self.store).prefix)
        self.prefix = self.store.prefix.rstrip("/")

    def share(self, name: str, mine: dict[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """What every island says under a name, by island, in their order.

        Raises:
            PeerLost: one has not said it within so many seconds. ValueError: what it says cannot be
                read.
        """
        t = self._topology
        self.store.set(f"{name}/{t.island}", json.dumps(mine))
        found, end = {t.island: mine}, time.monotonic() + seconds
        while missing := [i for i in range(t.count) if i not in found]:
            for i in missing:
                if self.store.get(f"{name}/{i}"):
                    found[i] = self.store.note(f"{name}/{i}", f"island {i}", {})
            if len(found) < t.count and time.monotonic() > end:
                gone = ", ".join(str(i) for i in range(t.count) if i not in found)
                raise PeerLost(
                    f"waited {seconds:g} s for {counted(t.count, 'island')} at {t.endpoint}, run "
                    f"{t.run!r}, at {name!r}: missing {gone}. Start fsdp-demo doctor on all "
                    "islands with the same ISLAND_ENDPOINT, ISLAND_RUN and ISLAND_COUNT"
                    f"{see('missing-islands')}"
                )
            time.sleep(LOOK)
        return dict(sorted(found.items()))

    def leave(self) -> None:
        """The examination is over: the next one under this name is another."""
        self.store.compare_set("ended", "", str(self._topology.island))
