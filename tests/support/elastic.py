"""Islands that come and go as threads of one process: real connections, drivers and membership, a
store in memory, and deaths at will.

Use it inside `run_ranks(fn, 1, 1)`, so that threads and sockets end with a process of their own.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from fsdp_demo import PeerLost
from fsdp_demo.elastic import connect, driver
from fsdp_demo.elastic.connect import PeerPosition
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.membership import protocol_events
from fsdp_demo.peers import collectives
from fsdp_demo.peers.connection import PeerConnection
from fsdp_demo.peers.header import PAYLOAD, QUESTION
from fsdp_demo.peers.zeromq import Meeting
from fsdp_demo.store.client import WorldStore

from .sealed import part_of_mean, shares
from .threads import warm

CODES = ("fp32", "bf16", "int8", "int4")
LENGTHS = (9000, 4097, 5000, 8192)


class Died(BaseException):
    """A rank that is killed here."""


class Islands:
    """`count` islands of `ranks` ranks each.

    Args:
        dead: see `meet.Limits`. timeout: of the meeting. store: in memory; `change` of it may lead
            addresses elsewhere.
        token: the run's secret. address: of all islands. least: as ISLAND_MIN.

    Attributes:
        lines: of those that have met, by (slot, rank). expelled: (slot, rank) of those that were.
        results: what each thread returned, or the exception that it raised.
    """

    def __init__(
        self,
        count: int,
        ranks: int = 1,
        dead: float = 2.0,
        timeout: float = 20.0,
        store: WorldStore | None = None,
        token: str = "",
        address: str = "127.0.0.1",
        least: int = 1,
    ):
        warm()
        self.address, self.least, self.token = address, least, token
        self.count, self.ranks, self.dead, self.timeout = count, ranks, dead, timeout
        self.store = store or WorldStore(dist.HashStore(), "the test", 5.0)
        self.names = {slot: f"island{slot}" for slot in range(count)}
        self.lines: dict[tuple[int, int], PeerGroup] = {}
        self.expelled: list[tuple[int, int]] = []
        self.results: dict[tuple[int, int], Any] = {}
        self._hubs: dict[Any, tuple[int, int]] = {}
        self._met = threading.Barrier(count * ranks)
        self._undo: list[Callable[[], Any]] = []
        # it would end the process
        expelled = lambda place, record: self.expelled.append((place.slot, place.rank))  # noqa: E731
        self._replace(connect, "expelled", expelled)

    def _replace(self, target: Any, name: str, value: Any) -> None:
        before = getattr(target, name)
        self._undo.append(lambda: setattr(target, name, before))
        setattr(target, name, value)

    def line(self, slot: int, rank: int) -> PeerGroup:
        """Meet the others."""
        meeting = self._meeting(slot, self.names, self.timeout)
        place = PeerPosition(slot, rank, self.ranks, self.names)
        limits = connect.Limits(self.dead, 60.0, self.least)
        line = connect.starting_peers(
            meeting, place, lambda: self.store.under("line"), None, limits
        )
        line.begin()
        self.lines[slot, rank], self._hubs[line._driver._poller] = line, (slot, rank)
        return line

    def _meeting(self, at: int, names: dict[int, str], timeout: float) -> Meeting:
        where = (len(names), tuple(names.values()), self.address, timeout, self.token)
        return Meeting(self.store, "line", at, *where)

    def newcomer(self, slot: int, timeout: float) -> PeerGroup:
        """An island that joins the others, and has reached them."""
        names = {**self.names, slot: f"island{slot}"}
        meeting, place = self._meeting(self.count, names, timeout), PeerPosition(slot, 0, 1, names)
        limits, store = connect.Limits(self.dead), self.store.under("line")
        return connect.newcomer_peers(meeting, place, 0, lambda: store, None, limits)

    def who(self, poller: Any) -> tuple[int, int] | None:
        """(slot, rank) of a hub; None before it has met."""
        return self._hubs.get(poller)

    def run(
        self, fn: Callable[[PeerGroup], Any], limit: float = 40.0
    ) -> dict[tuple[int, int], Any]:
        """fn(line) on a thread for each rank, all at once when all have met; then they wait for
        each other, and part.
        """

        def work(slot: int, rank: int) -> None:
            line = None
            try:
                line = self.line(slot, rank)
                self._met.wait(self.timeout)
                self.results[slot, rank] = fn(line)
                line.wait_stable(self.timeout)
                line.end()
            except BaseException as error:
                if not isinstance(error, PeerLost):
                    traceback.print_exc()
                self.results[slot, rank] = error.with_traceback(None)
            finally:
                if line is not None:
                    line.release()

        ranks = itertools.product(range(self.count), range(self.ranks))
        threads = [threading.Thread(target=work, args=who) for who in ranks]
        for t in threads:
            t.start()
        end = time.monotonic() + limit
        for t in threads:
            t.join(max(end - time.monotonic(), 0.1))
        for undo in reversed(self._undo):
            undo()
        if any(t.is_alive() for t in threads):
            states = {who: line._driver.machine for who, line in self.lines.items()}
            raise AssertionError(f"a rank hangs: {states}")
        return self.results

    def survivors(self, *lost: int) -> list[Any]:
        """What the ranks of all other islands returned, slot by slot; none of them may have
        failed.
        """
        found = []
        for who in sorted(self.results):
            if who[0] not in lost:
                if isinstance(self.results[who], BaseException):
                    raise self.results[who]
                found.append(self.results[who])
        return found

    # ---- deaths --------------------------------------------------------------------------------

    def kill(self, slot: int, rank: int = 0) -> None:
        """As SIGKILL would: its connections close with what has left them, and nothing of it runs
        any more.
        """
        if (slot, rank) in self.lines:
            self.lines[slot, rank]._driver.do(lambda: die(self.lines[slot, rank]._driver))

    def kill_at_frame(self, k: int, *victims: tuple[int, int]) -> list[int]:
        """Kill each of the victims when it hands its k-th piece over, from 0; the ones before have
        left. The count goes on in what is returned, one for each victim."""
        counts, plain = [0] * len(victims), PeerConnection.post_send

        def post_send(wire: PeerConnection, piece: Any, number: int) -> None:
            who = self.who(wire.poller)
            if who in victims:
                counts[victims.index(who)] += 1
                if counts[victims.index(who)] == k + 1:
                    die(self.lines[who]._driver)
            plain(wire, piece, number)

        self._replace(PeerConnection, "post_send", post_send)
        return counts

    def kill_in(self, moment: str, *victims: tuple[int, int], after: bool = False) -> None:
        """Kill each of the victims when its driver does this action of the membership machine the
        first time: "Freeze", "PostReport", "ProposeRecord", "Adopted".
        """
        kind, done = getattr(protocol_events, moment), set[tuple[int, int]]()
        plain = driver._ACTIONS[kind]

        def hooked(me: driver.Driver, action: Any) -> None:
            who = self.who(me._poller)
            if after:
                plain(me, action)
            if who in victims and who not in done:
                done.add(who)
                die(me)
            if not after:
                plain(me, action)

        self._replace(driver, "_ACTIONS", {**driver._ACTIONS, kind: hooked})


def die(me: driver.Driver) -> None:
    """In the driver's own thread."""
    for wire in list(me._poller.wires):
        if not wire.gone:
            wire.serve(zmq.POLLOUT)
    time.sleep(0.01)  # what the library has leaves
    for wire in list(me._poller.wires):
        wire.close(0)
    me._closed = True
    me._store_session._jobs.put(None)
    raise Died


