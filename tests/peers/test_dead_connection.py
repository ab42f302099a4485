"""One connection to a peer is dead while its others, and its beats, pass: noticed soon, and a slow
connection is not taken for a dead one.

Threads as islands (tests/support/elastic.py), with a TCP relay on each of their connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ..elastic.test_lossy_links import Network, through
from ..support.elastic import Islands, agree, exchanged
from ..support.inside import in_a_process

NOTES, LANE = 0, 1
"""Of the relays between two islands: in the order in which the connections are opened."""


def held(kind: int, forth: bool = True, back: bool = True) -> Callable[[Network], Any]:
    """What nothing more comes through: a connection of islands 0 and 1. `forth` is from 1 to 0."""
    return lambda network: network.relays[0, 1][kind].hold(forth, back)


CASES = {
    "for messages": held(LANE),
    "for messages, to the higher slot": held(LANE, forth=False),
    "for messages, to the lower slot": held(LANE, back=False),
    "for words": held(NOTES),
}


@pytest.mark.parametrize("case", CASES)
@in_a_process
def test_connection_dead_among_living_ones_is_noticed(case: str) -> None:
    """A dead connection is noticed while others of the same peer live: before, after the 135 s of a
    heartbeat of libzmq.
    """
    made, until = list[Islands](), time.monotonic() + 20

    def fault(network: Network) -> None:
        CASES[case](network)
        # messages do not need the connection for words, and would come to their end before
        while case == "for words" and not made[0].expelled and time.monotonic() < until:
            time.sleep(0.05)

    here, on, found = through(3, fault, made=made)
    assert on == [0, 2] and agree(found)[-1] == (0, 2)
    assert [slot for slot, _ in here.expelled] == [1]


@in_a_process
def test_connection_slow_is_not_dead() -> None:
    """A connection is not dead while bytes come, though nothing whole does for longer than
    `dead`.
    """

    def slow(network: Network) -> None:
        network.relays[0, 1][LANE].wait = 0.3

    def fn(line: Any) -> Any:
        out = []
        for n in range(3):
            if n == 1 and line.slot == 0:
                slow(network)
            out.append(exchanged(line, n, 15))
        return out

    network = Network()
    here = Islands(3, dead=1.0, store=network)
    here.run(fn)
    slots = agree(here.survivors())
    network.close()
    assert slots == [(0, 1, 2)] * 3 and not here.expelled


@in_a_process
def test_connection_late_while_an_island_ends() -> None:
    """An island that ends is not lost: the word that it ends came on one connection only, and the
    others closed before it was there.
    """
    network, met = Network(), threading.Barrier(2)
    here, seen = Islands(2, store=network), list[tuple[Any, int]]()

    def fn(line: Any) -> None:
        exchanged(line, 0)
        line.wait_stable(10)
        if line.slot == 0:
            network.relays[0, 1][NOTES].wait = 0.4
        met.wait(10)
        if line.slot == 0:
            detector, until = line._driver.detector, time.monotonic() + 10
            while not all(w.gone for w in detector.wires) and time.monotonic() < until:
                time.sleep(0.01)
            seen.append((line._driver.machine.state, len(detector.leaving)))

    here.run(fn)
    network.close()
    assert seen == [("running", 1)]


@pytest.mark.parametrize("word", ["leave", "release"])
@in_a_process
def test_connection_late_while_an_island_leaves(word: str) -> None:
    """An island that leaves is in its last message. (Its word that it leaves overtook that message:
    the other island settled without it, and went on from another mean.)
    """
    network, met = Network(), threading.Barrier(2)
    here = Islands(2, store=network)

    def fn(line: Any) -> Any:
        exchanged(line, 0)
        line.wait_stable(10)
        if line.slot == 0:
            relay = network.relays[0, 1][LANE]
            relay.hold(forth=False)
            threading.Timer(0.4, relay.let_go).start()
        met.wait(10)
        found = exchanged(line, 2)  # it has it as soon as the other has sent
        if line.slot == 0:
            getattr(line, word)()
        return found

    here.run(fn)
    slots = agree([[found] for found in here.survivors()])
    network.close()
    assert slots == [(0, 1)] and not here.expelled
