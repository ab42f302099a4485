"""How an island joins a run under way, on one rank: it reaches all members, follows its donor, and
is a member from a message on.

Until then it has connections and no driver: whoever waits for something moves the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from torch import Tensor

from ..errors import PeerLost, WireError, see
from ..membership.protocol_types import Member, Record, read_record
from ..net.address import join_address
from ..peers import bulk_stream
from ..peers.collectives import ReceivedMessage
from ..peers.header import RESET, WITHIN
from ..peers.join_messages import LONGEST as LONGEST_HEAD
from ..peers.join_messages import (
    WIRES,
    Expected,
    JoinConnections,
    LetIn,
    MessageHead,
    Refusal,
    Request,
    Tick,
    ask_join_server,
    from_bytes,
    listener_key,
    unpacked,
)
from ..peers.pieces import LONGEST
from ..peers.poller import Poller
from ..peers.zeromq import Meeting
from .failure_detector import BEAT
from .notes import Follow, Planned, Ready, Sign, read_note, send_note
from .store_session import newest, record_key

AGAIN = 1.0  # seconds between two questions to somebody who is busy
TO_CONNECT = 15.0  # seconds after which connections that do not stand are given up, and made again


class Reached(JoinConnections):
    """One member, and the connections to it. Arguments: see `JoinConnections`."""

    listens = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._until = time.monotonic() + TO_CONNECT

    @property
    def failed(self) -> str:
        """Why the connections will not stand; empty while they may."""
        if self.gone or self.met or time.monotonic() < self._until:
            return self.gone
        return next((w.trouble for w in self.every if w.trouble), "it does not answer")


class MemberSearch:
    """How one rank of a newcomer reaches the same rank of all members.

    It tells those that it has reached twice a second that this island lives, since the island may
    load for minutes without a word. That is done in the network thread, so a process that stands
    says nothing (beats-of-training); once this island is a member, the driver says so.

    Args:
        meeting: of the peer groups. me, peer_group: this island and its rank. labels: how errors
            name an island, by slot.
    """

    def __init__(
        self,
        poller: Poller,
        meeting: Meeting,
        me: Member,
        peer_group: int,
        labels: Callable[[int], str],
    ):
        self.poller, self.at = poller, meeting.store.under(meeting.prefix)
        self.prefix, self.me, self.peer_group, self.labels = meeting.prefix, me, peer_group, labels
        self.name, self.goes_on = meeting.names[me.slot], meeting.goes_on
        self._found, self._said = list[Reached](), 0.0
        poller.between = self._say

    def _say(self) -> None:
        if (now := time.monotonic()) - self._said < BEAT:
            return
        self._said = now
        wires = [r.wires["notes"] for r in self._found]
        send_note(self.poller, Sign(), [w for w in wires if w.met and not w.gone])

    def reach(
        self, seconds: float, turn: int = 0, since: Record | None = None
    ) -> tuple[list[Reached], Record]:
        """Connections to all members of the newest record, which is read anew as long as somebody
        is busy; and that record.

        Args:
            turn: how many donors this island has lost. since: the record by which it had reached
                the last one.

        Raises:
            PeerLost: a member cannot be reached, or does not let this island in within so many
                seconds; or a record after `since` names this island, and a member that was lost
                comes back under another incarnation only.
            ValueError: a member refuses this island for good.
        """
        end, reached, why = time.monotonic() + seconds, dict[Member, Reached](), ""
        record, name, me, at = since, self.name, self.me, self.at
        key = f"in/{me.slot}.{me.incarnation}" + (f".{turn}" if turn else "")
        # The first rank goes ahead: of two islands that come at once each would else be let into
        # some peer groups only, and both would wait.
        while self.peer_group and not at.get(key):
            if time.monotonic() > end:
                raise PeerLost(f"the first rank of {name} was not let in within {seconds:g} s")
            self.goes_on(f"the first rank of {name}")
            time.sleep(AGAIN / 5)
        while time.monotonic() < end:
            record = newest(at, record)
            if since is not None and record is not None and self._named(since, record):
                raise PeerLost(f"{name} lost its donor when it was a member already")
            members = [m for m in record.members if m.slot != me.slot] if record is not None else []
            self.goes_on(f"its members: {why or 'none answers so far'}")
            # lost meanwhile, or to be tried again
            for m in [m for m in reached if m not in members or reached[m].failed]:
                failed = reached[m].failed
                why = failed and f"{self.labels(m.slot)} could not be connected: {failed}"
                reached.pop(m).close()
            still = record is None or any(m.slot == me.slot for m in record.members)
            if still:
                why = (
                    f"{name} is a member still: the others have not noticed that it was lost, or "
                    f"the store was started from an older copy of its file{see('store-made-anew')}"
                )
            # In the order of slots, and no further than one lets in: so two islands that come at
            # once do not wait for each other.
            for m in [m for m in members if m not in reached]:
                host, answer = self._ask(m)
                if isinstance(answer, Refusal):
                    why = f"{self.labels(m.slot)}: {answer.why}"
                    if answer.final:
                        raise ValueError(f"{name} is refused by {why}")
                    break
                reached[m] = self.poller.run(partial(self._dial, m, host, answer.ports))
            self._found = found = [reached[m] for m in members if m in reached]
            self._wait(found)
            if record is None or still:
                continue
            if members and len(found) == len(members) and all(r.met for r in found):
                at.set(key, "1")
                return found, record
        raise PeerLost(f"{name} could not join within {seconds:g} s: {why or 'no members'}")

    def _named(self, since: Record, until: Record) -> bool:
        """Whether a record of those between two, and these, names this island."""
        epochs = range(since.epoch, until.epoch + 1)
        texts = self.at.get_all([record_key(e) for e in epochs])
        return any(self.me in read_record(text).members for text in texts)

    def _wait(self, reached: Sequence[Reached]) -> None:
        """Let connections come to stand, for a moment."""
        end = time.monotonic() + AGAIN / 5
        wires = [w for r in reached for w in r.every]
        if not wires:
            time.sleep(AGAIN / 5)
        while (left := end - time.monotonic()) > 0 and not all(w.met for w in wires):
            self.poller.dial_again(wires)
            self.poller.wait_until(lambda: all(w.met for w in wires), min(left, 0.02))

    def _ask(self, member: Member) -> tuple[str, LetIn | Refusal]:
        """Ask a member to let this island in (`JoinServer`); where it listens, and what it says."""
        text = self.at.get(listener_key(member, self.peer_group))
        host, _, port = text.rpartition(":")
        if not text:
            unreached = "it has no listener: it cannot be reached from outside (ISLAND_ADDRESS)"
            return host, Refusal(unreached)
        slot, incarnation = self.me
        request = Request("", self.prefix, self.peer_group, slot, incarnation, self.name)
        keys, context = self.poller.keys, self.poller.context
        answer = ask_join_server(context, keys, host, int(port), request, 5.0)
        if isinstance(answer, LetIn | Refusal):
            return host, answer
        time.sleep(AGAIN / 5)  # where nobody listens this is known at once
        return host, Refusal(f"its listener at {text} does not answer")

    def _dial(self, member: Member, host: str, ports: Sequence[int]) -> Reached:
        count = len(ports) - len(WIRES)
        made = Reached(self.poller, self.prefix, self.peer_group, self.me, member, count)
        for wire, port in zip(made.every, ports, strict=True):
            wire.dial(f"tcp://{join_address(host, port)}")
        return made


class Following:
    """What a newcomer's rank reads of its donor, in one peer group, until it takes part.

    While an island follows, `PeerGroup.exchange` and `all_gather` send nothing and give what the
    others have agreed on. What waits raises PeerLost if it will never come.

    Args:
        search: has reached the donor, the member that this island follows.
        become: makes this rank a member, given the record that names it.
        another: follows another donor (or this one `again`) from its snapshot on: what waits ends.
            Called on every rank with a peer group, before `caught_up`; the peer group has another
            `following` then. Raises PeerLost: there is none, or this island is a member already.

    Attributes:
        base: the first message that this island takes part in, if it is of a step; None while it is
            not planned.
        next: the number of the next message.
        outdated: the others have reset parameters since the snapshot (`Exchange.reset`).
    """

    def __init__(
        self,
        search: MemberSearch,
        donor: Reached,
        become: Callable[[Record], None],
        another: Callable[[bool], None],
    ):
        self._poller, self._at, self._me = search.poller, search.at, search.me
        self._first = search.peer_group == 0
        self._donor, self._who = donor, search.labels(donor.member.slot)
        self._become, self.another = become, another
        self._ticks, self._messages = (
            bulk_stream.Reader(search.poller, donor.wires[k], self._who)
            for k in ("ticks", "messages")
        )
        self._asked, self._ready_at = False, 0.0
        self._bodies: list[Tensor] | None = None
        self._record: Record | None = None
        self.base: int | None = None
        self.next = 0
        self.outdated = False
        self._caught_up = 0

    @property
    def fetched(self) -> int:
        """Bytes that the donor has sent so far: snapshot, steps and messages."""
        return self._ticks.taken + self._messages.taken

    @property
    def planned(self) -> bool:
        """Whether it is known from which message this island takes part; on its first rank."""
        if self._record is None:
            notes = self._donor.wires["notes"].notes
            while notes:
                try:
                    note = read_note(notes.popleft())
                except WireError as error:
                    raise PeerLost(f"{self._who} sent what cannot be read: {error}") from None
                if isinstance(note, Planned):
                    self._record = read_record(self._at.get(record_key(note.epoch)))
        return self._record is not None

    def head(self, longest: int, seconds: float, brings: Mapping[str, str]) -> Tensor | None:
        """The head of the snapshot, uint8 of at most `longest` bytes; None: not within so many
        seconds, ask again. The first call asks the donor for one.

        Args:
            brings: name of a tensor -> digest in hexadecimal digits: what need not be sent if it is
                the same there (`DonorFeed.brings`).
        """
        if not self._asked:
            self._asked = True
            follow = Follow(dict(brings))
            fits = len(msgspec.json.encode(follow)) <= LONGEST
            send_note(self._poller, follow if fits else Follow({}), [self._donor.wires["notes"]])
        found = self._ticks.begin(seconds)
        if found is None:
            return None
        if found.item != "snapshot":
            raise WireError(
                f"{self._who} sent a {found.item} instead of a snapshot: use one release everywhere"
            )
        self.next = found.next
        return self._ticks.part(longest, seconds)

    def bodies(self, sizes: Sequence[int], seconds: float) -> list[Tensor] | None:
        """The rest of the snapshot, uint8 of these sizes; None: not within so many seconds, ask
        again. Room is made for no other sizes.
        """
        if self._bodies is None:
            if self._ticks.sizes != list(sizes):
                raise ValueError(
                    f"the snapshot of {self._who} has parts of {self._ticks.sizes} bytes, expected "
                    f"are {list(sizes)}"
                )
            self._bodies = []
        while len(self._bodies) < len(sizes):
            part = self._ticks.part(sizes[len(self._bodies)], seconds)
            if part is None:
                return None
            self._bodies.append(part)
        self._ticks.end()
        bodies, self._bodies = self._bodies, None
        return bodies

    def tick(self, seconds: float) -> Tick | None:
        """The donor's next step; None: not within so many seconds. With none there, this island is
        near, and asks to take part. Asked on the first rank of the island only.
        """
        found = self._ticks.begin(0.0)
        if found is None:
            now = time.monotonic()
            if self._first and not self.planned and now > self._ready_at:
                self._ready_at = now + AGAIN
                send_note(self._poller, Ready(), [self._donor.wires["notes"]])
            found = self._ticks.begin(seconds)
        if found is None:
            return None
        if found.item == "reset":
            raise self._reset()
        part = self._ticks.part(bulk_stream.LONGEST * 16, 60.0)
        if part is None:
            raise PeerLost(f"{self._who} sent half a step")
        self._ticks.end()
        return from_bytes(part, Tick, "a tick")

    def arrived(self, expected: Expected) -> ReceivedMessage:
        """`followed`, of a message in which this island takes no part: it was under way before."""
        found = self.followed(expected)
        assert found is not None, "what was under way before this island came does not wait for it"
        return found

    def followed(self, expected: Expected) -> ReceivedMessage | None:
        """The next message that the others have agreed on, waited for; None where this island takes
        part in it: it is the first one of a step from the base on, as the donor says when it
        launches it. Questions of the members between two steps, which this island does not ask, are
        skipped. In the thread that exchanges.

        Raises:
            WireError: it is another message (`unpacked`).
        """
        while True:
            while (found := self._messages.begin(0.5)) is None:
                pass
            n = found.n
            if found.item == "launch":
                self._messages.end()
                if self.base is not None and n >= self.base:
                    self.next = n
                    return None
                continue
            self.next = n + 1 if n >= 0 else self.next
            sizes = self._messages.sizes[1:]
            head = self._part(LONGEST_HEAD)
            skipped = self._skips(head, expected)
            parts = [
                head,
                *(self._part(size) for size in (sizes if skipped else expected.sizes(head))),
            ]
            self._messages.end()
            if not skipped:
                return unpacked(parts, expected)

    def _skips(self, head: Tensor, expected: Expected) -> bool:
        """Whether it is a question between two steps that a newcomer does not ask: it asks none in
        a step, nor those of the step at which it has caught up and before."""
        headers = from_bytes(head, MessageHead, "a message to follow").headers
        if any(h.kind == RESET for h in headers):
            if {(h.kind, h.step) for h in headers} != {(expected.kind, expected.step)}:
                raise self._reset()
            return False
        if any(h.kind in WITHIN for h in headers):
            return False
        return expected.kind in WITHIN or all(h.step <= self._caught_up for h in headers)

    def _reset(self) -> PeerLost:
        # what a script does beside it, to moments or frozen weights, is in no message to follow
        self.outdated = True
        return PeerLost("the others have reset parameters while this island was joining")

    def _part(self, longest: int) -> Tensor:
        while (part := self._messages.part(longest, 60.0)) is None:
            pass
        return part

    def caught_up(self, step: int) -> None:
        """Become a member: this island has taken all ticks and goes on by itself from `step`. On
        every rank with a peer group.
        """
        while not self.planned:
            self._poller.wait_until(lambda: bool(self._donor.wires["notes"].notes), 0.5)
            if self._donor.wires["notes"].gone:
                raise PeerLost(f"{self._who} is gone: {self._donor.wires['notes'].gone}")
        assert self._record is not None
        self._caught_up = step
        self._become(self._record)
        self.base = self._record.base[self._record.members.index(self._me)]

    def over(self) -> None:
        """Stop following: this island takes part from here on. In the network thread."""
        for k in ("ticks", "messages"):
            self._donor.wires[k].close(0)

    def close(self) -> None:
        """End before this island takes part: close all its connections."""
        self._poller.close(0)
