"""The examination of all islands, on one of them: facts, who reaches whom, then pair by pair what
passes.

Pairs without an island in common are measured at the same time, as in a tournament; so two islands
that share a line are not measured against each other unless there are four.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from ...elastic.descriptors import needed, num_open
from ...errors import PeerLost, counted, see
from ...files import to_json
from ...net.address import route_to
from ...net.tcp import allowed
from ...peers.zeromq import Meeting
from ...rendezvous import attempts
from ...rendezvous.topology import Topology
from ...store.client import Store
from . import facts, reach
from .measured import OK, Direction, Examination, Island, Reach
from .probe import Pair, Probe

MEET = 15.0  # seconds that two islands have to connect
SLACK = 30.0  # seconds beyond the budget, after which a pair is given up
LATE = 120.0  # seconds that an island may come later to a point of the examination than another

T = TypeVar("T")


def examine(
    topology: Topology,
    seconds: float,
    disk_mb_s: float | None = None,
    step_seconds: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Examination:
    """The facts and measurements of all islands of a run; all of them call it.

    Args:
        seconds: seconds that the measurement of the links may take.
        disk_mb_s, step_seconds: measurements of this island's disk and training step, or None.
        say: gets a line at the begin of each phase.

    Raises:
        PeerLost: no store, or an island did not come. ValueError: see `SharedNotes`.
    """
    planned, topology = topology, joining_island(topology)
    own = address(topology)
    mine = local(planned, own, disk_mb_s, step_seconds)  # with room for those that come later
    if not topology.elastic:
        return Examination((mine,))
    say(f"waiting for {counted(topology.count, 'island')} at {topology.endpoint}")
    shared = SharedNotes(topology)
    islands = tuple(shared.share("facts", mine, Island, topology.timeout).values())
    say("trying who reaches whom")
    reaches = _reaches(shared, topology, own)
    measured: list[Direction] = []
    rounds = list(tournament(topology.count))
    each = seconds / len(rounds)
    for n, pairs in enumerate(rounds):
        say(f"measuring links, round {n + 1} of {len(rounds)}, some {each:.0f} s")
        for pair in (pair for pair in pairs if topology.island in pair):
            measured.append(_measure(shared, topology, pair, own, reaches, islands, each))
        shared.share(f"round/{n}", True, bool, 3 * each + SLACK + LATE)
    found = shared.share("measured", measured, list[Direction], LATE)
    shared.leave()
    directions = {(d.sender, d.receiver): d for made in found.values() for d in made}
    return Examination(islands, reaches, directions)


def address(topology: Topology) -> str:
    """The address at which the others reach this island in a run; "" for a single replica."""
    return topology.address or (route_to(topology.endpoint) if topology.endpoint else "")


def local(
    topology: Topology, own: str, disk_mb_s: float | None, step_seconds: float | None
) -> Island:
    """The facts of this island, without measuring anything."""
    name = facts.interface(own)
    settings = facts.tcp_settings()
    return Island(
        topology.island,
        topology.name,
        socket.gethostname(),
        own,
        facts.versions(),
        name,
        facts.speed(name),
        facts.mtu(name),
        disk_mb_s=disk_mb_s,
        step_seconds=step_seconds,
        open_files=allowed(),
        open_files_needed=num_open() + needed(topology.islands),
        **settings,  # type: ignore[arg-type]
    )


def tournament(count: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which every two of `count` islands meet once, none twice in a round (the circle
    method).

    >>> list(tournament(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        places = [places[0], places[-1], *places[1:-1]]


def _reaches(shared: SharedNotes, topology: Topology, own: str) -> dict[tuple[int, int], Reach]:
    """Try a plain connection to each other island; what all found, by (sender, receiver)."""
    me, route = topology.island, route_to(topology.endpoint)
    addresses = list(dict.fromkeys((own, route)))
    secret = secrets.token_hex(16)
    listener = reach.Listener(secret, me, addresses, reach.PATIENCE)
    try:
        places = shared.share("ports", (secret, listener.ports), tuple[str, list[str]], LATE)
        mine = []
        for step in range(1, topology.count):  # not all at once to the same one
            other = (me + step) % topology.count
            mine.append(reach.reach(places[other][0], me, other, places[other][1]))
        found = shared.share("reached", mine, list[Reach], LATE)
    finally:
        listener.close()
    return {(r.sender, r.receiver): r for made in found.values() for r in made}


def _measure(
    shared: SharedNotes,
    topology: Topology,
    pair: tuple[int, int],
    own: str,
    reaches: dict[tuple[int, int], Reach],
    islands: tuple[Island, ...],
    seconds: float,
) -> Direction:
    """Measure this island's messages to the other one of a pair, while that one does the same."""
    low, high = pair
    me, other = topology.island, low if topology.island == high else high
    # of two the first one listens: the other one of the pair where only that one is reached
    order = pair if reaches[high, low].state == OK else (high, low)
    if reaches[order[1], order[0]].state != OK:
        return Direction(me, other, error="no connection stands")
    if not reaches[order[1], order[0]].whole:
        return Direction(me, other, error="connections stand, but data do not pass")
    meeting = Meeting(
        shared.store,
        f"{shared.prefix}/pair/{low}.{high}",
        order.index(me),
        2,
        tuple(islands[i].name for i in order),
        own if reaches[other, me].state == OK else "",  # it may not be this machine's
        MEET,
        topology.token,
    )
    line = None
    try:
        line = Pair(meeting, time.monotonic() + 2 * seconds + SLACK)
        return Probe(line, me, other, seconds, len(islands) - 1).run()
    except PeerLost as error:
        return Direction(me, other, error=str(error)[:300])
    finally:
        if line is not None:
            line.close()