def descriptors() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# ---- messages ----------------------------------------------------------------------------------


def body(slot: int, n: int, size: int = 300) -> Tensor:
    """What an island says in message n."""
    return torch.full((size,), 16 * slot + n % 16, dtype=torch.uint8)


def vectors(slot: int, n: int, scale: int = 1) -> list[tuple[Tensor, str]]:
    """Its vectors in message n: whole numbers, one of each code."""
    generator = torch.Generator().manual_seed(100 * slot + n)
    return [
        (torch.randint(-8, 9, (scale * size,), generator=generator).float(), code)
        for size, code in zip(LENGTHS, CODES, strict=True)
    ]


def weight(slot: int) -> float:
    """Its share in a mean."""
    return float(slot + 1)


def mean_of(slots: Sequence[int], n: int, weights: Sequence[float], scale: int = 1) -> list[Tensor]:
    """What the mean over these islands must be, bit by bit: the calculations of a reduce among
    exactly them.
    """
    found = [vectors(s, n, scale) for s in slots]
    spans = [(v.numel(), code) for v, code in found[0]]
    sent = [shares(own, len(slots)) for own in found]
    each = [list(weights)] * len(spans)
    parts = [
        part_of_mean([s[j] for s in sent], spans, each, j, len(slots)) for j in range(len(slots))
    ]
    return collectives.whole(parts, spans)


