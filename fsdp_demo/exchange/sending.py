"""The path of one message to the other islands, the worker thread in which exchanges run in order,
and the checks on the answer.

The training thread starts the copies to the host and goes on; signals still reach it. The worker's
thread does the rest, message by message in the order of the peer group: it waits for the copy,
completes the header with numbers from the device, sends the message, then judges, counts and pins
the answer. Refusals are raised there, before the island votes (`in_flight.py`): one after the vote
would leave the island's other ranks waiting.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..channels.channel import ChannelPayload
from ..compression.windows import pinned
from ..config.pairs import PairSchedule
from ..elastic.message_state import Vectors
from ..elastic.peer_group import PeerGroup, PeerUser
from ..peers.collectives import ReceivedMessage
from ..peers.header import (
    ENDING,
    LEAVING,
    NOT_FINITE,
    PASSED,
    PAYLOAD,
    STOP,
    SUMMED,
    Header,
    Meter,
    norm_code,
    norm_of,
    rate_code,
    rate_of,
)
from ..rendezvous.island import IslandGroup
from ..rendezvous.position import ShardPosition
from ..rendezvous.topology import Topology
from .ledger import ExchangeRecord, Ledger, Moved
from .message import HeaderFields, MessageLayout
from .saved_state import InFlightState
from .watch import Norms, Watch, give_up


class Exchanging(Future[Any]):
    """The future result of one exchange.

    Attributes:
        staging: begin and end (`time.perf_counter`) of the worker's wait for the device; Inf until
            then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.staging = (math.inf, math.inf)

    def stage(self, staged: Callable[[], Any]) -> Any:
        """The value of `staged`, which waits for the device; the wait is noted in `staging`."""
        begin = time.perf_counter()
        self.staging = (begin, math.inf)
        found = staged()
        self.staging = (begin, time.perf_counter())
        return found

    def waited(self, since: float, until: float) -> float:
        """Seconds of waiting between two times, but for those in which the device was at work."""
        begin, end = self.staging
        return until - since - max(0.0, min(end, until) - max(begin, since))


