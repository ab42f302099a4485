"""Moving bytes between the ranks that hold the same shard on every island.

A `PeerGroup` is that set of ranks. Everything they tell each other is a numbered message under the
membership protocol, in which everybody sends to everybody directly (one round trip, where a ring
takes R - 1). A ring was measured against it and is not used: among 8 islands it takes 6 times as
long for what is short, and is at most 5 % faster for what is long.

Where islands come and go, what comes back may be of fewer of them: `slots` says of which, and
`rank`, `size` and `names` follow it, message by message. A loss raises nothing: the call takes
longer. It raises where too few are left, as in a mesh, whose members must all stay. A single
replica is a record of one member: nothing is sent, and there is no thread and no socket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import PeerLost
from ..membership.protocol_types import Member, Settlement, first_record
from ..net.link import TCP_SHARE, Link
from ..net.tcp import least_round_trip
from ..peers.collectives import ReceivedMessage, new_vector
from ..peers.connection import PeerConnection
from ..peers.header import ENDING, SETUP, Header, Meter
from ..peers.join_messages import Expected
from .driver import Driver
from .join_server import DonorFeed
from .late_rounds import LateRounds
from .message_state import EarlyMessage, RoundMessage, Vectors, Weigh
from .newcomer import Following


@dataclass
class PeerUser:
    """What the user of a peer group, an exchange, gives it.

    Attributes:
        submit: runs a job in the thread that exchanges, after all that is under way.
        told_to_end: asked in the network thread whether this rank was told to end; the others hear
            of it.
        meter: counts bytes and seconds.
    """

    submit: Callable[[Callable[[], None]], Any] = lambda job: job()
    told_to_end: Callable[[], bool] = lambda: False
    meter: Meter = field(default_factory=Meter)


class PeerGroup:
    """The ranks that hold the same shard on every island that lives, one per island.

    Args:
        me: this island. names: of the islands, by slot; those that join later add theirs.
        slots: of the islands that take part.
        timeout: seconds to wait for the others at the start.
        link: pace of a rehearsal, or None; `share` ranks of this island use it at once.
        user: what the user gives it.

    Attributes:
        slots: the islands of the last message; rank, size, names: this one among them, how many
            they are, and what errors call them.
        digest: of the configuration, once it is agreed.
        num_connections: to each peer, for messages.
        alike, something: of a message to compare, whether all have sent the same of this rank's
            part, and whether that is more than zeros.
        unsettled: not all islands have what this one has, and will not: nothing may be saved.
        donor_feed: where islands may join a run under way, what this one hands them as a donor.
            following: what this one reads as a newcomer, until it takes part.
    """

    def __init__(
        self,
        me: Member,
        names: Mapping[int, str],
        slots: Sequence[int],
        timeout: float,
        link: Link | None = None,
        share: int = 1,
        user: PeerUser | None = None,
    ):
        self.timeout, self.link, self.share = timeout, link, share
        self._user = user or PeerUser()
        self.meter = self._user.meter
        self.digest = 0
        self.alike = self.something = self.unsettled = self._begun = self._ending = False
        self.donor_feed: DonorFeed | None = None
        self.following: Following | None = None
        self._me, self._names, self._next = me, names, 0
        self._driver: Driver | None = None
        self._late_rounds: LateRounds | None = None
        self._closed = False
        self.num_connections, self._longest_early = 1, 0
        self._new_vector: Callable[[int], Tensor] = new_vector
        self._message: RoundMessage | None = None  # under way
        self._set(slots)

    @property
    def told_to_end(self) -> Callable[[], bool]:
        """As in `PeerUser`."""
        return self._user.told_to_end

    def longest_early(self) -> int:
        """Bytes that an island which leaves may send ahead of a message (`send_early`)."""
        return self._longest_early

    def drive(self, driver: Driver, num_connections: int = 1) -> None:
        """Make this rank a member."""
        self._driver, self.num_connections = driver, num_connections
        if self._late_rounds is not None:
            driver.pass_by(self._late_rounds)
        if driver.join_server is not None:
            self.donor_feed = DonorFeed(driver.join_server, self._user.submit, lambda: self._next)

    def follow(self, following: Following, slots: Sequence[int]) -> None:
        """Make this rank a newcomer: what the islands at `slots` agree on comes from its donor."""
        self._set(slots)
        self.following, self._begun = following, True

    def work_with(
        self, longest_early: int, new_vector: Callable[[int], Tensor] = new_vector
    ) -> None:
        """Set what belongs to the method: at the start, and where it is chosen later.

        Args:
            longest_early: bytes that an island which leaves may send ahead of a message
                (`send_early`).
            new_vector: makes room for the mean of a payload of one vector, fp32 [n].
        """
        self._longest_early, self._new_vector = longest_early, new_vector

    def pass_by(self, late_rounds: LateRounds) -> None:
        """As `Driver.pass_by`, also where this rank is a member later."""
        self._late_rounds = late_rounds
        if self._driver is not None:
            self._driver.pass_by(late_rounds)

    def agree_on(self, digest: int) -> None:
        """Name this configuration in every header from now on."""
        self.digest = digest

    def begin(self) -> None:
        """Note that the islands have come together: until then the loss of one ends the start."""
        self._begun = True

    def give_up(self) -> None:
        """Note that not all islands have what this one has (`unsettled`)."""
        self.unsettled = True

    def end(self) -> None:
        """Note that what is sent from now on belongs to `finish()`."""
        self._ending = True

    def _set(self, slots: Sequence[int]) -> None:
        self.slots = tuple(slots)
        self.rank = self.slots.index(self._me.slot) if self._me.slot in slots else -1
        self.size = len(self.slots)
        self.names = [self._names.get(s, f"island{s}") for s in slots]

    @property
    def slot(self) -> int:
        """This island's number in the run."""
        return self._me.slot

    def label(self, j: int) -> str:
        """How errors name the j-th island of the last message."""
        return self.label_of(self.slots[j])

    def label_of(self, slot: int) -> str:
        """How errors name an island by its number in the run."""
        return f"island {slot} ({self._names.get(slot, f'island{slot}')})"

    # ---- messages ------------------------------------------------------------------------------

    def header(self, kind: int, step: int = 0, **fields: Any) -> Header:
        """The header of a message of this rank, but for its number."""
        flags = fields.pop("flags", 0) | ENDING * self._ending
        return Header(self.digest, step, kind=kind, flags=flags, **fields)

    def all_gather(
        self, data: Tensor, kind: int = SETUP, step: int = 0, setup: bool = True
    ) -> list[Tensor]:
        """`data` (uint8, equal length everywhere) of every rank, in rank order."""
        return self.gather(self.header(kind, step), data, setup)[1]

    def gather(
        self, header: Header, data: Tensor, setup: bool = False
    ) -> tuple[list[Header], list[Tensor]]:
        """`all_gather` with the headers."""
        return self._run(header, data, setup=setup)[:2]

    def gather_any(self, header: Header, data: Tensor, longest: int) -> list[Tensor]:
        """`data` (uint8 [n], n > 0, of any length) of every rank, in rank order. Who claims
        more than `longest` bytes, or none, is lost; nothing is made room for before.
        """
        return self._run(header, data, longest=longest, setup=True)[1]

    def exchange(
        self,
        header: Header,
        body: Tensor,
        vectors: Vectors,
        weigh: Weigh,
        compare: bool = False,
        among: Sequence[int] = (),
    ) -> ReceivedMessage:
        """What all replicas send in one message: a body (uint8, equal length everywhere), and
        vectors of which each gets the mean.

        Args:
            vectors: (fp32 [n] on the CPU, code); weigh: from the headers the weights of each, or
                an error, which is raised here. With weights w = weights[i] vector i becomes
                sum_r w_r v_r / sum_r w_r, zeros if all its weights are zero.
            compare: note `alike` and `something`.
            among: the slots of the replicas that take part, this one included, where they are not
                all; all must stay then.
        """
        headers, bodies, means = self._run(
            header, body, vectors, weigh, compare=compare, among=among
        )
        return ReceivedMessage(headers, bodies, means, slots=self.slots)

    def mean(self, header: Header, vectors: Vectors) -> list[Tensor]:
        """The plain mean over the replicas of each (fp32 [n] on the CPU, code)."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._run(
            header, nothing, vectors, lambda headers: [[1.0] * len(headers)] * len(vectors)
        )[2]

    def _run(
        self,
        header: Header,
        data: Tensor,
        vectors: Vectors = (),
        weigh: Weigh = lambda headers: [],
        longest: int | None = None,
        setup: bool = False,
        compare: bool = False,
        among: Sequence[int] = (),
    ) -> tuple[list[Header], list[Tensor], list[Tensor]]:
        if (followed := self._followed(header, data, vectors, weigh, longest)) is not None:
            return followed
        message = RoundMessage(
            self._next,
            self._me,
            header,
            data.clone(),  # it is kept until all have it
            vectors,
            weigh,
            longest,
            self.num_connections,
            compare,
            self._new_vector,
            tuple(map(Member, among)),
        )
        settled = self._taken_part(message)
        out, before = message.result(settled), self.slots
        self._set([m.slot for m in message.counted(settled)])
        if not self._begun and self.slots != before:
            lost = ", ".join(self.label_of(s) for s in before if s not in self.slots)
            raise PeerLost(f"{lost} was lost while the islands came together")
        self.alike, self.something = message.alike, message.something
        if self._driver is not None:
            self._account(message.sent, message.received, bool(vectors), setup)
        if self.donor_feed is not None and self.donor_feed.feeding:
            arrived = ReceivedMessage(*out, slots=self.slots)
            self.donor_feed.message(message.n, arrived, message.coded(settled))
        return out

    def _followed(
        self, header: Header, data: Tensor, vectors: Vectors, weigh: Weigh, longest: int | None
    ) -> tuple[list[Header], list[Tensor], list[Tensor]] | None:
        """What the others have agreed on, while this island follows; else None."""
        following = self.following
        if following is None:
            return None
        spans = [(v.numel(), code) for v, code in vectors]
        wanted = Expected(header.kind, header.step, data.numel(), spans, longest=longest)
        try:
            arrived = following.followed(wanted)
        except PeerLost as error:
            # it trains already: its supervisor starts it again, as a newcomer
            if self._driver is not None:
                self._driver.expel(f"{error}, before this island took part")
            raise
        if arrived is None:
            self._next, self.following = following.next, None
            assert self._driver is not None, "a newcomer that has a base is a member"
            self._driver.joined(following.over)
            return None
        weigh(arrived.headers)
        self._set(arrived.slots or self.slots)
        self.meter.count(
            0, sum(b.numel() for b in arrived.bodies) + 4 * sum(m.numel() for m in arrived.means)
        )
        return arrived.headers, arrived.bodies, arrived.means

    def _taken_part(self, message: RoundMessage) -> Settlement:
        """Send the next message, and wait until it is complete."""
        if self._closed:
            raise PeerLost("the connections were closed")
        self._next += 1
        if self._driver is None:  # a single replica
            settled = first_record([self._me]).settlement(message.n)
            if message.vectors:
                message.average(settled)
            return settled
        if self.donor_feed is not None and self.donor_feed.feeding:
            self.donor_feed.launching(message)
        self._driver.launch(message)
        return self._finished(message)

    def _finished(self, message: RoundMessage) -> Settlement:
        """Do what the message asks for, until it is complete. Among fixed members the damage that
        was found in one of its pieces is the error, not the loss that follows from it.
        """
        self._message = message
        try:
            while True:
                task = message.tasks.get()
                if isinstance(task, Settlement):
                    return task
                if isinstance(task, BaseException):
                    raise task
                task()
        except PeerLost:
            if message.damage is not None and self.fixed:
                raise message.damage from None
            raise
        finally:
            self._message = None

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

    def add_connections(self, connections: Sequence[Mapping[Member, PeerConnection]]) -> None:
        """Deal messages to these connections, too: one to each peer in each of them."""
        for wires in connections:
            assert self._driver is not None
            self._driver.do(partial(self._driver.traffic.widen, wires))
        self.num_connections = 1 + len(connections)

    def seen_round_trip(self) -> float:
        """Seconds of the shortest round trip to the farthest peer, by the kernel; inf: unknown."""
        assert self._driver is not None
        detector, farthest = self._driver.detector, 0.0
        for member in list(detector.notes):
            seen = [least_round_trip(wire.descriptor) for wire in detector.of(member)]
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
    def awaited(self) -> tuple[int, ...]:
        """The numbers of the islands with which the message under way is not done yet; empty where
        none is. First those whose body is not here, then those whose part of the mean is not. Read
        from any thread.
        """
        if (message := self._message) is None:
            return ()
        alive, record = self.alive, self._driver.machine.record if self._driver else None
        asked = [] if record is None else message.among or record.contributors(message.n)
        others = [m.slot for m in asked if m != self._me and m.slot in alive]
        bodies = {m.slot for m in list(message.bodies)}
        lacking = [slot for slot in others if slot not in bodies]
        if not lacking and message.vectors:
            parts = {m.slot for m, _ in list(message.parts)}
            lacking = [slot for slot in others if slot not in parts]
        return tuple(lacking)

    @property
    def fixed(self) -> bool:
        """Whether the members are those of the start, in a mesh or of a single replica: all must
        stay, and who has ended does not come back as a newcomer.
        """
        return self.following is None and (self._driver is None or self._driver.fixed)

    @property
    def epoch(self) -> int:
        """How often the members have changed."""
        return 0 if self._driver is None else self._driver.machine.record.epoch

    def send_early(self, header: Header, body: Tensor, vectors: Vectors, seconds: float) -> bool:
        """Where islands come and go, and this one leaves: send what it contributes to the coming
        message ahead of its time. Whether the others have it within so many seconds. Arguments
        as for `exchange`; `header.weight` is its share in every mean.

        In the worker's thread, after all that was launched.
        """
        if self._driver is None or self.following is not None:
            return False
        early = EarlyMessage.of(self._next, header, body, vectors)
        return self._driver.early_pieces.send(early, seconds)

    @property
    def all_end(self) -> bool:
        """Whether all islands are told to end; only where islands come and go."""
        return self._driver is not None and self._driver.stopping.together

    @property
    def abandoned(self) -> bool:
        """Whether a message comes to nothing, as all islands end: it is to be saved as unsent."""
        return self._driver is not None and self._driver.stopping.gave_up

    def stop_with_all(self, applied_at: int, seconds: float, in_pairs: bool = False) -> int | None:
        """Wait until all have what all have sent: all islands are told to end, and this rank sends
        nothing more. In the worker's thread, after what is under way.

        Args:
            applied_at: how many steps this rank had taken when it last applied a message.
            seconds: to wait at most.
            in_pairs: wait until all stand behind one exchange, or one is further.

        Returns:
            The most that any island says for `applied_at`; None where not all have come so far:
            then nothing may be saved.
        """
        if self._driver is None:
            return applied_at
        return self._driver.stopping.stop_with_all(applied_at, seconds, in_pairs)

    def leave(self, stopped: bool = False) -> None:
        """Tell the others that this island goes on no more, and whether it was told to stop. Fixed
        members are told nothing: they do not go on either, and may still lack its last message.
        """
        if self._driver is not None and not self.fixed:
            self._driver.leave(stopped)

    def expel(self, why: str) -> None:
        """End the process of this island, which has gone wrong and comes back as a newcomer, and
        save nothing. Only where islands come and go.
        """
        assert self._driver is not None, "who follows has sent nothing"
        self._driver.expel(why)

    def wait_stable(self, seconds: float) -> bool:
        """Wait until all members have delivered what this rank has; only then may it be sealed in a
        checkpoint. What fixed members save is saved by all, or counts for nothing.
        """
        if self.unsettled:
            return False
        if self._driver is None or self.fixed or self.following is not None:
            return True
        return self._driver.wait_stable(self._next, seconds)

    def wait_read(self, seconds: float) -> bool:
        """Wait, at the end of a run, until all members have this rank's messages, or are gone."""
        if self._driver is None or self.following is not None:
            return True
        return self._driver.wait_read(self._next, seconds)

    def release(self) -> None:
        """Close the connections; the others hear that this island has finished, or leaves."""
        if self._driver is not None:
            self._driver.close(self._ending or self.fixed, 5.0)
        elif self.following is not None:
            self.following.close()
        self._driver, self._closed = None, True
