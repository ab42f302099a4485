"""Small notes that the islands leave each other in the store: who holds which checkpoints. No data
of the training.

Every question to the store has a deadline. While training waits for the answer it is short.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ..errors import NeedsDecision, StoreSilent, see
from ..peers.votes import Ranks
from ..rendezvous import starting
from ..rendezvous.topology import Topology
from ..store.client import Store
from .choice import HeldCheckpoint, alike, choose

PATIENCE = 3.0
"""Seconds that a question may take while training waits for it."""

ABSENT = 0.3
"""Seconds of them while nobody listens at the store's address: it is being started again, and the
next save asks it.
"""

QUIET = 30.0
"""Seconds without a question of a save after one that was not answered."""

_made = 0  # how many this process has made: each has keys of its own


class CheckpointRegistry:
    """The notes of the islands: what to go on from (`choose`), and what all hold by now (`common`).

    Islands meet at ISLAND_ENDPOINT, the replicas of a mesh in the store of their world.

    Args:
        ranks: of this replica. They call `choose`, `meet` and `tell` together; the first one speaks
            to the store.
    """

    def __init__(self, topology: Topology, ranks: Ranks):
        global _made
        _made += 1
        self.topology, self.ranks, self._number, self._meetings = topology, ranks, _made, 0
        self._store: Store | None = None  # below the keys of the attempt
        self._quiet_until = 0.0

    def choose(
        self, mine: Sequence[HeldCheckpoint], how: str, about: dict[str, str], **same: Any
    ) -> list[HeldCheckpoint | None] | None:
        """Tell the islands what this one holds, and hear from which state each goes on
        (`choice.choose`), in the order of `Topology.starters`. All that begin come together.

        Args:
            about: "place", the folder of this island (`folders.place`), and "remote", that in a
                store of objects, which must be no other's; "damaged", as `CheckpointManager`'s.
            same: what must be told alike on all islands, by name.

        Raises:
            NeedsDecision: a person must choose, islands differ in `same`, two have one folder, or
                all that is there is damaged.
            ValueError, PeerLost: see `meet`.
        """
        notes = self.meet({"held": [h.note() for h in mine], **about, **same})
        _refuse_one_folder(notes)
        for key in same:
            if len({str(n.get(key)) for n in notes}) > 1:
                both = ", ".join(f"{n.get('name')}: {n.get(key)}" for n in notes)
                raise NeedsDecision(f"islands differ in {key} ({both}): give the same on all")
        try:
            names = [str(n["name"]) for n in notes]
            held = [[HeldCheckpoint(*h) for h in n["held"]] for n in notes]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"an island has left a note of another form ({error!r:.80}): use one release "
                "everywhere"
            ) from None
        chosen = choose(names, held, how, self.topology.starters)
        if chosen is None:
            refuse_damaged(notes)
        return chosen

    def common(self, mine: Sequence[HeldCheckpoint], **where: str) -> int | None:
        """The newest step that all islands are known to hold between the same exchanges, for
        rotation, by `exchange`, which `where` is for. Raises ValueError, TypeError for a note of
        another form, too.
        """
        said = self.exchange([h.note() for h in mine], **where)
        held = [[HeldCheckpoint(*h) for h in each or ()] for each in said]
        return max((states[0].step for states in alike(held)), default=None)

    def meet(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """Leave a note and wait for those of all islands that begin, in order of the islands. Each
        has the island's name.

        Raises:
            ValueError: the run id was used before, or an island has another number of islands.
            PeerLost: no store, one that does not answer, islands that did not come in time, or the
                attempt has ended.
        """
        note = {"name": self.topology.name, **note}
        if self.topology.islands == 1:
            return [note]
        return list(self.ranks.from_first(lambda: self._meet(note)))

    def tell(self, note: dict[str, Any] | None) -> dict[str, Any]:
        """Where some islands take over: the note of the first one that does not and so gives one
        (small JSON: `taking_over.small`), with its name. See `meet`.
        """
        for said in self.meet({"note": note}):
            if isinstance(said.get("note"), dict):
                return {**said["note"], "name": str(said.get("name"))}
        return {"name": "the other islands"}

    def _meet(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        t = self.topology
        attempt, self._meetings = self._attempt(t.timeout), self._meetings + 1
        meeting, me = f"checkpoints{self._number}/meeting{self._meetings}", secrets.token_hex(8)
        store = attempt.under(meeting)
        if store.compare_set(f"start/{t.island}", "", me) != me:
            raise ValueError(
                f"ISLAND_RUN={t.run!r} was already started by an island with "
                f"ISLAND_RANK={t.island}: set a different ISLAND_RANK on each "
                f"island, or a new ISLAND_RUN on all{see('rank-taken')}"
            )
        store.set(f"note/{t.island}", json.dumps(note))
        notes = starting.gather(attempt, t, t.starters, f"{meeting}/note", dict[str, Any])
        return list(notes.values())

    def exchange(self, held: Any, where: str = "held") -> list[Any]:
        """Say what this island holds, and hear what the others have said last; nothing yet is None.
        In order of the islands, without those that have not begun with the others and have said
        nothing. Islands need not come together. where: "held" here, "remote" in a store of objects.

        Raises:
            StoreSilent: no answer within `PATIENCE` seconds, or `QUIET` seconds before.
        """
        t = self.topology
        if t.islands == 1:
            return [held]
        if (left := self._quiet_until - time.monotonic()) > 0:
            raise StoreSilent(f"the store did not answer before: it is asked again in {left:.0f} s")
        try:
            store = self._attempt(PATIENCE, ABSENT).under(f"checkpoints{self._number}")
            store.set(f"{where}/{t.island}", json.dumps(held))
            said = {
                i: store.note(key, f"island {i}", Any)
                for i in range(t.islands)
                if store.get(key := f"{where}/{i}")
            }
        except StoreSilent:
            # when it answers again it may be another one
            self._store, self._quiet_until = None, time.monotonic() + QUIET
            raise
        return [said.get(i) for i in range(t.islands) if i in said or i in t.starters]

    def close(self) -> None:
        """Drop the connection to the store."""
        self._store = None

    def _attempt(self, seconds: float, absent: float = math.inf) -> Store:
        """The store below the keys of the attempt, with the deadline of these questions."""
        if self._store is None:
            store = self.topology.open_store(seconds if absent == math.inf else 0.0)
            self._store = store.under(self.topology.prefix())
        store = self._store.within(seconds)
        store.absent = absent
        return store


def refuse_damaged(notes: Sequence[dict[str, Any]]) -> None:
    """Raise NeedsDecision for damaged checkpoints alone: a new run would write over them."""
    if bad := [f"{n.get('name')}: {n['damaged']}" for n in notes if n.get("damaged")]:
        raise NeedsDecision(
            f"no island holds a whole checkpoint, and there are damaged ones: {'; '.join(bad)}. "
            "Copy what is damaged from another place, or move these folders away to begin at step "
            f"0{see('damaged-checkpoint')}"
        )


def _refuse_one_folder(notes: Sequence[dict[str, Any]]) -> None:
    """Raise NeedsDecision where two islands of one machine, or in one store, have one folder."""
    places = [n[kind] for n in notes for kind in ("place", "remote") if n.get(kind)]
    if names := [
        str(n.get("name"))
        for n in notes
        if places.count(n.get("place")) > 1 or places.count(n.get("remote")) > 1
    ]:
        raise NeedsDecision(
            f"islands {', '.join(names)} have one folder for their checkpoints: give each "
            f"island a folder of its own, such as Path(folder) / topology.name{see('later-life')}"
        )
