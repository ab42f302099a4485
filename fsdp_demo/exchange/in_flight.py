"""Messages of one rank: what several channels send at one step becomes one message per transport, and comes back as means.

What lies where in a message is said by `message.py`. What comes back is handed out only after all ranks of the island have voted that it
arrived.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..channels.channel import ActiveChannel, Outgoing
from ..channels.decode import Mean
from ..comm.agreement import gather_json
from ..comm.collectives import Arrived, reduce
from ..comm.header import LEAVING, NOT_FINITE, PAYLOAD, STOP, SUMMED, Header
from ..comm.island import Island
from ..comm.peers import Line
from ..comm.worker import Courier
from ..compression.staging import Staging
from ..errors import PeerLost
from .local_status import Said, give_up
from .message import MessageLayout
from .watch import Watch

log = logging.getLogger("fsdp_demo")


@dataclass
class Flight:
    """One message under way: the channels that share it, what each sent that is not applied yet, and the future of what comes back
    (None on a copy without a line).

    `header` is what was said with it, once that is known on the host: a message whose answer was lost is sent again as it was."""

    step: int
    members: list[str]
    parts: dict[str, Outgoing]
    future: Future[Arrived] | None
    seconds: list[float] = field(default_factory=list)  # when it began and ended on the line
    header: Header | None = None
    counted: bool = False

    @property
    def arrived(self) -> Arrived | None:
        """What came back, if it is here; None while it is under way, and where it was lost."""
        done = self.future is not None and self.future.done() and self.future.exception() is None
        return self.future.result() if done and self.future is not None else None


@dataclass(frozen=True)
class Flown:
    """One exchange that has ended: launched in step `step` and applied in step `applied`, the channels in it, and the seconds
    (`time.perf_counter`) between which it was on the line; None for a copy without a line, and for what a resumed run had in flight."""

    step: int
    applied: int
    channels: tuple[str, ...]
    began: float | None
    ended: float | None


class Mailbox:
    """Sends and receives for the channels of one rank, in order.

    Args:
        channels: all channels, in the order of the configuration.
        courier: None on a copy beyond the lanes, which votes and receives inside the island only.
        speaks: this rank logs what it sees in the messages of its line.

    Attributes:
        watch: what it sees there.
    """

    def __init__(self, channels: Sequence[ActiveChannel], courier: Courier | None, island: Island, device: torch.device, speaks: bool):
        self.channels, self.courier, self.island, self.device = list(channels), courier, island, device
        self.watch = Watch(self._line, speaks)
        self._staging = Staging(device)
        self.flights: list[Flight] = []
        self.flown: deque[Flown] = deque(maxlen=10_000)
        self.last: dict[str, int] = {}  # the step at which each channel last sent what was not lost
        self.applied: dict[str, int] = {}  # the step of each channel's last message that was applied here
        self.broken = False
        self.gone: Callable[[float], str] = lambda step: ""  # why what others send at a step will not come
        self._unsent: list[Flight] = []
        self.stop = 0  # flags STOP and LEAVING of what has arrived
        self.loss = math.nan

    @property
    def _line(self) -> Line | None:
        return None if self.courier is None else self.courier.line

    def launch(self, outgoing: dict[str, Outgoing], step: int, said: Said) -> None:
        """Put what the channels send at this step into one message per transport and hand it to the courier."""
        if not outgoing:
            return
        flight = Flight(step, list(outgoing), outgoing, None)
        self.flights.append(flight)
        self.last.update(dict.fromkeys(outgoing, step + 1))
        self._submit(flight, said)

    def _submit(self, flight: Flight, said: Said) -> None:
        if self.courier is not None:
            flight.future = self.courier.submit(self._job(self.courier.line, flight, said))
            self.courier.line.meter.exchanges += 1

    def _again(self, flight: Flight) -> None:
        """Send a message once more, with the same bytes and the same share."""
        h = flight.header or Header(0, flight.step)
        loss = None if math.isnan(h.loss) else torch.full((), h.loss, device=self.device)
        bad = float(bool(h.flags & NOT_FINITE))
        self._submit(flight, Said(h.weight, h.flags & ~(STOP | LEAVING | SUMMED | NOT_FINITE), loss, bad))

    def _job(self, line: Line, flight: Flight, said: Said) -> Callable[[], Arrived]:
        """Start copying a message to the host; returns what sends it and brings back the others', in the courier's thread, where the copy
        is waited for and numbers are read.

        What is refused is refused there, before the island votes: a refusal after the vote would leave its other ranks waiting."""
        message = self._layout(flight)
        presence, bodies, vectors = message.pack(flight.parts)
        numbers = said.numbers(self.device)
        header = line.header(PAYLOAD, flight.step, weight=said.weight, flags=said.flags)
        staged, at = self._staging.to_host([*numbers, *bodies, *vectors]), (len(numbers), len(numbers) + len(bodies))

        def job() -> Arrived:
            flight.seconds.append(time.perf_counter())
            found = staged()
            sections, sent = found[at[0] : at[1]], list(zip(found[at[1] :], [code for _, code in message.vectors], strict=True))
            head = flight.header = _spoken(header, found[: at[0]])
            give_up(float(found[0][2]))
            headers, received = line.gather(head, torch.cat([presence, *sections]))
            self.watch.check(line, headers, message.before_step)
            means = reduce(line, head, sent, message.weights(headers), self.watch.compares) if sent else []
            self.watch.compare(line, received, self.watch.compares and message.blank(sections), bool(sent))
            flight.seconds.append(time.perf_counter())
            return Arrived(headers, self._staging.pin(received), self._staging.pin(means))

        return job

    def under_way(self, channel: ActiveChannel) -> list[Outgoing]:
        """What a channel has in flight, oldest first."""
        return [f.parts[channel.channel.name] for f in self.under_way_of(channel)]

    def under_way_of(self, channel: ActiveChannel) -> list[Flight]:
        """The messages that hold something of a channel which is not applied yet, oldest first."""
        return [f for f in self.flights if channel.channel.name in f.parts]

    def land(self, channels: Sequence[ActiveChannel], step: float, now: int | None = None, last: bool = False) -> list[ActiveChannel]:
        """Wait for and apply, in order, what `channels` launched `delay` or more steps before `step`; returns those applied.

        now: the step after which this really happens, where it is earlier than `step` (a flush); last: see `ActiveChannel.apply`.
        """
        applied = []
        for flight in list(self.flights):
            ready = [c for c in channels if c.channel.name in flight.parts and flight.step + c.channel.clock.delay <= step]
            if not ready:
                continue
            arrived = self._receive(flight)
            healed = arrived is not None and self._left_out(arrived)
            for c in ready:
                self._apply(flight, c, arrived, last or healed)  # nothing of its own is mixed in where that is not finite
                applied.append(c)
            if not flight.parts:
                self.flights.remove(flight)
                began, ended = flight.seconds if len(flight.seconds) == 2 else (None, None)
                self.flown.append(Flown(flight.step, int(step) if now is None else now, tuple(flight.members), began, ended))
        return applied

    def _left_out(self, arrived: Arrived) -> bool:
        """Whether this replica's own contribution was not finite. Of a message from a run with other islands nobody's is known."""
        line, headers = self._line, arrived.headers
        return line is not None and len(headers) == line.size and bool(headers[line.rank].flags & NOT_FINITE)

    def _apply(self, flight: Flight, c: ActiveChannel, arrived: Arrived | None, last: bool) -> None:
        """Decode and apply what arrived for one channel."""
        out = flight.parts[c.channel.name]
        out.body, out.vectors = None, []  # a copy of the model where all is sent; nobody undoes what has arrived
        mean, present = self._section(flight, c, arrived)
        del flight.parts[c.channel.name]
        c.apply(mean, out, present, self.under_way(c), last)
        self.applied[c.channel.name] = flight.step

    def ask(self, job: Callable[[], Any]) -> Any:
        """Run `job` on the line after what is in flight, with the island's vote. None on a copy without a line."""
        flight = Flight(-1, [], {}, None if self.courier is None else self.courier.submit(job))
        return self._receive(flight)

    def _members(self, flight: Flight) -> list[ActiveChannel]:
        return [c for c in self.channels if c.channel.name in flight.members]

    def _layout(self, flight: Flight) -> MessageLayout:
        return MessageLayout([c.section for c in self._members(flight) if c.section is not None])

    def _receive(self, flight: Flight) -> Any:
        """What arrived, after the island's vote; on failure an error on every rank. What is under way stays, to be saved and sent again."""
        error: Exception | None = None
        arrived: Any = None
        if flight.future is not None:
            try:
                step = flight.step if flight.step >= 0 else math.inf
                arrived = self.courier.wait(flight.future, lambda: self.gone(step)) if self.courier else flight.future.result()
            except Exception as e:  # whatever it is, the other ranks of the island must hear of it in the vote
                error = e
        headers = arrived.headers if isinstance(arrived, Arrived) else []
        if headers and not flight.counted and (self._line is None or len(headers) == self._line.size):
            flight.counted, error = True, self.watch.count(self._line, headers, flight.step)
        asked = max((h.flags & (STOP | LEAVING) for h in headers), default=0)
        failed, stop = self.island.largest(float(error is not None), float(asked))
        if failed:
            self.broken = True
            raise error if error is not None else PeerLost(f"another rank of this island lost its peer at step {flight.step}")
        self.stop |= int(stop)
        losses = [h.loss for h in headers if not math.isnan(h.loss)]
        self.loss = sum(losses) / len(losses) if losses else self.loss
        return arrived

    def agree_on_resume(self, step: int) -> None:
        """What was under way when a state was saved is to be sent once more (`send_again`), where not all islands have received it. What
        some have and others will not send is dropped. All count from one last exchange.

        Islands may stand at unlike steps between the same exchanges: who is behind sends at its own time what the others send again now.
        """
        line = self._line
        mine = {"step": step, "flights": [[f.step, f.members, f.arrived is not None] for f in self.flights]}
        everyone = gather_json(line, mine) if line is not None else []
        theirs = [{(s, *members): here for s, members, here in each["flights"]} for each in everyone]
        known = {key for flights in theirs for key in flights}
        lost = any(key not in flights and key[0] < each["step"] for each, flights in zip(everyone, theirs, strict=True) for key in known)
        again = [line is not None and not all(flights.get((f.step, *f.members)) for flights in theirs) for f in self.flights]
        lost |= any(f.members != list(f.parts) for f, wanted in zip(self.flights, again, strict=True) if wanted)  # a part has acted here
        dropped, *repeat = self.island.largest(float(lost), *map(float, again))
        if dropped:
            (apart,) = self.island.largest(float(len({each["step"] for each in everyone}) > 1))
            if apart:
                raise ValueError(
                    "islands resume at unlike steps, and not all hold what was under way: resume all from a checkpoint of one step "
                    "(fsdp-demo inspect shows them)"
                )
            if self.flights:
                steps = [f.step for f in self.flights]
                log.warning("payloads of steps %s were under way when the state was saved, not all islands have them: dropped", steps)
            self._drop()
        mine_last = [self.last[c.channel.name] for c in self.channels]
        first = [min(column) for column in zip(*gather_json(line, mine_last), strict=True)] if line is not None else mine_last
        self.last = {c.channel.name: -int(v) for c, v in zip(self.channels, self.island.largest(*(-v for v in first)), strict=True)}
        self._unsent = [flight for flight, wanted in zip(self.flights, repeat, strict=False) if wanted]

    def send_again(self) -> None:
        """Send what `agree_on_resume` found to be sent once more. The line is the courier's from here on."""
        while self._unsent:
            flight = self._unsent.pop(0)
            log.info("the payload of step %d was under way when the state was saved: sent once more", flight.step)
            self._again(flight)

    def _drop(self) -> None:
        """Forget what is under way, as if it had not been sent."""
        for flight in self.flights:
            for c in self._members(flight):
                if c.channel.name in flight.parts:
                    c.undo(flight.parts[c.channel.name])
                    self.last[c.channel.name] = -1
        self.flights.clear()

    def _section(self, flight: Flight, c: ActiveChannel, arrived: Arrived | None) -> tuple[Mean | Tensor | None, list[bool] | None]:
        """The channel's decoded mean and, for a gradient channel, which tensors any replica had a gradient for."""
        present = flight.parts[c.channel.name].present
        if arrived is None:
            return None, self._share(present)
        if c.channel.name in arrived.decoded:
            return arrived.decoded.pop(c.channel.name).to(self.device), self._share(present)
        found = self._layout(flight).split(c.channel.name, arrived)
        return c.mean(found.bodies, found.means, found.weights, flight.step), self._share(found.present)

    def _share(self, present: list[bool] | None) -> list[bool] | None:
        """A copy beyond the lanes has not heard the other islands: where there are such copies, take the island's union."""
        c = self.channels[0]
        if present is None or c.position.copies == c.lanes:
            return present
        return [bool(v) for v in self.island.largest(*map(float, present))]

    def state(self) -> list[dict[str, Any]]:
        """What is in flight, waited for, as tensors and numbers. After a loss with what was sent but not what should have come back: a
        resumed run sends it once more.

        Raises:
            PeerLost (or what else has failed): if the loss is found only here; called again it gives the state.
        """
        out = []
        if not self.broken:
            try:
                for f in self.flights:
                    if f.future is not None:
                        f.future.result()
            except RuntimeError:
                self.broken = True
                raise
        for f in self.flights:
            got, arrived = f.arrived, None
            if got is not None:  # bodies are views of larger buffers
                bodies = [b.clone() for b in got.bodies]
                headers = [vars(replace(h, number=0)) for h in got.headers]  # on a line that will not be there any more
                arrived = {"headers": headers, "bodies": bodies, "means": got.means, "decoded": dict(got.decoded)}
            said = None if f.header is None else vars(replace(f.header, number=0))
            parts = {k: vars(v) for k, v in f.parts.items()}
            out.append({"step": f.step, "members": f.members, "parts": parts, "arrived": arrived, "said": said})
        return out

    def load(self, saved: Sequence[dict[str, Any]]) -> None:
        """Restore `state()`."""
        self.flights, known = [], {c.channel.name for c in self.channels}  # a model without its buffers has no channel for them
        for s in saved:
            parts = {k: Outgoing(**v).to(self.device) for k, v in s["parts"].items() if k in known}
            flight = Flight(s["step"], list(s["members"]), parts, None)
            if s.get("said") is not None:
                flight.header = Header(**s["said"])
            if s["arrived"] is not None:
                got, flight.future = s["arrived"], Future()
                headers = [Header(**{**h, "flags": h["flags"] & ~(STOP | LEAVING)}) for h in got["headers"]]  # that stop has happened
                flight.future.set_result(Arrived(headers, got["bodies"], got["means"], dict(got.get("decoded", {}))))
            self.flights.append(flight)


def _spoken(header: Header, numbers: Sequence[Tensor]) -> Header:
    """A header with what has come from the device: (loss, bad, run), and the total."""
    loss, bad, _ = numbers[0].tolist()
    total = int(numbers[1]) % 2**64 if len(numbers) > 1 else 0
    return replace(header, loss=loss, total=total, flags=header.flags | NOT_FINITE * bool(bad) | SUMMED * (len(numbers) > 1))
