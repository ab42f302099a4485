"""The messages of one rank that are under way: what several channels send at one step becomes one
message (`sending.PendingExchange`), and waits here until it is due.

`message.py` has the layout of a message, `sending.py` its path to the others and back. An answer is
handed out, channel by channel, only after all ranks of the island have voted that it is here; the
step (`runtime.py`) lets the channels apply it. `resume.py` has the agreement of islands that
resume.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from ..channels.channel import ChannelPayload, ChannelRunner, Incoming
from ..config.pairs import PairSchedule
from ..config.schema import ExchangeConfig
from ..elastic.peer_group import PeerGroup
from ..errors import PeerLost
from ..peers.collectives import ReceivedMessage
from ..peers.header import EARLY, FAR, LEAVING, NOT_FINITE, STOP, Header
from .ledger import ExchangeRecord, Ledger
from .message import HeaderFields, MessageLayout
from .pace import Pace
from .saved_state import History, InFlightState
from .sending import ExchangeConnections, Exchanging, MessageSender, PendingExchange
from .watch import Norms, Watch

log = logging.getLogger("fsdp_demo")


class InFlightQueue:
    """The messages of one rank, in the order in which they were sent.

    Args:
        connections: with the worker that sends and the island that votes.
        device: of the payloads.
        islands: of the run.
        speaks: this rank logs the findings of `watch`.
        took_part: called with the number of islands in a message that was applied.

    Attributes:
        channels: all of them, in the order of the configuration.
        flights: under way, oldest first; flown: those that have ended.
        last: the step after which each channel has last sent a message that was not lost.
        applied: the step of each channel's last message that was applied here.
        broken: a message was lost.
        unsent: those of `flights` that a resumed run has to send once more.
        replays: a newcomer makes up for steps (`replay.py`), in which it has made no delta that
            could be mixed into the answer.
        watch: the checks on messages. norms: those in the last messages. history: the islands that
            took part in the messages applied here. ledger: bytes by channel.
        waits_since: when training began to wait for a message (`time.monotonic`); 0 while it does
            not wait.
    """

    def __init__(
        self,
        connections: ExchangeConnections,
        device: torch.device,
        islands: int,
        speaks: bool,
        took_part: Callable[[int], None],
    ):
        self.device, self._took_part = device, took_part
        self.connections = connections
        self.watch, self.history = Watch(connections.peers, speaks), History(islands)
        self.flights: list[PendingExchange] = []
        self.flown: deque[ExchangeRecord] = deque(maxlen=10_000)
        self.last: dict[str, int] = {}
        self.applied: dict[str, int] = {}
        self.broken = self.replays = False
        self.ledger, self.waits_since = Ledger(), 0.0
        self.unsent: list[PendingExchange] = []

    def work_with(
        self, channels: Sequence[ChannelRunner], config: ExchangeConfig, pace: Pace
    ) -> None:
        """Set the channels, the method and who hears the islands' speeds: at the start, and where
        the method is chosen later, while nothing is under way. `watch` and `history` stay.
        """
        self.channels, self._pace = list(channels), pace
        in_flight = max((c.channel.schedule.in_flight for c in channels), default=0)
        self.norms = Norms(config.norm_limit, in_flight)
        n = self.history.islands
        pairs = PairSchedule(config.pairs, n, config.seed) if config.pairs and n > 1 else None
        self.sender = MessageSender(
            self.connections, self.device, self.watch, self.norms, self.ledger, pairs
        )

    # ---- sending -------------------------------------------------------------------------------

    def launch(self, outgoing: dict[str, ChannelPayload], step: int, fields: HeaderFields) -> None:
        """Send the payloads of channels at this step as one message."""
        flight = PendingExchange(step, list(outgoing), outgoing, layout=self.layout(outgoing, step))
        self.flights.append(flight)
        self.last.update(dict.fromkeys(outgoing, step + 1))
        self.sender.send(flight, fields)

    def note_check(self, channels: Sequence[ChannelRunner], step: int) -> None:
        """Note that the islands have decided at `step` that these channels do not exchange: as a
        message that was applied, it tells states before it from those behind it.
        """
        self.applied |= {c.channel.name: step for c in channels}

    # ---- what is under way ---------------------------------------------------------------------

    def under_way(self, channel: ChannelRunner) -> list[ChannelPayload]:
        """The payloads of a channel in flight, oldest first."""
        return [
            f.parts[channel.channel.name] for f in self.flights if channel.channel.name in f.parts
        ]

    def sent(self, step: int) -> bool:
        """Whether a message of this step is under way."""
        return any(f.step == step for f in self.flights)

    def overdue(self, channel: ChannelRunner, step: int) -> bool:
        """Whether a payload of a channel should have been applied before `step`."""
        return any(
            out.step + channel.channel.schedule.delay < step for out in self.under_way(channel)
        )

    def oldest(self) -> tuple[list[ChannelRunner], int] | None:
        """Channels yet to apply the oldest message, and the step when the last will; or None."""
        if not self.flights:
            return None
        first = self.flights[0]
        waiting = [c for c in self.channels if c.channel.name in first.parts]
        return waiting, first.step + max(c.channel.schedule.delay for c in waiting)

    # ---- receiving -----------------------------------------------------------------------------

    def receive(
        self,
        channels: Sequence[ChannelRunner],
        step: float,
        now: int | None = None,
        last: bool = False,
    ) -> Iterator[tuple[ChannelRunner, Incoming]]:
        """Wait, in order, for the messages that `channels` launched `delay` or more steps before
        `step`. Gives each channel with its part of the answer, which it must apply before the next
        one is asked for. A collective of the island.

        Args:
            now: the present step, where `step` lies ahead (a flush).
            last: see `Incoming`.
        """
        for flight in list(self.flights):
            ready = [
                c
                for c in channels
                if c.channel.name in flight.parts and flight.step + c.channel.schedule.delay <= step
            ]
            if not ready:
                continue
            arrived = self._wait(flight)
            islands = () if arrived is None else arrived.slots
            told = 0 if arrived is None else self._told(arrived)
            for c in ready:
                if told & FAR:
                    c.drop(flight.parts[c.channel.name])
                foreign = self.replays and c.channel.source == "delta"
                plain = last or foreign or bool(told & (NOT_FINITE | FAR))
                yield c, self._incoming(flight, c, arrived, plain)
                self.applied[c.channel.name] = flight.step
            if not flight.parts:
                self.flights.remove(flight)
                self.flown.append(flight.record(int(step) if now is None else now, islands))

    def _told(self, arrived: ReceivedMessage) -> int:
        """The flags of this replica's own contribution: NOT_FINITE or FAR where it was left out."""
        peers = self.connections.peers
        by_slot = dict(zip(arrived.slots, arrived.headers, strict=False))
        return by_slot[peers.slot].flags if peers is not None and peers.slot in by_slot else 0

    def _incoming(
        self, flight: PendingExchange, c: ChannelRunner, arrived: ReceivedMessage | None, last: bool
    ) -> Incoming:
        """The part of a message that one channel is to apply; it leaves the flight."""
        sent, island = flight.parts[c.channel.name], self.connections.island
        c.release(sent)
        received = None if arrived is None else flight.layout.split(c.channel.name, arrived)
        present = sent.present if received is None else received.present
        # copies that are not active have not heard the other islands: the union of the island
        if present is not None and island.position.num_copies > self.connections.active_copies:
            present = [bool(v) for v in island.max(*map(float, present))]
        del flight.parts[c.channel.name]
        return Incoming(sent, received, present, self.under_way(c), last, flight.late)

    def ask(self, job: Callable[[PeerGroup], Any]) -> Any:
        """Run `job` on the peer group after what is in flight, with the island's vote. None on a
        copy without peers.
        """
        question = PendingExchange(-1, [], {})
        worker, peers = self.connections.worker, self.connections.peers
        if worker is not None and peers is not None:
            question.future = worker.submit(partial(job, peers))
        return self._wait(question)

    def layout(self, members: Collection[str], step: int) -> MessageLayout:
        """The layout of a message of the channels with these names that is sent at `step`."""
        sections = [c.of(step).section for c in self.channels if c.channel.name in members]
        return MessageLayout([s for s in sections if s is not None])

    def _wait(self, flight: PendingExchange) -> Any:
        """The answer to a message, after the island's vote; an error on all ranks where it failed
        on any. Messages under way stay, to be saved and sent again.
        """
        error: Exception | None = None
        arrived: Any = None
        headers: list[Header] = []
        try:
            arrived = self._arrived(flight)
            headers = arrived.headers if isinstance(arrived, ReceivedMessage) else []
            if headers and not flight.counted:
                flight.counted = True
                self.watch.count(self.connections.peers, headers, arrived.slots, flight.step)
        except Exception as e:
            error = e  # of any kind: the other ranks must learn of it in the vote
        asked = max((h.flags & (STOP | LEAVING) for h in headers), default=0)
        failed, stop, rewritten, islands, *paces = self.connections.island.max(
            float(error is not None),
            float(asked),
            float(bool(self.watch.written) and flight.step >= 0),
            float(self.history.islands if self.sender.pairs and headers else len(headers)),
            *self._paces(headers, arrived.slots if headers else ()),
        )
        if failed:
            self.broken = True
            raise error or PeerLost("another rank of this island lost its peer")
        self.watch.take_loss_and_stop(headers, int(stop))
        if rewritten:
            self.watch.tell_of_written(self.connections.island)
        if islands and flight.step >= 0:  # copies that are not active hear of it here
            self._took_part(int(islands))
            self._pace.hear(list(map(int, paces)))
        if headers and flight.step >= 0:
            if self.sender.pairs is None and arrived.slots != self.history.slots:
                self.history.hear(flight.step, arrived.slots)
            told = [*zip(arrived.slots, headers, strict=False)]
            self.history.early = tuple(slot for slot, h in told if h.flags & EARLY)
            self.history.late = tuple(slot for slot, h in told if h.late)
        return arrived

    def _paces(self, headers: Sequence[Header], slots: Sequence[int]) -> list[float]:
        """By the slot of each island 1 + the seconds in its header, 0 for who took no part."""
        told = {slot: h for slot, h in zip(slots, headers, strict=False) if not h.flags & EARLY}
        every = range(self.history.islands) if self._pace.period else ()
        return [1.0 + told[slot].seconds if slot in told else 0.0 for slot in every]

    def _arrived(self, flight: PendingExchange) -> Any:
        """The result of a message's future, None where it has none; notes the time of waiting."""
        if flight.future is None:
            return None
        worker, self.waits_since = self.connections.worker, time.monotonic()
        since = time.perf_counter()
        try:
            with record_function("fsdp_demo::wait"):
                return worker.wait(flight.future) if worker else flight.future.result()
        finally:
            flight.waited += flight.future.waited(since, time.perf_counter())
            self.waits_since = 0.0

    # ---- a run that goes on --------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Count the rounds of all channels from `step`."""
        self.last = {c.channel.name: step for c in self.channels}

    def clear(self) -> None:
        """Wait for the messages under way, and drop them, lost ones, too."""
        self.ask(lambda peers: None)
        self.broken = False
        self.flights.clear()
        self.applied.clear()
        self.norms.load({})

    def note_unsent(self) -> None:
        """Mark messages without an answer as lost, to be saved as unsent: all islands stop."""
        futures = [f.future for f in self.flights if f.future is not None]
        self.broken |= any(not f.done() or f.exception() is not None for f in futures)

    def send_again(self) -> None:
        """Send the `unsent` messages."""
        while self.unsent:
            flight = self.unsent.pop(0)
            log.info(
                "the payload of step %d was under way when the state was saved: sent once more",
                flight.step + 1,
            )
            self.sender.send_again(flight)

    def agree_on(self, last: dict[str, int], unsent: list[PendingExchange]) -> None:
        """Set what islands that resume have agreed on (`last`, `unsent`)."""
        self.last, self.unsent = last, unsent

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Within this context a newcomer makes up for steps (`replays`)."""
        self.replays = True
        try:
            yield
        finally:
            self.replays = False

    # ---- what is kept --------------------------------------------------------------------------

    def state(self) -> list[InFlightState]:
        """The messages in flight with their answers, which are waited for; after a loss without
        them: a resumed run sends the messages once more. Raises PeerLost: the loss is found only
        here. Called again it gives the state.
        """
        if not self.broken:
            try:
                for f in self.flights:
                    if f.future is not None:
                        f.future.result()
            except RuntimeError:
                self.broken = True
                raise
        return [f.state() for f in self.flights]

    def follow(
        self,
        step: int,
        last: Mapping[str, int],
        applied: Mapping[str, int],
        flights: list[PendingExchange],
    ) -> None:
        """Set what the donor of this newcomer had at `step`, with its messages under way."""
        self.begin(step)
        self.last |= last
        self.applied, self.flights = dict(applied), flights

    def load(
        self, saved: Sequence[InFlightState], last: dict[str, int], applied: dict[str, int]
    ) -> None:
        """Restore `state()` and what it was saved with."""
        # it says nothing of buffers: they are averaged at the end
        self.last = dict.fromkeys(self.last, -1) | last
        self.applied = dict(applied)
        # a model without its buffers has no channel for them
        self.flights, known = [], {c.channel.name for c in self.channels}
        peers = self.connections.peers
        for s in saved:
            parts = {name: out.to(self.device) for name, out in s.parts.items() if name in known}
            if not parts:
                continue
            layout = self.layout(s.members, s.step)
            flight = PendingExchange(s.step, s.members, parts, header=s.said, layout=layout)
            if s.arrived is not None:
                # that stop has happened
                headers = [replace(h, flags=h.flags & ~(STOP | LEAVING)) for h in s.arrived.headers]
                # the senders are known where as many islands go on
                same = peers is not None and peers.size == len(headers)
                slots = tuple(range(len(headers))) if same else ()
                flight.future = Exchanging()
                flight.future.set_result(replace(s.arrived, headers=headers, slots=slots))
            self.flights.append(flight)