# ---- through the store -------------------------------------------------------------------------


def joining_island(topology: Topology) -> Topology:
    """The topology of the same island in a run of its own, `RUN.doctor`, so that the run that is to
    come, or that trains, is left alone. Raises ValueError: the island would come later than the
    others.
    """
    if topology.island >= topology.count:
        raise ValueError(
            f"ISLAND_RANK={topology.island} with ISLAND_COUNT={topology.count}: doctor examines "
            "the islands that begin a run; raise ISLAND_COUNT to examine more"
        )
    run = f"{topology.run}.doctor"
    return replace(topology, run=run, islands=topology.count, suffice=0, _rendezvous=None)


class SharedNotes:
    """Notes that the islands of one examination leave for each other in the store, the one place
    that all of them reach.

    Args:
        topology: topology as `joining_island` returns it.

    Attributes:
        store: below the keys of this examination.

    Raises:
        PeerLost: no store. ValueError: a process that lives plays the same island.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self.store: Store = topology.open_store()
        self.store.deadline = topology.question
        self.store = self.store.under(attempts.join(topology, self.store).prefix)
        self.prefix = self.store.prefix.rstrip("/")

    def share(self, name: str, mine: T, form: type[T], seconds: float) -> dict[int, T]:
        """Leave a note under a name and wait for those of all others; the notes by island, in
        order.

        Args:
            form: type of `mine`, as msgspec knows types.

        Raises:
            PeerLost: one has not said it within so many seconds. ValueError: what it says cannot be
                read.
        """
        t = self._topology
        self.store.set(f"{name}/{t.island}", to_json(mine))
        what = f"{counted(t.count, 'island')} at {t.endpoint}, run {t.run!r}, at {name!r}"
        cure = (
            ". Start fsdp-demo doctor on all islands with the same ISLAND_ENDPOINT, ISLAND_RUN and "
            f"ISLAND_COUNT{see('missing-islands')}"
        )
        return self.store.gather(name, range(t.count), form, seconds, what, cure=cure)

    def leave(self) -> None:
        """End the examination, so that the next one of this run gets keys of its own."""
        self.store.compare_set("ended", "", str(self._topology.island))