def exchanged(line: PeerGroup, n: int, scale: int = 1) -> tuple[tuple[int, ...], list[Tensor]]:
    """Message n, of a kind that follows from n; of whom it was, and all that came back. What can be
    known beforehand is compared.
    """
    slot, head = line.slot, replace(line.header(PAYLOAD, n), weight=weight(line.slot))
    kind = n % 4
    if kind == 0:
        _, came = line.gather(head, body(slot, n))
        sizes = [300] * len(came)
    elif kind == 1:
        own = vectors(slot, n, scale)
        arrived = line.exchange(
            head, body(slot, n, 40), own, lambda headers: [[h.weight for h in headers]] * len(own)
        )
        came, sizes = arrived.bodies, [40] * len(arrived.bodies)
        means = mean_of(line.slots, n, [weight(s) for s in line.slots], scale)
        total = sum(weight(s) * vectors(s, n, scale)[0][0] for s in line.slots)
        exact, what = total / sum(weight(s) for s in line.slots), f"message {n} of {line.slots}"
        assert torch.equal(arrived.means[0], exact), what
        assert all(map(torch.equal, arrived.means, means)) and len(means) == len(own), what
        assert arrived.slots == line.slots
        assert [h.weight for h in arrived.headers] == [weight(s) for s in line.slots]
        _compare(came, line, n, sizes)
        return line.slots, came + arrived.means
    elif kind == 2:
        came = line.gather_any(replace(head, kind=QUESTION), body(slot, n, 5 + slot), 100)
        sizes = [5 + s for s in line.slots]
    else:
        came = line.mean(replace(head, kind=QUESTION), vectors(slot, n, scale))
        means = mean_of(line.slots, n, [1.0] * line.size, scale)
        assert all(torch.equal(a, b) for a, b in zip(came, means, strict=True)), f"message {n}"
        return line.slots, came
    _compare(came, line, n, sizes)
    return line.slots, came


def _compare(came: list[Tensor], line: PeerGroup, n: int, sizes: list[int]) -> None:
    assert len(came) == line.size
    for s, data, size in zip(line.slots, came, sizes, strict=True):
        assert torch.equal(data, body(s, n, size)), f"message {n}: what came from island {s}"


def talk(
    count: int, scale: int = 1, before: Callable[[PeerGroup, int], Any] | None = None
) -> Callable[[PeerGroup], list[Any]]:
    """`count` messages of all kinds, one after another; what came of each."""

    def fn(line: PeerGroup) -> list[Any]:
        out = []
        for n in range(count):
            if before is not None:
                before(line, n)
            out.append(exchanged(line, n, scale))
        return out

    return fn


def agree(found: list[list[Any]]) -> list[tuple[int, ...]]:
    """All have the same, bit by bit; whose contributions each message has. They never grow."""
    slots = [of for of, _ in found[0]]
    for other in found[1:]:
        assert [of for of, _ in other] == slots
        for n, (one, two) in enumerate(zip(found[0], other, strict=True)):
            assert len(one[1]) == len(two[1]) and all(map(torch.equal, one[1], two[1])), n
    assert all(set(b) <= set(a) for a, b in zip(slots, slots[1:], strict=False)), slots
    return slots
