"""Who begins a run: one decision in the store, the same for all islands whenever they come."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_demo import PeerLost, Topology
from fsdp_demo.rendezvous import attempts, starting
from fsdp_demo.store.client import WorldStore

from ..support import refused
from ..support.threaded import at_once


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "BEAT", 0.05)
    monkeypatch.setattr(starting, "BEATS", 20.0)


def place(
    island: int, count: int = 3, suffice: int = 2, timeout: float = 0.3, slots: int = 0
) -> Topology:
    of = {"endpoint": "the test", "timeout": timeout, "name": f"isle{island}"}
    return Topology("islands", island, slots or count, count=count, suffice=suffice, **of)


def asker(store: Any = None) -> WorldStore:
    return WorldStore(store or dist.HashStore(), "the test", 5.0).under("run/0")


def called(at: WorldStore, p: Topology, late: bool = False) -> Any:
    return starting.call(at, p, late, lambda islands: True)


def comes(at: WorldStore, i: int, **changes: Any) -> None:
    """Island i was here."""
    said = {"name": f"isle{i}", "host": "there", "count": 3, "slots": 3, "least": 2, "stall": 0.0}
    said |= changes
    at.set(f"came/{i}", json.dumps(said))


def refusal(kind: type[Exception], at: WorldStore, p: Topology, *parts: str, **how: bool) -> str:
    return refused.refusal(lambda: called(at, p, **how), *parts, kind=kind)


def test_start_begins_when_all_have_come() -> None:
    """Islands begin as soon as all have come."""
    store, found = dist.HashStore(), dict[int, Any]()
    start = time.monotonic()
    at_once(lambda i: found.update({i: called(asker(store), place(i, timeout=60.0))}), 3, 30.0)
    assert found == {i: ((0, 1, 2), False) for i in range(3)}
    assert time.monotonic() - start < 30


def test_start_begins_with_enough_after_the_timeout() -> None:
    """ISLAND_MIN islands begin after the timeout, and the others join later."""
    store, found = dist.HashStore(), dict[int, Any]()

    def island(i: int) -> None:
        if i == 1:  # when the others have decided, and before they have met
            while not asker(store).get("starters"):
                time.sleep(0.01)
            threading.Timer(0.3, lambda: asker(store).set("begun", "0")).start()
        found[i] = called(asker(store), place(i, timeout=0.5 if i != 1 else 30.0))

    at_once(island, 3, 40.0)
    assert found == {0: ((0, 2), False), 2: ((0, 2), False), 1: ((0, 2), True)}


def test_start_decision_is_the_same_for_all() -> None:
    """All islands get the same decision when they come about when the time of the others is
    over.
    """
    draw = random.Random(0)
    for _ in range(3):
        store, found = dist.HashStore(), dict[int, Any]()
        waits = [draw.uniform(0.0, 0.5) for _ in range(3)]

        def island(
            i: int, store: Any = store, found: dict[int, Any] = found, waits: list[float] = waits
        ) -> None:
            time.sleep(waits[i])
            try:
                found[i] = called(asker(store), place(i, suffice=1))
            except PeerLost:  # nobody has met here, so who is late waits in vain
                found[i] = (starting.decided(asker(store), 3), True)

        at_once(island, 3, 30.0)
        (starters,) = {who for who, _ in found.values()}
        assert {i for i, (_, late) in found.items() if not late} == set(starters), found


def test_start_names_too_few_islands() -> None:
    """The error of too few islands names who came and who is missing."""
    at = asker()
    comes(at, 2)
    refusal(
        *(PeerLost, at, place(2, count=4, suffice=3, timeout=0.1)),
        *("waited 0.1 s for 4 islands, at least ISLAND_MIN=3", "came 2 (isle2 on "),
        *("missing 0, 1, 3", "ISLAND_TIMEOUT"),
    )
    assert not at.get("starters")


def test_start_leaves_out_an_island_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """An island that has come and died is not among those that begin."""
    monkeypatch.setattr(starting, "BEATS", 2.0)
    at = asker()
    comes(at, 1)
    at.set("beat/1", "7")
    refusal(PeerLost, at, place(0, timeout=0.5), "missing 1, 2")


def test_start_without_minimum_does_not_wait() -> None:
    """Without ISLAND_MIN nobody waits for the decision."""
    at = asker()
    assert called(at, place(0, suffice=0, timeout=60.0)) == ((0, 1, 2), False)
    assert not at.get("starters")


@pytest.mark.parametrize(("changes", "other", "own"), [
    ({"count": 4}, "ISLAND_COUNT=4", "3"),
    ({"slots": 5}, "ISLAND_SLOTS=5", "3"),
    ({"stall": 5.0}, "ISLAND_STALL=5", "unset"),
    ({"least": 0}, "ISLAND_MIN=unset", "2"),
])  # fmt: skip
def test_start_refuses_unlike_numbers(changes: dict[str, float], other: str, own: str) -> None:
    """Islands with unlike ISLAND_ numbers are refused at once, newcomers too."""
    at, says = asker(), f"island 1 (isle1) has {other}, isle0 has {own}: set one number everywhere"
    comes(at, 1, **changes)
    for late in (False, True) if "least" not in changes else (False,):
        assert refusal(ValueError, at, place(0, timeout=60.0), late=late) == says


@pytest.mark.parametrize("begun", ["", "0"])
def test_start_with_another_count_opens_the_next_attempt(
    begun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of islands opens the next attempt where the islands of the last one are gone.
    Two islands have stopped; the run goes on with three, and the new one comes first.
    """
    monkeypatch.setattr(starting, "BEATS", 3.5)
    store, found = dist.HashStore(), dict[int, Any]()
    above = WorldStore(store, "the test", 5.0)
    for i in range(2):
        comes(asker(store), i, count=2, slots=2, least=0)
        above.set(f"run/0/slot/{i}", "before")
    if begun:
        above.set("run/0/begun", begun)
    above.set("run/attempt", "0")

    for i in (2, 0, 1):
        own = WorldStore(store, "test", 5.0)
        found[i] = attempts._begin(place(i, suffice=0, timeout=30.0), own)
    for f in found.values():
        assert (f.number, f.late, f.starters) == (1, False, (0, 1, 2))


