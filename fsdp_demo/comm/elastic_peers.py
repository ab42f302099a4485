"""A peer group whose islands come and go: every exchange on it is a numbered message under the
membership protocol.

What is called is the same as on a `PeerGroup` of fixed members, and so are the bytes. What comes
back may be of fewer islands: `slots` says of which, and `rank`, `size` and `names` follow it,
message by message. A loss raises nothing: the call takes longer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PeerLost
from .collectives import ReceivedMessage
from .counter import Counter
from .driver import Driver
from .epochs import Member
from .header import Header
from .held import Due, Early, Message
from .joining import Expected
from .link import Link
from .newcomer import Follow
from .peers import TCP_SHARE, PeerGroup, Vectors, Weigh, streams
from .tcp import least_round_trip

log = logging.getLogger("fsdp_demo")


class ElasticPeerGroup(PeerGroup):
    """The ranks that hold the same shard on every island that lives.

    Args:
        me: this island. names: of the islands, by slot; those that join later add theirs.
        timeout, link, share: as for `PeerGroup`.
        driver: moves the messages; None for a newcomer until it is a member (`become`).
        slots: of the islands that take part.

    Attributes:
        slots: the islands of the last message. begun: until then the loss of an island ends the
            start.
    """

    elastic = True

    def __init__(
        self,
        me: Member,
        names: Mapping[int, str],
        slots: Sequence[int],
        timeout: float,
        link: Link | None = None,
        share: int = 1,
    ):
        super().__init__(None, 0, 0, [], timeout, link, share)
        self._me, self._names, self._next = me, names, 0
        self._driver: Driver | None = None
        self._counter: Counter | None = None
        self._submit: Callable[[Callable[[], None]], Any] | None = None
        self._follow: Follow | None = None
        self._num_connections, self._since, self._longest_early = 1, 0.0, 0
        self._message: Message | None = None  # under way
        self._wish: Callable[[], bool] = lambda: False
        self._set(slots)

    def drive(self, driver: Driver, num_connections: int = 1) -> None:
        """This rank is a member from now on."""
        self._driver, self._num_connections = driver, num_connections
        driver.allow_early(self._longest_early)
        driver.stopping.wish = self._wish
        if driver.guests is not None:
            self._counter = Counter(driver.guests, driver.do, lambda: self._next)
            if self._submit is not None:
                self._counter.submit = self._submit
            self.desk = self._counter

    def follow(self, follow: Follow, slots: Sequence[int]) -> None:
        """This rank is a newcomer: what the islands at `slots` agree on comes from its donor."""
        self._set(slots)
        self._follow = self.following = follow
        self.begun = True

    def runs_in(self, submit: Callable[[Callable[[], None]], Any]) -> None:
        """See `PeerGroup`."""
        self._submit = submit
        if self._counter is not None:
            self._counter.submit = submit

    def _set(self, slots: Sequence[int]) -> None:
        self.slots = tuple(slots)
        self.rank = self.slots.index(self._me.slot) if self._me.slot in slots else -1
        self.size = len(self.slots)
        self.names = [self._names.get(s, f"island{s}") for s in slots]

    @property
    def slot(self) -> int:
        """See `PeerGroup`."""
        return self._me.slot

    def label(self, j: int) -> str:
        """How errors name the j-th island of the last message."""
        return self.label_of(self.slots[j])

    def label_of(self, slot: int) -> str:
        """See `PeerGroup`."""
        return f"island {slot} ({self._names.get(slot, f'island{slot}')})"

    # ---- messages ------------------------------------------------------------------------------

    def swap(
        self, header: Header, outgoing: Sequence[Tensor], sizes: Sequence[int], setup: bool = False
    ) -> Any:
        """A message of which each island gets another part has no settlement when one is lost."""
        raise NotImplementedError(
            "islands that come and go exchange whole messages: gather, gather_any, exchange, mean, "
            "hand_out"
        )

    def gather(
        self, header: Header, data: Tensor, setup: bool = False
    ) -> tuple[list[Header], list[Tensor]]:
        """See `PeerGroup`."""
        headers, bodies, _ = self._run(header, data, setup=setup)
        return headers, bodies

    def gather_any(self, header: Header, data: Tensor, longest: int) -> list[Tensor]:
        """See `PeerGroup`; one message."""
        return self._run(header, data, longest=longest, setup=True)[1]

    def exchange(
        self, header: Header, body: Tensor, vectors: Vectors, weigh: Weigh, compare: bool = False
    ) -> ReceivedMessage:
        """See `PeerGroup`."""
        headers, bodies, means = self._run(header, body, vectors, weigh, compare=compare)
        return ReceivedMessage(headers, bodies, means, slots=self.slots)

    def mean(self, header: Header, vectors: Vectors) -> list[Tensor]:
        """See `PeerGroup`."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._run(
            header, nothing, vectors, lambda headers: [[1.0] * len(headers)] * len(vectors)
        )[2]

    def hand_out(
        self, header: Header, data: Tensor | None, size: int, donor: int, needs: Sequence[bool]
    ) -> Tensor:
        """See `PeerGroup`. Where any rank needs it, all are sent it.

        Where none does, a message of one byte is sent: it may be that another shard of this island
        is needed, and all ranks of an island send equally many messages.
        """
        mine = data if data is not None else torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._run(header, mine, longest=max(size, 1), setup=True)[1][donor]

    def _run(
        self,
        header: Header,
        data: Tensor,
        vectors: Vectors = (),
        weigh: Weigh = lambda headers: [],
        longest: int | None = None,
        setup: bool = False,
        compare: bool = False,
    ) -> tuple[list[Header], list[Tensor], list[Tensor]]:
        if (followed := self._followed(header, data, vectors, weigh, longest)) is not None:
            return followed
        message = Message(
            self._next,
            self._me,
            header,
            data.clone(),  # it is kept until all have it
            vectors,
            weigh,
            longest,
            self._num_connections,
            compare,
        )
        due = self._taken_part(message)
        out, before = message.result(due), self.slots
        self._set([m.slot for m in message.counted(due.settled)])
        if not self.begun and self.slots != before:
            lost = ", ".join(self.label_of(s) for s in before if s not in self.slots)
            raise PeerLost(f"{lost} was lost while the islands came together")
        self.alike, self.something = message.alike, message.something
        self._account(message.sent, message.received, bool(vectors), setup)
        if self._counter is not None:
            arrived = ReceivedMessage(*out, slots=self.slots)
            self._counter.message(message.n, arrived, message.coded(due))
        return out

    def _followed(
        self, header: Header, data: Tensor, vectors: Vectors, weigh: Weigh, longest: int | None
    ) -> tuple[list[Header], list[Tensor], list[Tensor]] | None:
        """What the others have agreed on, while this island follows; None from the first message on
        that it takes part in.
        """
        follow = self._follow
        if follow is None:
            return None
        spans = [(v.numel(), code) for v, code in vectors]
        wanted = Expected(header.kind, header.step, data.numel(), spans, longest=longest)
        try:
            arrived = follow.followed(wanted)
        except PeerLost as error:
            # it trains already: its supervisor starts it again, as a newcomer
            if self._driver is not None:
                self._driver.expel(f"{error}, before this island took part")
            raise
        if arrived is None:
            self._next, self._follow, self.following = follow.next, None, None
            assert self._driver is not None, "who has a base is a member"
            self._driver.joined(follow.over)
            return None
        weigh(arrived.headers)
        self._set(arrived.slots or self.slots)
        self.meter.count(
            0, sum(b.numel() for b in arrived.bodies) + 4 * sum(m.numel() for m in arrived.means)
        )
        return arrived.headers, arrived.bodies, arrived.means

    def _taken_part(self, message: Message) -> Due:
        """Send the next message, and wait until it is complete."""
        if self._driver is None:
            raise PeerLost("the connections were closed")
        self._next += 1
        if self._counter is not None:
            self._counter.launching(message)
        self._driver.launch(message)
        return self._finished(message)

    def _finished(self, message: Message) -> Due:
        """Do what the message asks for, until it is complete."""
        self._since, self._message = time.monotonic(), message
        try:
            while True:
                task = message.tasks.get()
                if isinstance(task, Due):
                    return task
                if isinstance(task, BaseException):
                    raise task
                task()
        finally:
            self._since, self._message = 0.0, None

    def _account(self, sent: int, received: int, reduced: bool, setup: bool) -> None:
        """A body, or a body and two legs of a reduce. The first leg leaves with the body, and
        nobody waits for an answer: a rehearsed link takes half a round trip for each leg."""
        if setup:
            self.meter.setup_bytes += sent
            return
        self.meter.count(sent, received, 3 if reduced else 1)
        if self.link is not None:
            rate = self.link.bits_per_second
            wire = 8 * max(sent, received) * self.share / (rate * TCP_SHARE) if rate else 0.0
            time.sleep((2 if reduced else 1) * self.link.rtt / 2 + wire)

    # ---- connections ---------------------------------------------------------------------------

    def widen(self, connect: Callable[[int], Any]) -> None:
        """On a long link, add connections: `connect(k)` makes the connections k = 1, 2, ... by
        member, as many on all ranks (`streams`).

        Raises:
            PeerLost: an island was lost.
        """
        if self.size == 1:
            return
        rtt = self.round_trip()
        count = streams(rtt, self.size - 1)
        for k in range(1, count):
            assert self._driver is not None
            self._driver.widen(connect(k))
        self._num_connections = count
        if count > 1:
            log.info("%.0f ms to the other islands: %d connections to each", 1e3 * rtt, count)

    def seen_round_trip(self) -> float:
        """See `PeerGroup`."""
        assert self._driver is not None
        signs, farthest = self._driver.signs, 0.0
        for member in list(signs.notes):
            seen = [least_round_trip(wire.descriptor) for wire in signs.of(member)]
            farthest = max(farthest, min((s for s in seen if s is not None), default=math.inf))
        return farthest

    @property
    def alive(self) -> tuple[int, ...]:
        """The slots of the islands that are members now, as far as this rank hears them."""
        if self._driver is None:
            return self.slots
        rank = self._driver.machine
        return tuple(m.slot for m in rank.record.members if m not in rank.lost)

    @property
    def waiting(self) -> float:
        """See `PeerGroup`."""
        return time.monotonic() - since if (since := self._since) else 0.0

    @property
    def awaited(self) -> tuple[int, ...]:
        """See `PeerGroup`. First those whose body is not here, then those whose part of the mean is
        not."""
        if (message := self._message) is None:
            return ()
        alive, record = self.alive, self._driver.machine.record if self._driver else None
        asked = [] if record is None else record.contributors(message.n)
        others = [m.slot for m in asked if m != self._me and m.slot in alive]
        bodies = {m.slot for m in list(message.bodies)}
        lacking = [slot for slot in others if slot not in bodies]
        if not lacking and message.vectors:
            parts = {m.slot for m, _ in list(message.parts)}
            lacking = [slot for slot in others if slot not in parts]
        return tuple(lacking)

    @property
    def epoch(self) -> int:
        """See `PeerGroup`."""
        return 0 if self._driver is None else self._driver.machine.record.epoch

    def allow_early(self, longest: int) -> None:
        """See `PeerGroup`."""
        self._longest_early = longest
        if self._driver is not None:
            self._driver.allow_early(longest)

    def send_early(self, header: Header, body: Tensor, vectors: Vectors, seconds: float) -> bool:
        """See `PeerGroup`. In the worker's thread, after all that was launched."""
        if self._driver is None or self._follow is not None:
            return False
        return self._driver.send_early(Early.of(self._next, header, body, vectors), seconds)

    def ends_when(self, wish: Callable[[], bool]) -> None:
        """See `PeerGroup`."""
        self._wish = wish
        if self._driver is not None:
            self._driver.stopping.wish = wish

    @property
    def all_end(self) -> bool:
        """See `PeerGroup`."""
        return self._driver is not None and self._driver.stopping.together

    @property
    def abandoned(self) -> bool:
        """See `PeerGroup`."""
        return self._driver is not None and self._driver.abandoned

    def stop_with_all(self, applied_at: int, seconds: float) -> int | None:
        """See `PeerGroup`."""
        return (
            applied_at if self._driver is None else self._driver.stop_with_all(applied_at, seconds)
        )

    def leave(self) -> None:
        """See `PeerGroup`."""
        if self._driver is not None:
            self._driver.leave()

    def expel(self, why: str) -> None:
        """See `PeerGroup`."""
        assert self._driver is not None, "who follows has sent nothing"
        self._driver.expel(why)

    def wait_stable(self, seconds: float) -> bool:
        """Wait until all members have delivered what this rank has; only then may it be sealed in a
        checkpoint.
        """
        if self.unsettled:
            return False
        return (
            self._driver is None
            or self._follow is not None
            or self._driver.wait_stable(self._next, seconds)
        )

    def wait_read(self, seconds: float) -> bool:
        """At the end of a run: wait until all members have delivered what this rank has, or are
        gone. False: the seconds are over.
        """
        return (
            self._driver is None
            or self._follow is not None
            or self._driver.wait_read(self._next, seconds)
        )

    def release(self) -> None:
        """Close the connections; the others hear that this island has finished, or that it
        leaves.
        """
        if self._driver is not None:
            self._driver.close("bye" if self.ending else "leave", 5.0)
        elif self._follow is not None:
            self._follow.close()
        self._driver = None
