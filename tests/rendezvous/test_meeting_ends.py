"""Islands that come together while one of them is killed: who waits looks whether the attempt has
ended, and all meet in the next one.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_demo import PeerLost, Topology
from fsdp_demo.elastic.newcomer import MemberSearch
from fsdp_demo.membership.protocol_types import Member, first_record, record_text
from fsdp_demo.peers import zeromq
from fsdp_demo.peers.poller import Poller
from fsdp_demo.peers.zeromq import Meeting, ZeroMQ
from fsdp_demo.rendezvous import announcement, attempts, starting
from fsdp_demo.rendezvous.position import ShardPosition
from fsdp_demo.store.client import WorldStore

from ..support.inside import in_a_process, in_ranks
from ..support.refused import refusal
from ..support.threaded import at_once


def asker(store: Any = None) -> WorldStore:
    return WorldStore(store or dist.HashStore(), "the test", 5.0).under("run/0")


def place(island: int, count: int = 2, timeout: float = 60.0) -> Topology:
    return Topology("islands", island, count, name=f"isle{island}", endpoint="x:1", timeout=timeout)


def forget() -> None:
    """Be the next life of this island: of the one before nothing is left but what it has said."""
    for pulse in attempts._pulses.values():
        pulse.stop()
    for known in (attempts._pulses, attempts._in_vain, announcement._epochs):
        known.clear()


class Killed(BaseException):
    """An island that is killed here."""


@pytest.mark.parametrize("moment", ["before its addresses", "behind its addresses"])
@in_ranks(3, 1, env={"ISLAND_TIMEOUT": "200"}, timeout=90)
def test_meeting_goes_on_without_a_killed_island(me, moment: str) -> None:
    """Island 1 is killed while three islands meet, and comes back. The others leave that attempt as
    soon as it has ended, far before ISLAND_TIMEOUT, and all meet in the next one.
    """
    starting.BEAT = 0.2
    plain, notes = announcement.starting_peers, ZeroMQ._notes

    def killed(*args: Any) -> Any:
        if moment == "behind its addresses":
            ZeroMQ._notes = lambda *told: notes(*told) and kill()  # type: ignore[method-assign]
            return plain(*args)
        return kill()

    def kill() -> None:
        ZeroMQ._notes = notes  # type: ignore[method-assign]
        raise Killed

    if me.island == 1:
        announcement.starting_peers = killed
    with pytest.raises(Killed if me.island == 1 else PeerLost) as error:
        Topology.from_env().join(ShardPosition())
    assert ("when island 1 left the attempt" in str(error.value)) == (me.island != 1)
    announcement.starting_peers = plain
    forget()
    topology = Topology.from_env()
    peers, _ = topology.join(ShardPosition())
    assert peers is not None
    peers.release()
    assert topology.prefix().rpartition("/")[2] == "1"


def test_meeting_in_vain_ends_the_attempt() -> None:
    """An island that has waited in vain ends the attempt: who comes later opens the next one, and
    does not wait for somebody who has left. One that has begun goes on.
    """
    for begun in ("", "0"):
        at = asker()
        at.set("begun", begun)
        at.set("note/0", '{"name": "isle0"}')
        with pytest.raises(PeerLost, match="missing 1"):
            starting.gather(at, place(0, timeout=0.1), (0, 1), "note", dict[str, Any])
        assert at.get("ended") == ("" if begun else "0")


def test_meeting_note_without_beats_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An island that has left its note and beats no more is missing, until the islands have met;
    one that beats again is not.
    """
    monkeypatch.setattr(starting, "BEAT", 0.05)

    def met(timeout: float, begun: str) -> dict[int, Any]:
        at = asker()
        for key in ("beat/1", "note/0", "note/1"):
            at.set(key, '{"name": "a"}')
        at.set("begun", begun)
        late = threading.Timer(1.5, lambda: at.set("note/2", '{"name": "b"}'))
        late.start()
        try:
            return starting.gather(
                at, place(0, 3, timeout=timeout), (0, 1, 2), "note", dict[str, Any]
            )
        finally:
            late.join()

    with pytest.raises(PeerLost, match=r"came 0 \(a\), 2 \(b\); missing 1\."):
        met(2.5, "")
    assert list(met(60.0, "0")) == [0, 1, 2]


@pytest.mark.parametrize("there", [False, True])
def test_meeting_addresses_are_not_awaited_in_vain(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Who waits for the addresses of an island, or for its connection, hears that the attempt has
    ended.
    """
    monkeypatch.setattr(zeromq, "ASK", 0.05)
    at = asker()
    note = {"host": "127.0.0.1", "ports": {"1": 9}, "key": ""}
    if there:  # where nobody listens any more
        WorldStore(at._store, "the test", 5.0).set("run/0/p/k/at/0", json.dumps(note))

    def goes_on(who: str) -> None:
        starting.goes_on(at, place(1), who)

    meeting = Meeting(at, "p", 1, 2, ("a", "b"), "127.0.0.1", 60.0, goes_on=goes_on)
    threading.Timer(0.5, lambda: at.set("ended", "0")).start()
    with pytest.raises(PeerLost, match=r"isle1 waited for island 0 \(a\), when island 0 left"):
        ZeroMQ(meeting).open("k")


@pytest.mark.parametrize("rank", [0, 1])
def test_meeting_newcomer_does_not_search_in_vain(rank: int) -> None:
    """A newcomer that reaches no member hears that the attempt has ended."""
    at, members = asker(), [Member(0), Member(1)]
    at.set("p/record/0", record_text(first_record(members)))

    def goes_on(who: str) -> None:
        starting.goes_on(at, place(2, 3), who)

    meeting = Meeting(at, "p", 2, 3, ("a", "b", "c"), "127.0.0.1", 60.0, goes_on=goes_on)
    poller = Poller()
    search = MemberSearch(poller, meeting, Member(2), rank, "island {}".format)
    threading.Timer(0.5, lambda: at.set("ended", "0")).start()
    with pytest.raises(PeerLost, match="when island 0 left the attempt"):
        search.reach(60.0)
    poller.close(0)


@in_a_process
def test_meeting_in_a_mesh_after_a_start_that_failed() -> None:
    """Replicas on a store that outlives their processes come together though one of them died
    before the last meeting.
    """
    store, met = dist.HashStore(), list[int]()

    def comes(i: int, timeout: float = 5.0) -> None:
        peers, _ = Topology.from_store(store, i, 2, timeout).join(ShardPosition())
        assert peers is not None
        peers.release()
        met.append(i)

    waited = "waited 0.3 s for the addresses of 2 islands: came 0 (island0); missing 1 (island1)"
    refusal(lambda: comes(0, 0.3), waited, kind=PeerLost)  # the other one died
    at_once(comes, 2, 30.0)
    assert sorted(met) == [0, 1]
