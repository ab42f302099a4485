"""Who holds my shard elsewhere, and how to reach them.

A rank has three coordinates: island (which replica), shard (which part of it) and copy (which of the ranks of its island that hold this
very part: unsharded islands, HSDP inside a site). Ranks with equal shard and copy on all islands form a line. Islands may have different
numbers of copies; the smallest number is the number of lanes, and a shard's blocks are dealt to its lanes, so it is sent once.

* `Topology.from_env()`: islands. Each replica is a torch.distributed world of its own; lines meet through a store at ISLAND_ENDPOINT and a
  bare gloo group that no framework inside the island can see.
* `Topology.from_mesh(mesh)` / `from_group(group)`: one world, the replicate axis of a mesh.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .link import Link
from .transport import Line, PeerLost

log = logging.getLogger("fsdp_demo")

LONGEST = 10_000_000
"""Longest timeout in seconds: torch counts milliseconds in a 64-bit number and adds to it."""

_epochs: Counter[tuple[str, str]] = Counter()  # how often this process joined a run: every attach gets keys of its own


@dataclass(frozen=True)
class Position:
    """A rank's place inside its island: shard of `shards`, copy of `copies`."""

    shards: int = 1
    shard: int = 0
    copies: int = 1
    copy: int = 0


@dataclass
class Topology:
    """Where this rank stands and how its line is reached.

    Attributes:
        kind: "islands", "mesh" or "single".
        island, islands: index of this replica, and how many there are.
        name: for logs and paths. run: id of this run, part of every key in the store.
        timeout: seconds of silence after which a peer counts as lost; also how long to wait for peers at the start.
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
    line_group: Any = None
    _store: Any = field(default=None, repr=False)
    _prefix: str = field(default="", repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Topology:
        """Read ISLAND_RANK, ISLAND_COUNT, ISLAND_ENDPOINT, ISLAND_RUN, ISLAND_NAME, ISLAND_ADDRESS, ISLAND_TIMEOUT.

        Without ISLAND_COUNT (or with 1): a single replica.

        Raises:
            ValueError: a variable is missing or out of range; the message says which and what is allowed.
        """
        env = os.environ if env is None else env
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        timeout = _number(env, "ISLAND_TIMEOUT", 600.0)
        if not 0 < timeout <= LONGEST:
            raise ValueError(f"ISLAND_TIMEOUT={env['ISLAND_TIMEOUT']!r} must be more than 0 and at most {LONGEST} seconds")
        islands, island = _whole(env, "ISLAND_COUNT", 1), _whole(env, "ISLAND_RANK", 0)
        name, run = env.get("ISLAND_NAME") or f"island{island}", env.get("ISLAND_RUN") or "run"
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(f"ISLAND_NAME={name!r} names folders: allowed are letters, digits, '_', '-' and '.', not first a '-' or '.'")
        common: dict[str, Any] = {"name": name, "run": run, "timeout": timeout}
        if islands < 1 or not 0 <= island < islands:
            raise ValueError(f"ISLAND_RANK={island} with ISLAND_COUNT={islands}: allowed is 0 <= ISLAND_RANK < ISLAND_COUNT")
        if islands == 1:
            log.info("one replica: %s", "ISLAND_COUNT is 1" if "ISLAND_COUNT" in env else "no ISLAND_* variables are set")
            return cls("single", rank=rank, world=world, **common)
        endpoint = env.get("ISLAND_ENDPOINT", "").strip()
        host, _, port = endpoint.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536) or (":" in host and host[0] + host[-1] != "[]"):
            raise ValueError(f"ISLAND_ENDPOINT={endpoint!r} must be host:port of the store, as `fsdp-demo store` prints it")
        common["address"] = env.get("ISLAND_ADDRESS", "")
        return cls("islands", island, islands, endpoint=endpoint, rank=rank, world=world, **common)

    @classmethod
    def from_mesh(cls, mesh: Any, replicate: str = "", timeout: float = 600.0) -> Topology:
        """One world with a 2-D (replicate, shard) or 1-D (replicate) DeviceMesh; FSDP2 must have been given the shard axis alone.

        Args:
            mesh: `torch.distributed.device_mesh.DeviceMesh`.
            replicate: name of the replicate axis; default "dp_replicate" or "replicate", else the first.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if mesh.ndim > 2 or (replicate and replicate not in names):
            wanted = f"the replicate axis {replicate!r}" if replicate else "the replicate axis first"
            raise ValueError(f"mesh with axes {names or mesh.ndim} does not fit: expected a 1-D or 2-D mesh with {wanted}")
        axis = next((names.index(n) for n in (replicate, "dp_replicate", "replicate") if n in names), 0)
        line, inner = mesh.get_group(axis), mesh.get_group(1 - axis) if mesh.ndim == 2 else None
        rank, world = (dist.get_rank(inner), dist.get_world_size(inner)) if inner is not None else (0, 1)
        line = _gloo_lines(mesh, axis) if dist.get_backend(line) != "gloo" else line
        island = mesh.get_local_rank(axis)
        place = {"rank": rank, "world": world, "group": inner, "line_group": line}
        return cls("mesh", island, mesh.size(axis), f"island{island}", timeout=timeout, **place)

    @classmethod
    def from_group(cls, group: Any, timeout: float = 600.0) -> Topology:
        """One gloo process group that joins the ranks with the same shard, one per replica; each rank counts as a whole island."""
        return cls("mesh", group.rank(), group.size(), f"island{group.rank()}", timeout=timeout, line_group=group)

    def join(self, position: Position) -> tuple[Line | None, int]:
        """Meet the other islands: the line of this rank (None for a copy beyond the lanes) and the number of lanes.

        Raises:
            ValueError: a used run id, or islands whose shards do not agree.
            PeerLost: peers did not come in time; lists who came and who is missing.
        """
        if self.kind == "single":
            return Line(None, 0, 1, [self.name], self.timeout), position.copies
        link = Link.from_env()
        if self.kind == "mesh":
            names = [f"island{i}" for i in range(self.islands)]
            return Line(self.line_group, self.island, self.islands, names, self.timeout, link, self.world), position.copies
        store = self._connect()
        infos = self._meet(store, position)
        lanes = min(info["copies"] for info in infos)
        if position.copy >= lanes:
            return None, lanes
        connect = self._connector(f"{self._prefix}/line/{position.shard}.{position.copy}", store)
        names = [i["name"] for i in infos]
        line = Line(connect(0), self.island, self.islands, names, self.timeout, link, position.shards * lanes)
        line.widen(connect)
        return line, lanes

    def _connector(self, prefix: str, store: Any) -> Callable[[int], Any]:
        """connect(k): group k = 0, 1, ... of this line, with connections of its own; one thread serves them all."""
        where = self.address or _route_to(self.endpoint)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timedelta(seconds=self.timeout), 1

        def connect(k: int) -> Any:
            try:
                options._devices = options._devices or [dist.ProcessGroupGloo.create_device(hostname=where)]
                return dist.ProcessGroupGloo(dist.PrefixStore(f"{prefix}/{k}", store), self.island, self.islands, options)
            except RuntimeError as error:
                raise PeerLost(f"{self.name} could not connect to its peers from {where} (ISLAND_ADDRESS): {error}") from error

        return connect

    def open_store(self) -> Any:
        """A connection of its own to the store at ISLAND_ENDPOINT.

        Raises:
            PeerLost: nobody answers there within `timeout` seconds.
        """
        host, _, port = self.endpoint.rpartition(":")
        try:
            limit = timedelta(seconds=self.timeout)
            return dist.TCPStore(host.strip("[]"), int(port), None, is_master=False, wait_for_workers=False, timeout=limit)
        except (RuntimeError, ValueError) as error:
            raise PeerLost(
                f"no store answers at ISLAND_ENDPOINT={self.endpoint} after {self.timeout:g} s: start there `fsdp-demo store --bind "
                f"{self.endpoint}` and check that this port is open ({str(error).splitlines()[0][:120]})"
            ) from error

    def _connect(self) -> Any:
        store = self.open_store()
        self._prefix = f"{self.run}/{_epochs[self.endpoint, self.run]}"
        _epochs[self.endpoint, self.run] += 1
        if store.add(f"{self._prefix}/start/{self.island}/{self.rank}", 1) > 1:
            raise ValueError(
                f"ISLAND_RUN={self.run!r} was already started by an island with ISLAND_RANK={self.island} on the store {self.endpoint}: "
                "set a new ISLAND_RUN on all islands (a run id is used once), and a different ISLAND_RANK on each"
            )
        self._store = store
        return store

    def _meet(self, store: Any, position: Position) -> list[dict[str, Any]]:
        """Announce this rank, wait for one rank of every island and compare layouts; returns each island's announcement in order."""
        layout = {"count": self.islands, "shards": position.shards, "copies": position.copies}
        mine = {"name": self.name, "host": socket.gethostname(), **layout}
        key = f"{self._prefix}/join/{{}}/{position.shard}.{position.copy}"
        store.set(key.format(self.island), json.dumps(mine))
        first = f"{self._prefix}/join/{{}}/0.0"
        infos: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.timeout
        while len(infos) < self.islands:
            for i in range(self.islands):
                if i not in infos and store.check([first.format(i)]):
                    infos[i] = other = json.loads(store.get(first.format(i)))
                    if other["count"] != self.islands:  # at once: the larger number would wait for islands that nobody starts
                        both = f"ISLAND_COUNT={other['count']}, {self.name} has {self.islands}"
                        raise ValueError(f"island {i} ({other['name']}) has {both}: set one number everywhere")
            if time.monotonic() > deadline:
                came = ", ".join(f"{i} ({infos[i]['name']} on {infos[i]['host']})" for i in sorted(infos)) or "nobody"
                missing = ", ".join(str(i) for i in range(self.islands) if i not in infos)
                raise PeerLost(
                    f"waited {self.timeout:g} s for {self.islands} islands at {self.endpoint}, run {self.run!r}: came {came}; missing "
                    f"{missing}. Check ISLAND_COUNT, ISLAND_RUN and ISLAND_ENDPOINT there, or raise ISLAND_TIMEOUT"
                )
            time.sleep(0.02)
        ordered = [infos[i] for i in range(self.islands)]
        same = [i for i, other in enumerate(ordered) if other["name"] == self.name]
        if len(same) > 1:
            raise ValueError(f"islands {same} all have ISLAND_NAME={self.name!r} and would overwrite each other's files: give each its own")
        for i, other in enumerate(ordered):
            if other["shards"] != position.shards:
                raise ValueError(
                    f"island {i} ({other['name']}) holds the model in {other['shards']} shards x {other['copies']} copies, {self.name} in "
                    f"{position.shards} shards x {position.copies} copies: the number of shards must agree (copies may differ)"
                )
        return ordered

    def release(self) -> None:
        """Drop the connection to the store."""
        self._store = None


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name}={text!r} must be a number")
    return value


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    value = _number(env, name, default)
    if value != int(value):
        raise ValueError(f"{name}={env[name]!r} must be a whole number")
    return int(value)


def _route_to(endpoint: str) -> str:
    """The local address from which packets to the endpoint leave: right where a machine has several interfaces."""
    host, _, port = endpoint.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses a route, sends nothing
        return str(probe.getsockname()[0])


def _gloo_lines(mesh: Any, axis: int) -> Any:
    """A gloo group along the replicate axis of a mesh on another backend (every rank makes all of them, in one order)."""
    mine, ranks = None, mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    for line in ranks:
        group = dist.new_group(line, backend="gloo")
        mine = group if dist.get_rank() in line else mine
    return mine
