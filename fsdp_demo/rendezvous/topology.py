"""Where a rank stands among the islands, and how it reaches the ranks that hold its shard.

A rank has three coordinates: island (which replica), shard (which part of it) and copy (which of
the ranks of its island that hold this very part: unsharded islands, HSDP inside a site). Ranks with
equal shard and copy on all islands form a peer group. Islands may have different numbers of copies;
the smallest number is the number of active copies, and a shard's blocks are dealt to its active
copies, so it is sent once.

* `Topology.from_env()`: islands. Each replica is a torch.distributed world of its own; peer groups
  meet through a store at ISLAND_ENDPOINT (`announcement.py`) and connect by ZeroMQ
  (`peers/zeromq.py`), which no framework inside the island can see.
* `Topology.from_mesh(mesh)`: one world, the replicate axis of a mesh, whose ranks meet over the
  store of that world. `from_store(store, ...)`: replicas of one process each. They connect as
  islands do, and all of them must stay (`mesh.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..elastic.peer_group import PeerGroup, PeerUser
from ..membership.protocol_types import Member
from ..net.link import Link
from . import attempts, environment
from .announcement import Rendezvous, attached
from .mesh import meeting_place, mesh_peers
from .position import Replica, ShardPosition


@dataclass
class Topology(Replica):
    """Where this rank stands and how its peer group is reached.

    Attributes:
        kind: "islands", "mesh" or "single".
        island, islands: index of this replica, and how many there are; where they may come and go,
            its slot, and how many slots there are (ISLAND_SLOTS). The data is cut into as many
            parts: `dataset.shard(islands, island)`.
        name: for logs and paths. run: id of this run, part of every key in the store.
        timeout: seconds of silence after which a peer counts as lost; also how long to wait for
            peers at the start.
        stop_timeout: seconds from SIGTERM, or a lost peer, to the end of an island: half of them
            for the other islands, half for its save.
        dead, stall, least: where islands may come and go, seconds of silence after which one is
            lost, seconds that it may stand while it still beats, at least (0: `timeout`), and how
            many must be left to train on.
        count, suffice: islands that are expected at the start, default `islands`; where they may
            come and go, how many suffice to begin when `timeout` is over (0: all).
        token: the run's secret, "" for none.
        rank, world: this rank inside the island and the island's size.
        group: process group of the island (None: the default group, or a single rank).
        store, meets_at: in a mesh, torch's store over which peer groups meet (None: that of the
            world), and what keys of this rank's begin with there.

    Example:
        >>> from fsdp_demo import Topology
        >>> Topology.from_env({}).islands
        1
    """

    _rendezvous: Rendezvous | None = field(default=None, repr=False)
    _meant: bool = field(default=True, repr=False)  # a single replica that was asked for

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
        environment.stop_signals(env)  # they are needed later
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        count, islands, island = environment.islands(env)
        common: dict[str, Any] = {
            "name": environment.name(env, f"island{island}"),
            "run": env.get("ISLAND_RUN") or "run",
            "timeout": environment.patience(env),
            "stop_timeout": environment.seconds(env, "ISLAND_STOP", cls.stop_timeout),
            "dead": environment.seconds(env, "ISLAND_DEAD", cls.dead, 2.0),
            "stall": environment.seconds(env, "ISLAND_STALL", 0.0, 2.0),
            "rank": rank,
            "world": world,
        }
        if islands == 1:
            return cls("single", _meant="ISLAND_COUNT" in env, **common)
        suffice = environment.least(env, count)
        return cls(
            "islands",
            island,
            islands,
            endpoint=str(environment.endpoint(env)),
            address=env.get("ISLAND_ADDRESS", ""),
            count=count,
            least=max(suffice, 1),
            suffice=suffice,
            token=environment.token(env),
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
        island, place = mesh.get_local_rank(axis), dict[str, Any]()
        if mesh.ndim == 2:
            inner = 1 - axis
            place |= {"rank": mesh.get_local_rank(inner), "world": mesh.size(inner)}
            place["group"] = mesh.get_group(inner)
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        place["meets_at"] = meeting_place(ranks)
        place["stop_timeout"] = environment.seconds(os.environ, "ISLAND_STOP", cls.stop_timeout)
        return cls("mesh", island, mesh.size(axis), f"island{island}", timeout=timeout, **place)

    @classmethod
    def from_store(cls, store: Any, rank: int, size: int, timeout: float = 600.0) -> Topology:
        """Replicas of one process each, which meet over a store of torch: a TCPStore, a FileStore,
        or a PrefixStore of either. All must stay.

        Args:
            rank, size: this replica, and how many there are.
        """
        return cls("mesh", rank, size, f"island{rank}", timeout=timeout, store=store)

    def join(
        self, position: ShardPosition, user: PeerUser | None = None
    ) -> tuple[PeerGroup | None, int]:
        """Meet the other islands: the peers of this rank (None for a copy that is not active) and
        the number of active copies. user: what the user gives the peer group.

        Raises:
            ValueError: a used run id, or islands whose shards do not agree.
            PeerLost: peers did not come in time; lists who came and who is missing.
        """
        if self.kind == "single":
            environment.say_single(self._meant, self.rank)
        if self.islands == 1:
            alone = PeerGroup(Member(0), {0: self.name}, [0], self.timeout, user=user)
            return alone, position.num_copies
        link = Link.from_env()
        if self.one_world:
            return mesh_peers(self, link, user), position.num_copies
        self._rendezvous = Rendezvous(self, position, link)
        return self._rendezvous.join(user)

    def under_way(self) -> bool:
        """Whether this island comes to a run that the others are training already, and so joins it
        as a newcomer (`PeerGroup.following`) at the next `attach`, the first of this process. What
        islands ask each other before `attach` is not asked then. Raises as `prefix` does.
        """
        return self.elastic and not attached(self) and attempts.join(self).taken.late

    @property
    def starters(self) -> tuple[int, ...]:
        """The islands that begin together: all, but where they come and go. Raises as `prefix`."""
        return attempts.join(self).taken.starters if self.elastic else tuple(range(self.islands))

    def prefix(self) -> str:
        """What keys in the store begin with: the run, and for islands the attempt, which is agreed
        at the first call (`attempts.join`).

        Raises:
            ValueError: the run has finished, or a process that lives plays the same island.
            PeerLost: no store.
        """
        return attempts.join(self).prefix if self.elastic else self.run

    def meeting(self) -> str:
        """What the keys of this meeting (`join`) begin with; else those of the attempt."""
        return (self._rendezvous and self._rendezvous.prefix) or self.prefix()
