"""The examination of all islands, on one of them: facts, who reaches whom, then pair by pair what
passes.

Pairs without an island in common are measured at the same time, as in a tournament; so two islands
that share a line are not measured against each other unless there are four.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator

from ..comm import descriptors
from ..comm.address import route_to
from ..comm.topology import Topology
from ..comm.zeromq import Meeting
from ..errors import PeerLost
from . import facts, reach
from .council import Council, guest
from .measured import OK, Direction, Examination, Island, Reach
from .pair import Pair
from .probe import Probe

MEET = 15.0  # seconds that two islands have to connect
SLACK = 30.0  # seconds beyond the budget, after which a pair is given up
LATE = 120.0  # seconds that an island may come later to a point of the examination than another


def examine(
    topology: Topology,
    seconds: float,
    disk_mb_s: float | None = None,
    step_seconds: float | None = None,
) -> Examination:
    """Examine the islands of a run; all of them call it.

    Args:
        topology: of this island; one of a kind that meets at a store, or single.
        seconds: that measuring the links may take.
        disk_mb_s, step_seconds: of this island, where they were measured.

    Returns:
        The same on all islands.

    Raises:
        PeerLost: no store, or an island did not come. ValueError: see `Council`.
    """
    planned, topology = topology, guest(topology)
    own = address(topology)
    mine = local(planned, own, disk_mb_s, step_seconds)  # with room for those that come later
    if topology.kind != "islands":
        return Examination((mine,))
    council = Council(topology)
    notes = council.share("facts", {"island": mine.note()}, topology.timeout)
    islands = tuple(Island.of(note["island"]) for note in notes.values())
    reaches = _reaches(council, topology, own)
    measured: list[Direction] = []
    rounds = list(tournament(topology.count))
    each = seconds / len(rounds)
    for n, pairs in enumerate(rounds):
        for pair in pairs:
            if topology.island in pair:
                measured.append(_measure(council, topology, pair, own, reaches, islands, each))
        council.share(f"round/{n}", {}, 3 * each + SLACK + LATE)
    said = council.share("measured", {"directions": [d.note() for d in measured]}, LATE)
    found = [Direction.of(d) for note in said.values() for d in note["directions"]]
    council.leave()
    return Examination(islands, reaches, {(d.sender, d.receiver): d for d in found})


def address(topology: Topology) -> str:
    """Where the others reach this island, as a run would say it; "" for a single replica."""
    if topology.kind != "islands":
        return topology.address
    return topology.address or route_to(topology.endpoint)


def local(
    topology: Topology, own: str, disk_mb_s: float | None, step_seconds: float | None
) -> Island:
    """What this island knows of itself."""
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
        open_files=descriptors.allowed(),
        open_files_needed=descriptors.num_open() + descriptors.needed(topology.islands),
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


def _reaches(council: Council, topology: Topology, own: str) -> dict[tuple[int, int], Reach]:
    """Who reaches whom; the same on all islands."""
    me, route = topology.island, route_to(topology.endpoint)
    addresses = list(dict.fromkeys((own, route)))
    secret = secrets.token_hex(16)
    listener = reach.Listener(secret, me, addresses, reach.PATIENCE)
    try:
        told = {"secret": secret, "ports": listener.ports}
        places = council.share("ports", told, LATE)
        found = []
        for step in range(1, topology.count):  # not all at once to the same one
            other = (me + step) % topology.count
            note = places[other]
            found.append(reach.reach(note["secret"], me, other, note["ports"]))
        said = council.share("reached", {"reaches": [r.note() for r in found]}, LATE)
    finally:
        listener.close()
    made = [Reach.of(r) for note in said.values() for r in note["reaches"]]
    return {(r.sender, r.receiver): r for r in made}


def _measure(
    council: Council,
    topology: Topology,
    pair: tuple[int, int],
    own: str,
    reaches: dict[tuple[int, int], Reach],
    islands: tuple[Island, ...],
    seconds: float,
) -> Direction:
    """What this island measures of its messages to the other one of a pair."""
    low, high = pair
    me, other = topology.island, low if topology.island == high else high
    # of two the first one listens: the other one of the pair where only that one is reached
    order = pair if reaches[high, low].state == OK else (high, low)
    if reaches[order[1], order[0]].state != OK:
        return Direction(me, other, error="no connection stands")
    if not reaches[order[1], order[0]].whole:
        return Direction(me, other, error="connections stand, but data do not pass")
    meeting = Meeting(
        council.store,
        f"{council.prefix}/pair/{low}.{high}",
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
