"""One meeting of the islands at their store: every rank finds the ranks with the same part of the
model on the other islands, and connects to them.

The first rank of each island announces it. All wait for the islands that begin, compare what they
announced, and connect.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypedDict

from ..elastic.connect import Limits, PeerPosition, newcomer_peers, starting_peers
from ..elastic.peer_group import PeerGroup, PeerUser
from ..errors import StoreSilent, counted, see
from ..net.address import route_to, split_endpoint
from ..net.link import Link
from ..peers.zeromq import Meeting
from ..store.client import Store
from . import attempts, environment, starting
from .position import Replica, ShardPosition, form

log = logging.getLogger("fsdp_demo")

# how often this process joined a run: every attach gets keys of its own
_epochs: Counter[tuple[str, str]] = Counter()


def attached(topology: Replica) -> int:
    """How often this process has joined the run."""
    return _epochs[topology.endpoint, topology.run]


class Announcement(TypedDict):
    """What a rank says of itself when it comes to the meeting."""

    name: str
    host: str
    shards: int
    copies: int


class Rendezvous:
    """How one rank meets its peers: its island is announced, it waits for the others, and connects.

    Attributes:
        prefix: what its keys in the store begin with.
    """

    def __init__(self, topology: Replica, position: ShardPosition, link: Link | None):
        self._topology, self._position, self._link = topology, position, link
        self.prefix = ""
        self._attempt = ""  # what its keys begin with
        self._starters: tuple[int, ...] = ()
        self._late = False  # the others train already

    def join(self, user: PeerUser | None = None) -> tuple[PeerGroup | None, int]:
        """The peers of this rank, None for a copy that is not active, and the number of active
        copies. Raises ValueError, PeerLost: see `topology.Topology.join`.
        """
        try:
            return self._join(user)
        except StoreSilent as error:
            if "ISLAND_ENDPOINT=" in str(error):
                raise  # it says the cure
            raise StoreSilent(
                f"{error}: see whether the store still runs at {self._topology.endpoint} and is "
                "not stopped, and whether the network reaches it; "
                f"then start all islands again{see('store-silent')}"
            ) from None

    def _join(self, user: PeerUser | None) -> tuple[PeerGroup | None, int]:
        store = self._connect()
        infos = self._look(store) if self._late else self._meet(store)
        store.deadline = self._topology.question
        active_copies = min(info["copies"] for info in infos.values())
        if self._position.copy >= active_copies:
            return None, active_copies
        # of islands that have not come, the name that is likely
        names = [
            infos[i]["name"] if i in infos else f"island{i}" for i in range(self._topology.islands)
        ]
        return self._peers(store, active_copies, names, user), active_copies

    def _connect(self) -> Store:
        """Open the store, and settle which keys this meeting has."""
        topology = self._topology
        if topology.rank == 0:
            place = split_endpoint(topology.endpoint)
            environment.warn_of_open(place, topology.address, topology.token)
        store = topology.open_store()
        store.deadline = topology.timeout
        run = topology.endpoint, topology.run
        epoch = attached(topology)
        pulse = attempts.join(topology, store)
        self._attempt, self._starters = pulse.prefix, pulse.taken.starters
        if epoch and store.get(f"{self._attempt}/finished"):
            # by an exchange of this process, which now has another one
            store.set(f"{self._attempt}/finished", "")
        self._late = not epoch and pulse.taken.late
        if self._late and (begun := int(store.get(f"{self._attempt}/begun") or 0)):
            raise self._one_of(begun + 1)
        if epoch and topology.island not in self._starters:
            raise self._one_of(epoch + 1)
        self.prefix = f"{self._attempt}/{epoch}"
        _epochs[run] = epoch + 1
        return store

    def _one_of(self, exchanges: int) -> ValueError:
        """The error of an island that would join one of several exchanges of a run under way."""
        topology = self._topology
        return ValueError(
            f"{topology.name} cannot join run {topology.run!r}: its processes begin "
            f"{exchanges} exchanges, at once or in turn, and an island joins a run under way with "
            "one exchange only. Stop all islands, and start them again from their "
            f"checkpoints{see('several-exchanges')}"
        )

    # -- who is there -----------------------------------------------------------------------------

    def _meet(self, store: Store) -> dict[int, Announcement]:
        """Wait for the first rank of each starting island, compare layouts; the announcements."""
        self._announce(store)
        infos = self._gather(store)
        self._compare(infos)
        return infos

    def _look(self, store: Store) -> dict[int, Announcement]:
        """As `_meet`, where the run is under way: who has been announced, and this one."""
        topology, position, mine = self._topology, self._position, self._announcement()
        infos = {
            i: store.note(self._first(i), f"island {i}", Announcement)
            for i in range(topology.islands)
            if store.get(self._first(i))
        }
        self._compare({i: info for i, info in infos.items() if i != topology.island})
        active_copies = min(info["copies"] for info in infos.values())
        if position.num_copies < active_copies:
            raise ValueError(
                f"{topology.name} holds the model in "
                f"{counted(position.num_copies, 'copy', 'copies')}, "
                f"the run goes on in {active_copies}: start it with as many"
            )
        self._announce(store)
        # its own number does not change how many are active
        return {**infos, topology.island: {**mine, "copies": active_copies}}

    def _first(self, island: int) -> str:
        """The key under which the first rank of an island announces itself."""
        return f"{self.prefix}/join/{island}"

    def _announce(self, store: Store) -> None:
        """Tell the others of this island, on its first rank."""
        if (self._position.shard, self._position.copy) == (0, 0):
            store.set(self._first(self._topology.island), json.dumps(self._announcement()))

    def _announcement(self) -> Announcement:
        return {
            "name": self._topology.name,
            "host": socket.gethostname(),
            "shards": self._position.num_shards,
            "copies": self._position.num_copies,
        }

    def _gather(self, store: Store) -> dict[int, Announcement]:
        """The announcements of all islands that begin, as they come."""
        # each meeting has keys of its own: one that tries again alone meets nobody
        number = attached(self._topology)
        again = f". This is attach number {number} of this process" if number > 1 else ""
        at, name = store.under(self._attempt), f"{self.prefix.rpartition('/')[2]}/join"
        return starting.gather(at, self._topology, self._starters, name, Announcement, again)

    def _compare(self, infos: Mapping[int, Announcement]) -> None:
        """Raise ValueError where other islands do not fit this one."""
        topology, position = self._topology, self._position
        same = sorted(
            {i for i, other in infos.items() if other["name"] == topology.name} | {topology.island}
        )
        if len(same) > 1:
            raise ValueError(
                f"islands {same} all have ISLAND_NAME={topology.name!r} and would overwrite each "
                "other's files: give each its own"
            )
        for i, other in sorted(infos.items()):
            if other["shards"] != position.num_shards:
                raise ValueError(
                    f"island {i} ({other['name']}) holds the model in "
                    f"{form(other['shards'], other['copies'])}, {topology.name} in "
                    f"{position.form}: the number of shards must agree (copies may differ)"
                )

    # -- how they are reached ---------------------------------------------------------------------

    def _peers(
        self, store: Store, active_copies: int, names: Sequence[str], user: PeerUser | None
    ) -> PeerGroup:
        """Connect to the peers, which may come and go."""
        topology, position = self._topology, self._position
        pulse, attempt = attempts.join(topology), store.under(self._attempt)
        meeting = Meeting(
            store,
            self.prefix,
            topology.island,
            topology.islands,
            tuple(names),
            topology.address or route_to(topology.endpoint),
            topology.timeout,
            topology.token,
            among=self._starters,
            goes_on=partial(starting.goes_on, attempt, topology),
        )
        ranks = position.num_shards * active_copies
        rank = position.shard * active_copies + position.copy
        place = PeerPosition(
            topology.island, rank, ranks, dict(enumerate(names)), ranks, topology.rank
        )
        limits = Limits(topology.dead, topology.stall, topology.least)

        def own_store() -> Store:
            """A connection of its own, below the keys of this meeting."""
            return topology.open_store(topology.question).under(self.prefix)

        common = own_store, self._link, limits, user
        if self._late:
            met = newcomer_peers(meeting, place, pulse.taken.life, *common)
        else:
            met = starting_peers(meeting, place, *common)
            attempt.set("begun", self.prefix.rpartition("/")[2])
        pulse.quiet()
        return met
