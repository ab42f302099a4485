"""Who holds my shard elsewhere, and how to reach them.

A rank has three coordinates: island (which replica), shard (which part of it) and copy (which of
the ranks of its island that hold this very part: unsharded islands, HSDP inside a site). Ranks with
equal shard and copy on all islands form a peer group. Islands may have different numbers of copies;
the smallest number is the number of active copies, and a shard's blocks are dealt to its active
copies, so it is sent once.

* `Topology.from_env()`: islands. Each replica is a torch.distributed world of its own; peer groups
  meet through a store at ISLAND_ENDPOINT and connect by a transport (`transport.py`; gloo: a bare
  group) that no framework inside the island can see.
* `Topology.from_mesh(mesh)` / `from_group(group)`: one world, the replicate axis of a mesh.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import PeerLost, StoreSilent, counted, renamed, see
from . import attempts, environment, roll
from .address import route_to, split_endpoint
from .link import Link
from .peers import PeerGroup
from .store_client import Asker, connect
from .transport import Meeting, opener

ANSWER = 15.0
"""Seconds that a question to the store may take once the islands have met. Its one thread asks the
name server for every address that connects, and a name server that does not answer holds it for
5 s each time (seen)."""

# how often this process joined a run: every attach gets keys of its own
_epochs: Counter[tuple[str, str]] = Counter()

OLD_NAMES = {"shards": "num_shards", "copies": "num_copies"}


@dataclass(frozen=True)
class ShardPosition:
    """A rank's place inside its island: shard of `num_shards`, copy of `num_copies`.

    Checkpoints, and what islands tell each other, name the two numbers "shards" and "copies".
    """

    num_shards: int = 1
    shard: int = 0
    num_copies: int = 1
    copy: int = 0

    if not TYPE_CHECKING:  # to a type checker such a method would say that every name is there

        def __getattr__(self, name: str) -> Any:
            raise renamed("ShardPosition", name, OLD_NAMES)

    @property
    def form(self) -> str:
        """How the island holds the model: `2 shards x 1 copy`."""
        return form(self.num_shards, self.num_copies)


def form(shards: int, copies: int) -> str:
    """`1 shard x 2 copies`."""
    return f"{counted(shards, 'shard')} x {counted(copies, 'copy', 'copies')}"


@dataclass
class Topology:
    """Where this rank stands and how its peer group is reached.

    Attributes:
        kind: "islands", "mesh" or "single".
        island, islands: index of this replica, and how many there are; where they may come and go,
            its slot, and how many slots there are (ISLAND_SLOTS). The data is cut into as many
            parts: `dataset.shard(islands, island)`.
        name: for logs and paths. run: id of this run, part of every key in the store.
        timeout: seconds of silence after which a peer counts as lost; also how long to wait for
            peers at the start.
        stop_timeout: seconds that an island which stops waits for the others to tell when they do.
        dead, least: where islands may come and go, seconds of silence after which one is lost, and
            how many must be left to train on.
        count, suffice: islands that are expected at the start, default `islands`; where they may
            come and go, how many suffice to begin when `timeout` is over (0: all).
        transport: what carries the peer group between islands (`environment.TRANSPORTS`). token:
            the run's secret, for transports and stores that know one. password: of a redis at
            `endpoint`.
        rank, world: this rank inside the island and the island's size.
        group: process group of the island (None: the default group, or a single rank).

    Example:
        >>> from fsdp_demo import Topology
        >>> Topology.from_env({}).islands
        1
    """

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
    peer_group: Any = None
    stop_timeout: float = 10.0
    dead: float = 10.0
    least: int = 1
    count: int = 0
    suffice: int = 0
    transport: str = next(iter(environment.TRANSPORTS))
    token: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    _store: Asker | None = field(default=None, repr=False)
    _prefix: str = field(default="", repr=False)
    _late: bool = field(default=False, repr=False)
    _meant: bool = field(default=True, repr=False)  # a single replica that was asked for

    def __post_init__(self) -> None:
        self.count = self.count or self.islands

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Topology:
        """Read the variables ISLAND_* (`environment.VARIABLES`); one that is not known is warned
        of.

        Without ISLAND_COUNT (or with 1): a single replica.

        Raises:
            ValueError: a variable is missing or out of range; the message says which and what is
                allowed.
        """
        env = os.environ if env is None else env
        environment.warn_of_unknown(env)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        count, transport = environment.whole(env, "ISLAND_COUNT", 1), environment.transport(env)
        islands = environment.slots(env, count, transport)
        island = environment.place(env, count, islands)
        name, run = environment.name(env, f"island{island}"), env.get("ISLAND_RUN") or "run"
        common: dict[str, Any] = {"name": name, "run": run}
        common |= {
            "timeout": environment.patience(env),
            "stop_timeout": environment.stop_timeout(env),
            "dead": environment.dead(env),
        }
        if islands == 1:
            return cls("single", rank=rank, world=world, _meant="ISLAND_COUNT" in env, **common)
        place = environment.endpoint(env)
        common |= {
            "count": count,
            "least": environment.least(env, count),
            "suffice": environment.suffice(env, count),
        }
        environment.refuse_gloo(place, transport)
        common |= {
            "address": env.get("ISLAND_ADDRESS", ""),
            "transport": transport,
            "token": environment.token(env),
        }
        return cls(
            "islands",
            island,
            islands,
            endpoint=str(place),
            password=place.password,
            rank=rank,
            world=world,
            **common,
        )

    @classmethod
    def from_mesh(cls, mesh: Any, replicate: str = "", timeout: float = 600.0) -> Topology:
        """One world with a 2-D (replicate, shard) or 1-D (replicate) DeviceMesh; FSDP2 must have
        been given the shard axis alone.

        Args:
            mesh: `torch.distributed.device_mesh.DeviceMesh`.
            replicate: name of the replicate axis; default "dp_replicate" or "replicate", else the
                first.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if mesh.ndim > 2 or (replicate and replicate not in names):
            wanted = (
                f"the replicate axis {replicate!r}" if replicate else "the replicate axis first"
            )
            raise ValueError(
                f"mesh with axes {names or mesh.ndim} does not fit: expected a 1-D or 2-D mesh "
                f"with {wanted}"
            )
        axis = next(
            (names.index(n) for n in (replicate, "dp_replicate", "replicate") if n in names), 0
        )
        peers, inner = mesh.get_group(axis), mesh.get_group(1 - axis) if mesh.ndim == 2 else None
        rank, world = (
            (dist.get_rank(inner), dist.get_world_size(inner)) if inner is not None else (0, 1)
        )
        peers = _gloo_groups(mesh, axis) if dist.get_backend(peers) != "gloo" else peers
        island = mesh.get_local_rank(axis)
        place = {"rank": rank, "world": world, "group": inner, "peer_group": peers}
        return cls("mesh", island, mesh.size(axis), f"island{island}", timeout=timeout, **place)

    @classmethod
    def from_group(cls, group: Any, timeout: float = 600.0) -> Topology:
        """One gloo process group that joins the ranks with the same shard, one per replica; each
        rank counts as a whole island.
        """
        return cls(
            "mesh",
            group.rank(),
            group.size(),
            f"island{group.rank()}",
            timeout=timeout,
            peer_group=group,
        )

    def join(self, position: ShardPosition) -> tuple[PeerGroup | None, int]:
        """Meet the other islands: the peers of this rank (None for a copy that is not active) and
        the number of active copies.

        Raises:
            ValueError: a used run id, or islands whose shards do not agree.
            PeerLost: peers did not come in time; lists who came and who is missing.
        """
        if self.kind == "single":
            environment.say_single(self._meant, self.rank)
            return PeerGroup(None, 0, 1, [self.name], self.timeout), position.num_copies
        link = Link.from_env()
        if self.kind == "mesh":
            names = [f"island{i}" for i in range(self.islands)]
            return PeerGroup(
                self.peer_group, self.island, self.islands, names, self.timeout, link, self.world
            ), position.num_copies
        try:
            store = self._connect()
            if self._late:
                return self._come_later(store, position, link)
            infos = self._meet(store, position)
        except StoreSilent as error:
            raise self._cured(error) from None
        store.deadline = self.question
        active_copies = min(info["copies"] for info in infos.values())
        if position.copy >= active_copies:
            return None, active_copies
        names = self._names(infos)
        if self.elastic:
            from .meet import elastic_peers

            meeting, place = self._place(store, position, active_copies, names)
            met = elastic_peers(meeting, place, self._own_store, link, self.dead, self.least)
            store.under(self.prefix()).set("begun", self._prefix.rpartition("/")[2])
            attempts.join(self).quiet()
            return met, active_copies
        open_group = self._connector(
            f"{self._prefix}/line/{position.shard}.{position.copy}", store, names
        )
        peers = PeerGroup(
            open_group(0),
            self.island,
            self.islands,
            names,
            self.timeout,
            link,
            position.num_shards * active_copies,
        )
        try:
            peers.widen(open_group)
        except BaseException:
            peers.release()  # a live group at interpreter exit can abort the process
            raise
        return peers, active_copies

    @property
    def elastic(self) -> bool:
        """Whether islands may come and go."""
        return self.kind == "islands" and self.transport == "zeromq"

    def under_way(self) -> bool:
        """Whether this island comes to a run that the others are training already, and so joins it
        as a newcomer (`PeerGroup.following`). What islands ask each other before `attach` is not
        asked then: nobody would answer.

        Raises:
            ValueError, PeerLost: see `prefix`.
        """
        return self.elastic and attempts.join(self).taken.late

    @property
    def starters(self) -> tuple[int, ...]:
        """The islands that begin the run together: all, but where they may come and go.

        Raises:
            ValueError, PeerLost: see `prefix`.
        """
        return attempts.join(self).taken.starters if self.elastic else tuple(range(self.islands))

    def _come_later(
        self, store: Asker, position: ShardPosition, link: Link | None
    ) -> tuple[PeerGroup | None, int]:
        """`join` of an island that comes when the run is under way."""
        from .meet import newcomer_peers

        key = f"{self._prefix}/join/{{}}/{position.shard}.{position.copy}"
        mine = self._announcement(position)
        infos = {}
        for i in range(self.islands):
            if store.check([first := f"{self._prefix}/join/{i}/0.0"]):
                infos[i] = store.note(
                    first, f"island {i}", {name: type(value) for name, value in mine.items()}
                )
        self._compare({i: info for i, info in infos.items() if i != self.island}, position)
        active_copies = min(info["copies"] for info in infos.values())
        if position.num_copies < active_copies:
            raise ValueError(
                f"{self.name} holds the model in "
                f"{counted(position.num_copies, 'copy', 'copies')}, "
                f"the run goes on in {active_copies}: start it with as many"
            )
        store.set(key.format(self.island), json.dumps(mine))
        store.deadline = self.question
        if position.copy >= active_copies:
            return None, active_copies
        meeting, place = self._place(
            store, position, active_copies, self._names({**infos, self.island: mine})
        )
        pulse = attempts.join(self)
        met = newcomer_peers(
            meeting, place, pulse.taken.life, self._own_store, link, self.dead, self.least
        )
        pulse.quiet()
        return met, active_copies

    def _own_store(self) -> Asker:
        """A connection of its own, below the keys of this meeting."""
        return self.open_store(self.question).under(self._prefix)

    def _place(
        self, store: Asker, position: ShardPosition, active_copies: int, names: Sequence[str]
    ) -> tuple[Meeting, Any]:
        from .meet import PeerPosition

        where, ranks = self.address or route_to(self.endpoint), position.num_shards * active_copies
        meeting = Meeting(
            store,
            self._prefix,
            self.island,
            self.islands,
            tuple(names),
            where,
            self.timeout,
            self.token,
            among=self.starters,
        )
        return meeting, PeerPosition(
            self.island,
            position.shard * active_copies + position.copy,
            ranks,
            dict(enumerate(names)),
            ranks,
            self.rank,
        )

    def _cured(self, error: StoreSilent) -> StoreSilent:
        """The same for who has not met the others yet, where it is an error."""
        if "ISLAND_ENDPOINT=" in str(error):
            return error
        return StoreSilent(
            f"{error}: see whether the store still runs at {self.endpoint} and is not stopped, and "
            "whether the network reaches it; "
            f"then start all islands again{see('store-silent')}"
        )

    def _connector(self, prefix: str, store: Asker, names: Sequence[str]) -> Callable[[int], Any]:
        """open(k): connections k = 0, 1, ... of this peer group, by the transport that was
        chosen.
        """
        where = self.address or route_to(self.endpoint)
        meeting = Meeting(
            store, prefix, self.island, self.islands, tuple(names), where, self.timeout, self.token
        )
        transport = opener(self.transport, meeting)

        def open_group(k: int) -> Any:
            try:
                return transport.open(k)
            except Late:
                raise self._cured(
                    StoreSilent(
                        f"the store at {self.endpoint} does not answer within {self.timeout:g} s"
                    )
                ) from None

        return open_group

    @property
    def question(self) -> float:
        """Seconds that one question to the store may take."""
        return min(self.timeout, ANSWER)

    def open_store(self, limit: float | None = None) -> Asker:
        """A connection of its own to the store at ISLAND_ENDPOINT, or in a mesh to that of the
        world. Each question has a deadline.

        Args:
            limit: seconds until it must stand; default `timeout`.

        Raises:
            StoreSilent: nobody answers there by then.
        """
        if self.kind == "mesh":
            return Asker(
                dist.distributed_c10d._get_default_store(), "the world's rendezvous", self.question
            )
        limit = self.timeout if limit is None else limit
        secret = self.password if self.endpoint.startswith("redis:") else self.token
        return connect(self.endpoint, limit, self.question, self.timeout, secret)

    def prefix(self) -> str:
        """What keys in the store begin with: the run, and for islands the attempt, which is agreed
        at the first call (`attempts.join`).

        Raises:
            ValueError: the run has finished, or a process that lives plays the same island.
            PeerLost: no store.
        """
        return attempts.join(self).prefix if self.kind == "islands" else self.run

    def meeting(self) -> str:
        """What the keys begin with that belong to this meeting of the islands (`join`); before it,
        or without one, those of the attempt.
        """
        return self._prefix or self.prefix()

    def _connect(self) -> Asker:
        if self.rank == 0:
            environment.warn_of_open(
                split_endpoint(self.endpoint), self.address, self.transport, self.token
            )
        self._store = store = self.open_store()
        store.deadline = self.timeout
        epoch = _epochs[self.endpoint, self.run]
        attempt = attempts.join(self, store).prefix
        if epoch and store.peek(f"{attempt}/finished"):
            # by an exchange of this process, which now has another one
            store.set(f"{attempt}/finished", "")
        self._late = self.under_way() and not epoch
        epoch = int(store.peek(f"{attempt}/begun") or 0) if self._late else epoch
        self._prefix = f"{attempt}/{epoch}"
        _epochs[self.endpoint, self.run] = epoch + 1
        return store

    def _names(self, infos: Mapping[int, dict[str, Any]]) -> list[str]:
        """Of all islands; of those that have not come, the one that is likely."""
        return [infos[i]["name"] if i in infos else f"island{i}" for i in range(self.islands)]

    def _meet(self, store: Asker, position: ShardPosition) -> dict[int, dict[str, Any]]:
        """Announce this rank, wait for one rank of every island that begins and compare layouts;
        returns each one's announcement.
        """
        mine = self._announcement(position)
        key = f"{self._prefix}/join/{{}}/{position.shard}.{position.copy}"
        store.set(key.format(self.island), json.dumps(mine))
        infos = self._gather(store, {name: type(value) for name, value in mine.items()})
        self._compare(infos, position)
        return infos

    def _announcement(self, position: ShardPosition) -> dict[str, Any]:
        layout = {"count": self.count, "shards": position.num_shards, "copies": position.num_copies}
        return {
            "name": self.name,
            "host": socket.gethostname(),
            **layout,
            "transport": self.transport,
        }

    def _compare(self, infos: Mapping[int, dict[str, Any]], position: ShardPosition) -> None:
        """Raise ValueError where other islands do not fit this one."""
        same = sorted(
            {i for i, other in infos.items() if other["name"] == self.name} | {self.island}
        )
        if len(same) > 1:
            raise ValueError(
                f"islands {same} all have ISLAND_NAME={self.name!r} and would overwrite each "
                "other's files: give each its own"
            )
        for i, other in sorted(infos.items()):
            if other["transport"] != self.transport:
                both = f"ISLAND_TRANSPORT={other['transport']}, {self.name} has {self.transport}"
                raise ValueError(f"island {i} ({other['name']}) has {both}: set one everywhere")
            if other["shards"] != position.num_shards:
                raise ValueError(
                    f"island {i} ({other['name']}) holds the model in "
                    f"{form(other['shards'], other['copies'])}, {self.name} in {position.form}: "
                    "the number of shards must agree (copies may differ)"
                )

    def _gather(self, store: Asker, fields: Mapping[str, type]) -> dict[int, dict[str, Any]]:
        """The announcements of all islands that begin, as they come."""
        first = f"{self._prefix}/join/{{}}/0.0"
        infos: dict[int, dict[str, Any]] = {}
        deadline, look, wanted = time.monotonic() + self.timeout, time.monotonic(), self.starters
        while True:
            for i in wanted:
                if i not in infos and store.check([first.format(i)]):
                    infos[i] = other = store.note(first.format(i), f"island {i}", fields)
                    # at once: the larger number would wait for islands that nobody starts
                    if other["count"] != self.count:
                        both = f"ISLAND_COUNT={other['count']}, {self.name} has {self.count}"
                        raise ValueError(
                            f"island {i} ({other['name']}) has {both}: set one number everywhere"
                        )
            missing = [str(i) for i in wanted if i not in infos]
            if not missing:
                return infos
            now = time.monotonic()
            if now > deadline:
                came = (
                    ", ".join(
                        f"{i} ({infos[i]['name']} on {infos[i]['host']})" for i in sorted(infos)
                    )
                    or "nobody"
                )
                raise PeerLost(
                    f"waited {self.timeout:g} s for {counted(len(wanted), 'island')} at "
                    f"{self.endpoint}, run {self.run!r}: came {came}; missing "
                    f"{', '.join(missing)}. Check ISLAND_COUNT, ISLAND_RUN and ISLAND_ENDPOINT "
                    "there, or raise ISLAND_TIMEOUT"
                    f"{see('missing-islands')}"
                )
            if now >= look:
                look = now + 1.0
                if self.elastic:
                    roll.compare(
                        store.under(self.prefix()), self, [i for i in wanted if i not in infos]
                    )
                if by := store.peek(f"{self.prefix()}/ended"):
                    waited = f"{self.name} waited for islands {', '.join(missing)}"
                    raise PeerLost(
                        f"{waited}, when island {by} left the attempt {self.prefix()}: start this "
                        "island again to join the next"
                    )
            time.sleep(0.02)

    def release(self) -> None:
        """Drop the connection to the store."""
        self._store = None


def _gloo_groups(mesh: Any, axis: int) -> Any:
    """A gloo group along the replicate axis of a mesh on another backend (every rank makes all of
    them, in one order).
    """
    mine, ranks = None, mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    for row in ranks:
        group = dist.new_group(row, backend="gloo")
        mine = group if dist.get_rank() in row else mine
    return mine