class CommWorker:
    """One worker thread that runs exchanges in order, and counts the seconds of exchanges and of
    waits for the link.

    It is a daemon: with an executor's thread the interpreter could not end before a lost peer times
    out.
    """

    def __init__(self, meter: Meter):
        self.meter = meter
        self._jobs: queue.SimpleQueue[
            tuple[Callable[..., Any], Callable[[], Any] | None, Exchanging] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            (job, staged, future), task = task, None
            start, result, failure = time.perf_counter(), None, None
            try:
                if staged is not None:
                    job = partial(job, future.stage(staged))
                    start = time.perf_counter()
                result = job()
            except BaseException as error:  # handed to the thread that waits
                failure = error
            self.meter.seconds_exchanging += time.perf_counter() - start
            del job, staged  # and what they hold, before the thread that waits goes on
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            del future, result, failure

    def submit(
        self, job: Callable[..., Any], staged: Callable[[], Any] | None = None
    ) -> Exchanging:
        """Run `job` after all earlier ones; its result or error is in the future.

        Args:
            staged: waits for the device and returns the argument of `job`. The host runs ahead of
                a GPU, so this wait for the end of the step does not count as time of the link.
        """
        future = Exchanging()
        self._jobs.put((job, staged, future))
        return future

    def wait(self, future: Exchanging) -> Any:
        """Block until `future` is done; the seconds count as waiting, but those of `staged`.

        Raises:
            What the job has raised.
        """
        start = time.perf_counter()
        try:
            return future.result()
        finally:
            self.meter.seconds_waiting += future.waited(start, time.perf_counter())

    def close(self) -> bool:
        """End the thread after all submitted jobs; False if a silent peer holds it."""
        self._jobs.put(None)
        self._thread.join(5.0)
        return not self._thread.is_alive()


class ExchangeConnections:
    """The connections of one rank, opened and closed together: the peer group to the other islands
    with its worker, and the control group inside its own island.

    Args:
        position: of the rank in its island.
        device: of its parameters.
        told_to_end: asked whether this rank was told to end (`PeerUser`).

    Attributes:
        peers: to the ranks with the same shard on the other islands; None on a copy that is not
            active, and when closed.
        active_copies: how many of the copies of a shard have peers.
        worker: runs exchanges on the wire; None on a copy that is not active, and when closed.
        island: the other ranks of this replica.
        meter: of the peer group.
        closed: `close` was called.
        active: whether this rank has, or had until `close`, a peer group.
    """

    def __init__(
        self,
        topology: Topology,
        position: ShardPosition,
        device: torch.device,
        told_to_end: Callable[[], bool],
    ):
        self.closed = self.active = False
        self.meter = Meter()
        self.peers: PeerGroup | None = None
        worker = CommWorker(self.meter)
        self.worker: CommWorker | None = worker
        try:
            user = PeerUser(worker.submit, told_to_end, self.meter)
            self.peers, self.active_copies = topology.join(position, user)
            if self.peers is None:
                self._close_peers()
            self.active = self.peers is not None
            self.island = IslandGroup(topology, position, device)
        except BaseException:  # Ctrl-C while waiting for peers, too
            self._close_peers()
            raise

    def close(self) -> bool:
        """Close all connections; False if a silent peer still holds the worker's thread."""
        self.closed = True
        ended = self._close_peers()
        self.island.release()
        return ended

    def _close_peers(self) -> bool:
        ended = self.worker is None or self.worker.close()
        if self.peers is not None:
            self.peers.release()
        self.worker = self.peers = None
        return ended


@dataclass
class PendingExchange:
    """One message under way.

    Attributes:
        step, members: when it was sent, and the channels that share it.
        parts: the payloads of those channels that have not applied it yet.
        future: of the answer; None on a copy without peers.
        header: as it was sent, once it is known on the host: a message whose answer was lost is
            sent again with it.
        counted: contributions that were left out of it have been counted.
        seconds: when it began and ended on the wire (`time.perf_counter`). waited: seconds for
            which training stood still for it. moved: bytes of its last exchange.
    """

    step: int
    members: list[str]
    parts: dict[str, ChannelPayload]
    future: Exchanging | None = None
    layout: MessageLayout = field(default_factory=lambda: MessageLayout([]))
    header: Header | None = None
    counted: bool = False
    seconds: list[float] = field(default_factory=list)
    waited: float = 0.0
    moved: Moved = field(default_factory=Moved)

    @property
    def late(self) -> bool:
        """Whether this island passes: it contributes nothing to this message."""
        return self.header is not None and self.header.late

    @property
    def arrived(self) -> ReceivedMessage | None:
        """The answer, if it is here; None while it is under way, and where it was lost."""
        future = self.future
        if future is None or not future.done() or future.exception() is not None:
            return None
        return future.result()

    def record(self, applied: int, islands: tuple[int, ...]) -> ExchangeRecord:
        """The record of this message, once all channels have applied it, in step `applied`."""
        began, ended = self.seconds if len(self.seconds) == 2 else (None, None)
        return ExchangeRecord(
            self.step,
            applied,
            tuple(self.members),
            began,
            ended,
            self.waited,
            self.moved.sent,
            self.moved.received,
            islands,
        )

    def state(self) -> InFlightState:
        """The message as it is saved. Bodies are copied, since they are views of larger buffers.
        The numbers in headers are those of a peer group that ends, and are set to 0.
        """
        got = self.arrived
        said = None if self.header is None else replace(self.header, number=0)
        if got is not None:
            headers = [replace(h, number=0) for h in got.headers]
            bodies = [b.clone() for b in got.bodies]
            got = ReceivedMessage(headers, bodies, got.means)
        return InFlightState(self.step, self.members, self.parts, got, said)


class Staging:
    """The copies of messages between the device of the shards and the host. The training thread
    does not wait for them; where shards are on the CPU nothing is copied.

    Args:
        device: of the shards.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = None

    def to_host(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start copying `tensors` (on the device, not written to any more) to pinned memory, on a
        side stream: after the work that is queued already, beside later work.

        Returns:
            A function that waits for the copies and returns them, for another thread than the one
            that trains.
        """
        if self.device.type == "cpu":
            return lambda: list(tensors)
        device = torch.get_device_module(self.device)
        if self._stream is None:
            self._stream = device.Stream(self.device)
        self._stream.wait_stream(device.current_stream(self.device))
        # a thread that waits for it is to sleep, not to keep a core busy for as long as a step
        done = device.Event(**({"blocking": True} if self.device.type == "cuda" else {}))
        with device.stream(self._stream):
            hosts = [pinned(t).copy_(t, non_blocking=True) for t in tensors]
            done.record(self._stream)
        for t in tensors:
            # else its memory may go to others before it has been copied
            t.record_stream(self._stream)

        def wait() -> list[Tensor]:
            # a thread begins on the first device, where this process may have no business
            with device.device(self.device):
                done.synchronize()
            return hosts

        return wait

    def pin(self, tensors: list[Tensor]) -> list[Tensor]:
        """Replace CPU tensors in the list, but those that lie there, by copies in pinned memory,
        from which the device fetches them by itself; each is freed as soon as it has been copied.
        Returns the list.
        """
        if self.device.type != "cpu":
            with torch.get_device_module(self.device).device(self.device):
                for i, t in enumerate(tensors):
                    tensors[i] = t if t.is_pinned() else pinned(t).copy_(t)
        return tensors


class MessageSender:
    """The sender of one rank's messages; a copy that is not active sends nothing.

    Args:
        connections: with the worker that sends.
        device: of the payloads.
        watch: checks headers and bodies of the answers.
        norms: of earlier messages, by which the contributions in answers are judged.
        ledger: counts bytes by channel.
        pairs: the islands of each message, where they are two; None: all.
    """

    def __init__(
        self,
        connections: ExchangeConnections,
        device: torch.device,
        watch: Watch,
        norms: Norms,
        ledger: Ledger,
        pairs: PairSchedule | None,
    ):
        self._connections, self._device, self.pairs = connections, device, pairs
        self._watch, self._norms, self._ledger = watch, norms, ledger
        self._staging = Staging(device)

    def send(self, flight: PendingExchange, fields: HeaderFields) -> None:
        """Hand a message to the worker; its answer comes in `flight.future`."""
        worker, peers = self._connections.worker, self._connections.peers
        if worker is not None and peers is not None:
            flight.future = worker.submit(*self._job(peers, flight, fields))
            peers.meter.exchanges += 1

    def pass_by(self, flight: PendingExchange) -> None:
        """Pass: send zeros without weight. From any thread; the answer is in `flight.future`."""
        worker, peers, layout = self._connections.worker, self._connections.peers, flight.layout
        if worker is None or peers is None:
            return
        flight.header = head = peers.header(PAYLOAD, flight.step, weight=PASSED)

        def job() -> ReceivedMessage:
            flight.seconds.append(time.perf_counter())
            zeros = partial(torch.zeros, device="cpu")
            sent = [(zeros(n, dtype=torch.float32), code) for n, code in layout.vectors]
            body = zeros(layout.body_bytes, dtype=torch.uint8)
            return self._exchanged(peers, flight, head, body, sent)

        flight.future = worker.submit(job)
        peers.meter.exchanges += 1

    def send_again(self, flight: PendingExchange) -> None:
        """Send a message once more, with the same bytes and the same share."""
        if flight.late:
            self.pass_by(flight)
            return
        h = flight.header or Header(0, flight.step)
        loss = (
            None
            if math.isnan(h.loss)
            else torch.full((), h.loss, device=self._device, dtype=torch.float32)
        )
        bad = float(bool(h.flags & NOT_FINITE))
        flags = h.flags & ~(STOP | LEAVING | SUMMED | NOT_FINITE)
        fields = HeaderFields(h.weight, flags, loss, bad, norm=norm_of(h.norm))
        self.send(flight, replace(fields, seconds=rate_of(h.seconds)))

    def packed(
        self, layout: MessageLayout, parts: Mapping[str, ChannelPayload]
    ) -> tuple[Tensor, Vectors]:
        """Body and vectors of a message of these payloads, on the host; nothing is sent."""
        presence, bodies, vectors = layout.pack(parts)
        found = self._staging.to_host([*bodies, *vectors])()
        codes = [code for _, code in layout.vectors]
        return (
            torch.cat([presence, *found[: len(bodies)]]),
            list(zip(found[len(bodies) :], codes, strict=True)),
        )

    def pinned(
        self, flight: PendingExchange, get: Callable[[], ReceivedMessage]
    ) -> ReceivedMessage:
        """The answer from `get` in pinned memory, with contributions marked that are far from the
        others. In the worker's thread.
        """
        arrived = get()
        headers = self._norms.judged(flight.members, arrived.headers)
        self._norms.note(flight.members, flight.step, headers)
        return replace(
            arrived,
            headers=headers,
            bodies=self._staging.pin(arrived.bodies),
            means=self._staging.pin(arrived.means),
        )

    def _job(
        self, peers: PeerGroup, flight: PendingExchange, fields: HeaderFields
    ) -> tuple[Callable[[list[Tensor]], ReceivedMessage], Callable[[], list[Tensor]]]:
        """Start a message's copy to the host: the worker's job with it, and the wait for it."""
        message = flight.layout
        presence, bodies, vectors = message.pack(flight.parts)
        numbers = fields.numbers(self._device)
        said = {"weight": fields.weight, "seconds": rate_code(fields.seconds)}
        header = peers.header(PAYLOAD, flight.step, flags=fields.flags, **said)
        staged = self._staging.to_host([*numbers, *bodies, *vectors])
        at = (len(numbers), len(numbers) + len(bodies))

        def job(found: list[Tensor]) -> ReceivedMessage:
            flight.seconds.append(time.perf_counter())
            sections = found[at[0] : at[1]]
            sent = list(zip(found[at[1] :], [code for _, code in message.vectors], strict=True))
            head = flight.header = _completed(header, found[: at[0]])
            give_up(float(found[0][2]), peers)
            body = torch.cat([presence, *sections])
            return self._exchanged(peers, flight, head, body, sent, sections)

        return job, staged

    def _exchanged(
        self,
        peers: PeerGroup,
        flight: PendingExchange,
        head: Header,
        body: Tensor,
        sent: Vectors,
        sections: Sequence[Tensor] | None = None,
    ) -> ReceivedMessage:
        """The answer to a message. sections: of its body, to be compared with the others'."""
        message, compares = flight.layout, self._watch.compares and sections is not None

        def weigh(headers: Sequence[Header]) -> list[list[float]]:
            self._watch.check(peers, headers, message.before_step)
            return (
                message.weights(self._norms.judged(flight.members, headers))
                if message.vectors
                else []
            )

        before = Moved(peers.meter.bytes_sent, peers.meter.bytes_received)
        with record_function("fsdp_demo::send"):
            among: tuple[int, ...] = ()
            if self.pairs is not None and not head.flags & ENDING:
                schedule = next(iter(message.sections.values())).channel.schedule
                among = self.pairs.members(schedule.round(flight.step), peers.slot)
            arrived = peers.exchange(head, body, sent, weigh, compare=compares, among=among)
        flight.moved = Moved(peers.meter.bytes_sent, peers.meter.bytes_received) - before
        self._ledger.message(message, peers.size, peers.rank, flight.moved)
        if compares and sections is not None and len(arrived.bodies) > 1:
            self._watch.compare(peers, arrived.bodies, message.blank(sections), bool(sent))
        flight.seconds.append(time.perf_counter())
        return self.pinned(flight, lambda: arrived)


def _completed(header: Header, numbers: Sequence[Tensor]) -> Header:
    """A header completed by the numbers that have come from the device."""
    loss, bad, _, norm, rate = numbers[0].tolist()
    total = int(numbers[1]) % 2**64 if len(numbers) > 1 else 0
    flags = header.flags | NOT_FINITE * bool(bad) | SUMMED * (len(numbers) > 1)
    codes = {"norm": norm_code(norm), "rate": rate_code(rate)}
    return replace(header, loss=loss, total=total, flags=flags, **codes)
