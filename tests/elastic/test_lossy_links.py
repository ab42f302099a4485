"""Links between islands that are cut, silent in one or both directions, slow, reset, or that change
bytes: who goes on, and who does not.

Threads as islands (tests/support/elastic.py), with a TCP relay on each of their connections; and
processes that are stopped and woken. Nobody hangs, and never do two halves go on.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_demo import PeerLost
from fsdp_demo.elastic import store_session
from fsdp_demo.errors import StoreSilent
from fsdp_demo.store.client import WorldStore

from ..support.elastic import Islands, agree, exchanged
from ..support.inside import in_a_process
from ..support.relay import Relay


class Network(WorldStore):
    """A store in memory that leads every connection of two islands through a relay of its own.

    Attributes:
        silent: while it is set the store answers nobody.
        relays: (lower slot, higher slot): all relays between the two; the lower listens, so `forth`
            is towards it.
    """

    def __init__(self, made: Callable[[Relay], Any] = lambda relay: None) -> None:
        super().__init__(dist.HashStore(), "the test", 5.0)
        self.relays: dict[tuple[int, int], list[Relay]] = {}
        self.silent = threading.Event()
        self._lock, self._made = threading.Lock(), made

    def set(self, key: str, value: str) -> None:
        where = (self.prefix + key).split("/")
        if where[:2] == ["line", "peer_group"] and where[-2] == "at":
            note, own = json.loads(value), int(where[-1])
            for other, port in note["ports"].items():
                if int(other) > own:
                    relay = Relay(port)
                    self._made(relay)
                    with self._lock:
                        self.relays.setdefault((own, int(other)), []).append(relay)
                    note["ports"][other] = relay.port
            value = json.dumps(note)
        super().set(key, value)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        if self.silent.is_set():
            raise StoreSilent("the store of the test does not answer")
        return super()._ask(question)

    def between(self, *slots: int) -> list[Relay]:
        """The relays of all pairs of which exactly one is among `slots`."""
        return [
            relay
            for pair, found in self.relays.items()
            if len(set(pair) & set(slots)) == 1
            for relay in found
        ]

    def hold(self, sender: int, receiver: int) -> None:
        """Nothing more gets from one island to the other."""
        for relay in self.relays[min(sender, receiver), max(sender, receiver)]:
            relay.hold(forth=sender > receiver, back=sender < receiver)

    def close(self) -> None:
        for relay in [relay for found in self.relays.values() for relay in found]:
            relay.close()


def through(
    islands: int,
    fault: Callable[[Network], Any],
    at: int = 3,
    count: int = 9,
    dead: float = 2.0,
    ranks: int = 1,
    made: list[Islands] | None = None,
) -> tuple[Islands, list[int], list[Any]]:
    """Islands that exchange `count` messages; before message `at` of the lowest slot something
    happens to the network.

    Returns:
        The islands, the slots of those that went on to the end, and what they have.
    """
    network = Network()
    here, done = Islands(islands, ranks, dead=dead, store=network), threading.Event()
    if made is not None:
        made.append(here)

    def fn(line: Any) -> Any:
        out = []
        for n in range(count):
            if n == at and (line.slot, line._driver.machine.rank) == (0, 0):
                fault(network)
                done.set()
            if n == at:
                done.wait(20)
            out.append(exchanged(line, n))
        return out

    results = here.run(fn)
    network.close()
    on = sorted(
        {slot for (slot, _), found in results.items() if not isinstance(found, BaseException)}
    )
    gone = [found for found in results.values() if isinstance(found, BaseException)]
    assert all(isinstance(error, PeerLost) for error in gone), gone
    return here, on, [results[who] for who in sorted(results) if who[0] in on]


def cut(network: Network, *slots: int, reset: bool = False) -> None:
    for relay in network.between(*slots):
        relay.cut(reset)


def dead_cable(network: Network, *slots: int) -> None:
    for relay in network.between(*slots):
        relay.hold()


FAULTS = {
    # name: (what happens, islands that go on). In a tie those with the lowest slot.
    "one of three is cut": (lambda net: cut(net, 1), [0, 2]),
    "one of three is reset": (lambda net: cut(net, 0, reset=True), [1, 2]),
    "two of four are cut": (lambda net: cut(net, 0, 1), [0, 1]),
    "one of two is cut": (lambda net: cut(net, 0), None),
    "one of three is silent": (lambda net: dead_cable(net, 0), [1, 2]),
    "one of three is not heard": (lambda net: [net.hold(0, 1), net.hold(0, 2)], [1, 2]),
    "one of three hears nobody": (lambda net: [net.hold(1, 0), net.hold(2, 0)], [1, 2]),
    "one link of three is silent": (lambda net: net.hold(1, 2), [0, 1]),
}
COUNTS = {"two of four are cut": 4, "one of two is cut": 2}


@pytest.mark.parametrize("fault", FAULTS)
@in_a_process
def test_lossy_link_who_goes_on(fault: str) -> None:
    """After each fault of the links exactly one side goes on, and the others are expelled."""
    happens, expected = FAULTS[fault]
    here, on, found = through(COUNTS.get(fault, 3), happens)
    slots = agree(found)
    assert slots[-1] == tuple(on), "those that go on are those that count"
    assert on == expected if expected is not None else len(on) == 1
    assert sorted(slot for slot, _ in here.expelled) == [
        s for s in range(here.count) if s not in on
    ]


@pytest.mark.parametrize(("sender", "receiver"), [(2, 1), (0, 1), (1, 0)])
@in_a_process
def test_lossy_link_changed_bytes_are_never_taken(sender: int, receiver: int) -> None:
    """Bytes that are changed on the way are never taken (here the last byte of a long run of them):
    whoever receives them takes the sender for lost; `exchanged` compares all that is taken.
    """
    damaged: list[int] = []

    def bend(data: bytes, forth: bool) -> bytes:
        if forth != (sender > receiver) or len(data) < 2000 or damaged:
            return data
        damaged.append(len(data))
        return data[:-1] + bytes([data[-1] ^ 1])

    def fault(net: Network) -> None:
        for relay in net.relays[min(sender, receiver), max(sender, receiver)]:
            relay.change = bend

    here, on, found = through(3, fault)
    assert damaged and len(on) == 2 and agree(found)[-1] == tuple(on)
    assert not {sender, receiver} <= set(on) and len(here.expelled) == 1


@in_a_process
def test_lossy_link_slow_loses_nobody() -> None:
    """A slow link loses nobody."""

    def fault(net: Network) -> None:
        for relay in net.between(1):
            relay.wait = 0.05

    here, on, found = through(3, fault)
    assert agree(found) == [(0, 1, 2)] * 9 and on == [0, 1, 2] and here.expelled == []


@in_a_process
def test_lossy_link_silent_from_the_start_ends_the_meeting() -> None:
    """Connections that are accepted and silent end the meeting. Nobody has trained yet: all end,
    and say whom they could not reach.
    """
    network = Network(lambda relay: relay.hold())
    here = Islands(3, timeout=2.0, store=network)
    results = here.run(lambda line: None)
    network.close()
    assert all(isinstance(error, PeerLost) for error in results.values()), results
    assert all("could not be connected within 2 s" in str(error) for error in results.values()), (
        results
    )


@pytest.mark.parametrize("ranks", [1, 2])
@in_a_process
def test_membership_change_waits_for_a_silent_store(ranks: int) -> None:
    """A change of members waits while the store is silent."""
    epochs, made = list[int](), list[Islands]()

    def fault(net: Network) -> None:
        net.silent.set()
        cut(net, 2)
        threading.Thread(target=later, args=(net,)).start()

    def later(net: Network) -> None:
        time.sleep(1.0)
        epochs.extend(line._driver.machine.record.epoch for line in made[0].lines.values())
        net.silent.clear()

    here, on, found = through(3, fault, ranks=ranks, dead=4.0, made=made)
    assert on == [0, 1] and agree(found[0::ranks])[-1] == (0, 1)
    assert agree(found[0::ranks]) == agree(found[ranks - 1 :: ranks])
    assert len(here.expelled) == ranks
    assert epochs == [0] * 3 * ranks


@in_a_process
def test_membership_change_ignores_an_unreadable_report() -> None:
    """A report that cannot be read counts as one that does not come."""
    plain = store_session.to_json

    def torn(report: Any) -> str:
        return plain(report)[:-5] if report.member.slot == 2 else plain(report)

    store_session.to_json = torn
    here, on, found = through(4, lambda net: cut(net, 3))
    assert on == [0, 1] and agree(found)[-1] == (0, 1)
    assert sorted(here.expelled) == [(2, 0), (3, 0)]