def test_start_refuses_another_count_beside_a_living_island() -> None:
    """Another number than that of an island that lives is refused on both."""
    store, heard = dist.HashStore(), list[Any]()
    at = asker(store)
    comes(at, 1, count=4)

    def lives(islands: Any) -> bool:
        heard.append((list(islands), bool(at.get("came/0"))))
        return True

    with pytest.raises(ValueError, match="has ISLAND_COUNT=4, isle0 has 3"):
        starting.call(at, place(0), False, lives)
    assert heard == [([1], False)] and at.get("came/0")  # the other one hears of it afterwards


@pytest.mark.parametrize("text", ["[]", "[2, 0]", "[0, 3]", "[-1]", '"ab"', "{", "[[0]]"])
def test_start_refuses_an_unreadable_decision(text: str) -> None:
    """A decision that cannot be read is refused."""
    at = asker()
    at.set("starters", text)
    refusal(ValueError, at, place(0), "cannot be read")


def test_start_waits_on_in_the_next_attempt() -> None:
    """Islands that wait in an attempt that ends begin in the next one."""
    store, found = dist.HashStore(), dict[int, Any]()
    above = WorldStore(store, "the test", 5.0)

    def island(i: int) -> None:
        if i == 1:  # when island 0 has come, the attempt ends
            while not above.get("run/0/came/0"):
                time.sleep(0.01)
            above.set("run/0/ended", "1")
        found[i] = attempts._begin(place(i, count=2, timeout=30.0), above)

    at_once(island, 2, 30.0)
    assert found == {i: (1, 0, False, (0, 1)) for i in range(2)}


def test_start_newcomer_may_die_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an island that waits to join does not end the attempt of those that begin."""
    monkeypatch.setattr(starting, "BEATS", 3.5)
    store = WorldStore(dist.HashStore(), "the test", 5.0)
    at = store.under("run/0")
    store.set("run/attempt", "0")
    at.set("starters", "[0, 2]")
    for life in range(3):
        assert attempts._take(place(1), store) == (0, life, False, ())
    assert not at.get("ended")
    attempts._take(place(2), store)
    taken = attempts._take(place(2), store)  # one of those that begin
    assert taken.number == 1 and at.get("ended") == "2"


def test_start_behind_dead_islands_opens_the_next_attempt() -> None:
    """A machine that was away for all of an attempt, whose islands are gone, begins the next one
    with them: it does not join it, and its checkpoint has a say.
    """
    store, found = dist.HashStore(), dict[int, Any]()
    above = WorldStore(store, "the test", 5.0)
    above.set("run/attempt", "0")
    for i in range(2):
        comes(asker(store), i)
        asker(store).set(f"slot/{i}", "before")
    asker(store).set("starters", "[0, 1]")
    asker(store).set("begun", "0")

    def begin(i: int) -> None:
        while i < 2 and not asker(store).get("ended"):
            time.sleep(0.01)
        found[i] = attempts._begin(place(i, timeout=30.0), WorldStore(store, "the test", 5.0))

    at_once(begin, 3, 30.0)
    assert found == {i: (1, 0, False, (0, 1, 2)) for i in range(3)}
