"""The connections between islands: bytes, one dead peer among others, tokens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from fsdp_demo import WireError
from fsdp_demo.elastic.connect import Limits, PeerPosition, starting_peers
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.peers.header import PAYLOAD
from fsdp_demo.peers.pieces import LARGEST
from fsdp_demo.peers.zeromq import Meeting, ZeroMQ
from fsdp_demo.store.client import WorldStore

from ..support.elastic import descriptors
from ..support.inside import in_a_process
from ..support.refused import refusal
from ..support.relay import Relay
from ..support.threaded import at_once
from ..support.threaded import values as good

TOKEN = "a secret of these tests only"
SECOND = timedelta(seconds=1)


class Store(WorldStore):
    """A store in memory, whose notes of addresses can be changed on the way."""

    def __init__(self, change: Callable[[str, dict[str, Any]], None] | None = None):
        super().__init__(dist.HashStore(), "the test", 5.0)
        self.change = change

    def set(self, key: str, value: str) -> None:
        note = json.loads(value)
        if self.change:
            self.change(key, note)
        super().set(key, json.dumps(note))


def on_transports(
    fn: Callable[[Any, int], Any],
    count: int,
    store: Store | None = None,
    timeout: float = 10.0,
    **each: Any,
) -> list[Any]:
    """fn(transport, rank) on `count` threads; what each returned, or the exception it raised.
    `each`: lists of what `Meeting` is told.
    """
    store, results = store or Store(), [None] * count
    names = tuple(f"island{i}" for i in range(count))

    def work(rank: int) -> None:
        own = {"address": "127.0.0.1", **{key: values[rank] for key, values in each.items()}}
        try:
            transport = ZeroMQ(Meeting(store, "line", rank, count, names, timeout=timeout, **own))
            results[rank] = fn(transport, rank)
        except Exception as error:
            results[rank] = error.with_traceback(None)

    at_once(work, count, 4 * timeout)
    return results


def on_lines(fn: Callable[[PeerGroup], Any], count: int, **how: Any) -> list[Any]:
    """fn(line) on `count` threads, each a replica of a mesh."""
    names = {i: f"island{i}" for i in range(count)}

    def work(transport: Any, rank: int) -> Any:
        meeting, place = transport._meeting, PeerPosition(rank, 0, 1, names)
        limits = Limits(meeting.timeout, meeting.timeout, count, joins=False)
        line = starting_peers(meeting, place, lambda: meeting.store, None, limits)
        try:
            return fn(line)
        finally:
            line.release()

    return on_transports(work, count, **how)


def on_pieces(fn: Callable[[Any, int], Any], count: int, **how: Any) -> list[Any]:
    """fn(connections, rank) on `count` threads."""

    def work(transport: Any, rank: int) -> Any:
        connections = transport.open(0)
        try:
            return fn(connections, rank)
        finally:
            connections.close()

    return on_transports(work, count, **how)


class Relayed(Store):
    """Leads the connection of rank 1 to rank 0, which listens, through `relay`."""

    relay: Relay

    def __init__(self) -> None:
        def change(key: str, note: dict[str, Any]) -> None:
            if key.endswith("at/0"):
                self.relay = Relay(note["ports"]["1"])
                note["ports"]["1"] = self.relay.port

        super().__init__(change)


def piece(size: int, value: int = 0) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


# ---- the same bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", TOKEN])
@in_a_process
def test_zeromq_bodies_go_both_ways(token: str) -> None:
    """Bodies of several pieces go both ways, with and without a token."""
    n = 3 * LARGEST + 5

    def swap(line: PeerGroup) -> int:
        body = torch.full((n,), line.rank + 1, dtype=torch.uint8)
        _, bodies = line.gather(line.header(PAYLOAD), body)
        return int(bodies[1 - line.rank].sum())

    assert good(on_lines(swap, 2, token=[token] * 2)) == [2 * n, n]


@in_a_process
def test_zeromq_bytes_on_the_wire() -> None:
    """A relay counts the bytes on the wire: 47 a piece (40 where it is short), with keys 66
    more.
    """

    def moved(token: str) -> list[int]:
        store = Relayed()

        def count(connections: Any, rank: int) -> list[int]:
            sizes, found = [1, 100, 300, 70_000, 1 << 20], []  # the first follows the greetings
            for number, size in enumerate(sizes, 1):
                before = store.relay.back
                if rank == 0:
                    connections.send(piece(size), 1, number).wait(10 * SECOND)
                    connections.recv(piece(1), 1, number).wait(10 * SECOND)
                    found.append(store.relay.back - before - size)
                else:
                    connections.recv(piece(size), 0, number).wait(10 * SECOND)
                    time.sleep(0.05)  # for the relay's own count
                    connections.send(piece(1), 0, number).wait(10 * SECOND)
            return found[1:]

        out = good(on_pieces(count, 2, store=store, token=[token] * 2))[0]
        store.relay.close()
        return out

    assert moved("") == [40, 47, 47, 47]
    assert moved(TOKEN) == [40 + 66, 47 + 66, 47 + 66, 47 + 66]


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
@in_a_process
def test_connection_overlong_piece_ends_that_peer_only(early: bool) -> None:
    """An overlong piece ends the connection to its sender; the others go on."""
    met = threading.Barrier(3)

    def talk(connections: Any, rank: int) -> Any:
        room, works = piece(100), []
        if rank == 0 and not early:
            works.append(connections.recv(room, 1, 1))
        met.wait()
        if rank == 1:
            connections.send(piece(101, 7), 0, 1).wait(10 * SECOND)
        if rank == 0 and early:
            connections.send(piece(1), 2, 5).wait(10 * SECOND)
            time.sleep(0.2)
            with pytest.raises(RuntimeError, match="nothing came"):
                # what is early is put aside meanwhile
                connections.recv(piece(1), 2, 9).wait(0.2 * SECOND)
            works.append(connections.recv(room, 1, 1))
        if rank == 0:
            refusal(
                lambda: works[0].wait(10 * SECOND),
                "101 bytes, there is room for 100",
                kind=WireError,
            )
            assert not room.any()
            with pytest.raises(RuntimeError):
                connections.recv(room, 1, 2).wait(10 * SECOND)
        met.wait()
        if rank != 1:
            got = connections.recv(again := piece(200), 2 - rank, 20)
            connections.send(piece(200, rank + 1), 2 - rank, 20).wait(10 * SECOND)
            got.wait(10 * SECOND)
            assert int(again[0]) == 3 - rank
        met.wait()

    good(on_pieces(talk, 3))


@in_a_process
def test_connection_piece_above_the_largest_is_not_read() -> None:
    """A piece beyond the largest size ends the connection unread."""

    def talk(connections: Any, rank: int) -> Any:
        if rank == 1:
            with pytest.raises(RuntimeError, match="closed by peer"):
                connections.send(piece(2 * LARGEST), 0, 1)
                connections.recv(piece(1), 0, 2).wait(10 * SECOND)
            return
        with pytest.raises(RuntimeError, match="closed by peer|announced"):
            connections.recv(piece(4 * LARGEST), 1, 1).wait(10 * SECOND)

    good(on_pieces(talk, 2))


# ---- keys --------------------------------------------------------------------------------------


@in_a_process
def test_token_must_be_the_same() -> None:
    """Islands with another token, with none or with a short one do not meet, and each says why."""
    cases = [["a secret of one kind", "a secret of another"], [TOKEN, ""], ["short", "short"]]
    other, none, short = [
        [f"{type(r).__name__}: {r}" for r in on_pieces(lambda c, r: c, 2, token=tokens)]
        for tokens in cases
    ]
    kind = "another ISLAND_TOKEN: set the same"
    assert all(text.startswith("ValueError") and kind in text for text in other), other
    assert "is set here and not at island 1" in none[0], none
    assert "is set there and not here" in none[1], none
    assert all("5 characters, allowed are 16 or more" in text for text in short)


@in_a_process
def test_token_claimed_but_not_held_is_refused() -> None:
    """A peer that only says that it has the token does not get in; nor does a stranger who comes
    first keep the right one out.
    """

    def forged() -> list[str]:  # the store lies about what the islands compare
        current = threading.local()

        class Lying(Store):
            def get_all(self, keys: Sequence[str]) -> list[str]:
                found = [json.loads(text) if text else {} for text in super().get_all(keys)]
                return [json.dumps({**note, "key": current.mark}) if note else "" for note in found]

        def work(transport: Any, rank: int) -> Any:
            current.mark = transport._keys.mark
            return transport.open(0)

        tokens = ["a secret of one kind", "a secret of another"]
        return [
            f"{type(r).__name__}: {r}"
            for r in on_transports(work, 2, store=Lying(), timeout=2.0, token=tokens)
        ]

    def strangers() -> list[Any]:
        context, join_server = zmq.Context(), []

        def change(key: str, note: dict[str, Any]) -> None:
            if key.endswith("at/0"):
                join_server.append(joining_island := context.socket(zmq.PAIR))
                joining_island.linger = 0
                joining_island.connect(f"tcp://127.0.0.1:{note['ports']['1']}")
                joining_island.send(b"let me in")
                time.sleep(0.3)

        def talk(line: PeerGroup) -> list[int]:
            return [int(b[0]) for b in line.all_gather(piece(5, line.rank))]

        out = good(on_lines(talk, 2, store=Store(change), token=[TOKEN] * 2))
        context.destroy(0)
        return out

    texts, why = forged(), "could not be connected within 2 s"
    assert all(text.startswith("PeerLost") and why in text for text in texts), texts
    assert any("ISLAND_TOKEN" in text for text in texts), texts
    assert strangers() == [[0, 1], [0, 1]]


@in_a_process
def test_connection_second_to_a_port_is_sent_away() -> None:
    """A second connection to a port is sent away, and the first goes on."""
    ports, met = [], threading.Barrier(2)

    def change(key: str, note: dict[str, Any]) -> None:
        if key.endswith("at/0"):
            ports.append(note["ports"]["1"])

    def talk(line: PeerGroup) -> list[int]:
        line.all_gather(piece(5, line.rank))
        met.wait()
        if line.rank == 1:
            context = zmq.Context()
            for _ in range(3):
                with context.socket(zmq.PAIR) as joining_island:
                    joining_island.linger = 200
                    joining_island.connect(f"tcp://127.0.0.1:{ports[0]}")
                    joining_island.send(b"let me in")
                    time.sleep(0.1)
            context.destroy(0)
        met.wait()
        return [int(b[0]) for _ in range(3) for b in line.all_gather(piece(5, line.rank))]

    assert good(on_lines(talk, 2, store=Store(change))) == [[0, 1] * 3] * 2


# ---- cancelled, dead, silent, overtaken --------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "cut", "reset", "silent"])
@in_a_process
def test_connection_dead_peer_leaves_the_others_alone(how: str) -> None:
    """Of three islands one is lost to another: their connection ends, and the messages of the
    others pass.
    """
    met, store = threading.Barrier(3), Relayed()
    why = "nothing came for 1 s" if how == "silent" else "connection closed by peer"

    def talk(connections: Any, rank: int) -> Any:
        met.wait()
        if rank == 0:
            lost = connections.recv(piece(10), 1, 1)
            alive = connections.recv(room := piece(10), 2, 1)
            if how == "silent":
                store.relay.hold()
            elif how != "closed":
                store.relay.cut(how == "reset")
            met.wait()
            limit = SECOND if how == "silent" else 60 * SECOND
            assert refusal(lambda: lost.wait(limit), kind=RuntimeError) == why
            alive.wait(10 * SECOND)
            assert int(room[0]) == 7
            if how != "silent":
                with pytest.raises(RuntimeError, match="closed by peer"):
                    connections.send(piece(10), 1, 2).wait(SECOND)
            connections.send(piece(10, 8), 2, 2).wait(10 * SECOND)
        elif rank == 1:
            met.wait()
            if how == "closed":
                connections.close()
        else:
            met.wait()
            connections.send(piece(10, 7), 0, 1).wait(10 * SECOND)
            connections.recv(room := piece(10), 0, 2).wait(10 * SECOND)
            assert int(room[0]) == 8
        met.wait()

    good(on_pieces(talk, 3, store=store))
    store.relay.close()


@in_a_process
def test_connection_keeps_what_was_sent_before_the_end() -> None:
    """What a peer sent before it left is still received."""
    met = threading.Barrier(2)

    def talk(connections: Any, rank: int) -> Any:
        if rank == 1:
            for n in (1, 2, 3):
                connections.send(piece(1000, n), 0, n).wait(10 * SECOND)
            connections.close()
            met.wait()
            return None
        met.wait()
        time.sleep(0.2)
        rooms = [piece(1000) for _ in range(3)]
        for n, room in enumerate(rooms, 1):
            connections.recv(room, 1, n).wait(10 * SECOND)
        with pytest.raises(RuntimeError, match="closed by peer"):
            connections.recv(piece(1), 1, 4).wait(10 * SECOND)
        return [int(room[0]) for room in rooms]

    assert good(on_pieces(talk, 2))[0] == [1, 2, 3]


@in_a_process
def test_connection_short_message_overtakes_a_long_one() -> None:
    """48 pieces wait behind a relay that holds them; a short message is handed over last and comes
    before the last of them.
    """
    met, store = threading.Barrier(2), Relayed()

    def talk(connections: Any, rank: int) -> Any:
        long = torch.arange(48, dtype=torch.uint8).repeat_interleave(LARGEST)
        if rank == 0:
            store.relay.hold()
            works = [connections.send(part, 1, 1) for part in long.split(LARGEST)]
            works.append(connections.send(piece(100, 3), 1, 2))
            met.wait()
            store.relay.let_go()
            for work in works:
                work.wait(30 * SECOND)
            return None
        room = torch.zeros_like(long)
        works = [connections.recv(part, 0, 1) for part in room.split(LARGEST)]
        short = connections.recv(first := piece(100), 0, 2)
        met.wait()
        short.wait(30 * SECOND)
        before = sum(work.is_completed() for work in works)
        for work in works:
            work.wait(30 * SECOND)
        assert torch.equal(room, long) and int(first[0]) == 3
        return before

    assert good(on_pieces(talk, 2, store=store))[1] < 40
    store.relay.close()


@in_a_process
def test_connection_needs_one_reachable_side() -> None:
    """One of two islands must be reachable; if neither is, both say so."""

    def talk(line: PeerGroup) -> list[int]:
        return [int(b[0]) for b in line.all_gather(piece(5, line.rank))]

    # the lowest rank, which would listen, cannot
    assert on_lines(talk, 3, address=["", "127.0.0.1", "127.0.0.1"]) == [[0, 1, 2]] * 3
    none = [f"{type(r).__name__}: {r}" for r in on_lines(talk, 2, address=["", ""])]
    assert all(text.startswith("ValueError") and "ISLAND_ADDRESS" in text for text in none), none


@in_a_process
def test_connections_leak_no_descriptor_or_thread() -> None:
    """A hundred meetings leave as many descriptors and threads as the first ones."""

    def talk(connections: Any, rank: int) -> None:
        got = connections.recv(piece(100_000), 1 - rank, 1)
        connections.send(piece(100_000), 1 - rank, 1).wait(10 * SECOND)
        got.wait(10 * SECOND)

    for _ in range(3):
        good(on_pieces(talk, 2))
    before = descriptors()
    for _ in range(100):
        good(on_pieces(talk, 2))
    until = time.monotonic() + 20
    # a thread that asked the store may be about to end
    while descriptors() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert descriptors() <= before
