"""Messages of one rank: what several channels send at one step becomes one message per transport, and comes back as means.

A message is the header, one bit per tensor of each gradient channel (whether this replica has a gradient for it), and the sections of the
gathered channels in the order of the configuration; the vectors of the others follow in the two legs of a reduce. What comes back is
handed out only after all ranks of the island have voted that it arrived.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .agreement import gather_json
from .channel import ActiveChannel, Outgoing
from .codecs.wire import STOP, Header
from .config import Channel
from .island import Island
from .means import Mean
from .staging import Staging
from .transport import Arrived, Courier, Line, PeerLost, gather, reduce

log = logging.getLogger("fsdp_demo")

COUNTED = 4  # header flag: this island has counted tokens, if not since the last exchange
SKIPPED = 2  # header flag: this replica took no step; its plain gradient has no weight


@dataclass
class Flight:
    """One message under way: the channels that share it, what each sent that is not applied yet, and the future of what comes back
    (None on a copy without a line)."""

    step: int
    members: list[str]
    parts: dict[str, Outgoing]
    future: Future[Arrived] | None
    seconds: list[float] = field(default_factory=list)  # when it began and ended on the line


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
        digest: of the configuration, for the header.
    """

    def __init__(self, channels: Sequence[ActiveChannel], courier: Courier | None, island: Island, digest: int, device: torch.device):
        self.channels, self.courier, self.island, self.digest, self.device = list(channels), courier, island, digest, device
        self._staging = Staging(device)
        self.flights: list[Flight] = []
        self.flown: deque[Flown] = deque(maxlen=10_000)
        self.last: dict[str, int] = {}  # the step at which each channel last sent what was not lost
        self.applied: dict[str, int] = {}  # the step of each channel's last message that was applied here
        self.broken = False
        self.stop = False
        self.loss = math.nan

    def launch(self, outgoing: dict[str, Outgoing], step: int, weight: float, loss: Tensor | None, flags: int) -> None:
        """Put what the channels send at this step into one message per transport and hand it to the courier."""
        if not outgoing:
            return
        flight = Flight(step, list(outgoing), outgoing, None)
        self.flights.append(flight)
        self.last.update(dict.fromkeys(outgoing, step + 1))
        if self.courier is None:
            return
        flight.future = self.courier.submit(self._job(self.courier.line, flight, weight, loss, flags))
        self.courier.line.meter.exchanges += 1

    def _job(self, line: Line, flight: Flight, weight: float, loss: Tensor | None, flags: int) -> Callable[[], Arrived]:
        """Start copying a message to the host; returns what sends it and brings back the others', in the courier's thread, where the copy
        is waited for and the loss is read."""
        members = self._members(flight)
        parts = [flight.parts[c.channel.name] for c in members]
        presence = pack_bits([p for part in parts for p in part.present or []])
        bodies, vectors = [p.body for p in parts if p.body is not None], [v for p in parts for v in p.vectors]
        reduced = [c for c in members if not gathered(c)]
        codes = [code for c in reduced for _, code in spans(c)]
        owners = [c.channel for c in reduced for _ in spans(c)]
        losses = [] if loss is None else [loss]
        staged, at = self._staging.to_host([*losses, *bodies, *vectors]), (len(losses), len(losses) + len(bodies))

        def job() -> Arrived:
            flight.seconds.append(time.perf_counter())
            found = staged()
            header = Header(self.digest, flight.step, weight, float(found[0]) if losses else math.nan, flags)
            headers, received = gather(line, header, torch.cat([presence, *found[at[0] : at[1]]]))
            weights = [replica_weights(c, headers) for c in owners]
            means = reduce(line, list(zip(found[at[1] :], codes, strict=True)), weights) if codes else []
            flight.seconds.append(time.perf_counter())
            return Arrived(headers, self._staging.pin(received), self._staging.pin(means))

        return job

    def under_way(self, channel: ActiveChannel) -> list[Outgoing]:
        """What a channel has in flight, oldest first."""
        return [f.parts[channel.channel.name] for f in self.flights if channel.channel.name in f.parts]

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
            for c in ready:
                self._apply(flight, c, arrived, last)
                applied.append(c)
            if not flight.parts:
                self.flights.remove(flight)
                began, ended = flight.seconds if len(flight.seconds) == 2 else (None, None)
                self.flown.append(Flown(flight.step, int(step) if now is None else now, tuple(flight.members), began, ended))
        return applied

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

    def _receive(self, flight: Flight) -> Any:
        """What arrived, after the island's vote; on failure everything under way is undone and an error raised on every rank."""
        error: Exception | None = None
        arrived: Any = None
        if flight.future is not None:
            try:
                arrived = self.courier.wait(flight.future) if self.courier is not None else flight.future.result()
            except Exception as e:  # whatever it is, the other ranks of the island must hear of it in the vote
                error = e
        headers = arrived.headers if isinstance(arrived, Arrived) else []
        failed, stop = self.island.largest(float(error is not None), float(any(h.flags & STOP for h in headers)))
        if failed:
            self.broken = True
            self._drop()
            raise error if error is not None else PeerLost(f"another rank of this island lost its peer at step {flight.step}")
        self.stop |= bool(stop)
        losses = [h.loss for h in headers if not math.isnan(h.loss)]
        self.loss = sum(losses) / len(losses) if losses else self.loss
        return arrived

    def agree_on_resume(self) -> None:
        """What was under way when a state was saved can land only where all replicas have it; all count from one last exchange."""
        under_way, line = [f.step for f in self.flights], None if self.courier is None else self.courier.line
        differ = line is not None and any(theirs != under_way for theirs in gather_json(line, under_way))
        if self.island.largest(float(differ))[0]:
            if under_way:
                log.warning("payloads of steps %s were under way when the state was saved, not all islands have them: dropped", under_way)
            self._drop()
        mine = [self.last[c.channel.name] for c in self.channels]
        first = [min(column) for column in zip(*gather_json(line, mine), strict=True)] if line is not None else mine
        self.last = {c.channel.name: -int(v) for c, v in zip(self.channels, self.island.largest(*(-v for v in first)), strict=True)}

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
        members = self._members(flight)
        before = members[: members.index(c)]
        count = sum(len(m.present) for m in members if m.channel.before_step)
        prefix = (count + 7) // 8
        if present is not None:
            at = sum(len(m.present) for m in before if m.channel.before_step)
            sets = [unpack_bits(body[:prefix], count)[at : at + len(present)] for body in arrived.bodies]
            present = self._share([any(bits) for bits in zip(*sets, strict=True)])
        weights, means, bodies = replica_weights(c.channel, arrived.headers), [], []
        if gathered(c):
            begin, size = prefix + sum(_section_bytes(m) for m in before), _section_bytes(c)
            bodies = [b[begin : begin + size] for b in arrived.bodies]
        else:
            at = sum(len(spans(m)) for m in before if not gathered(m))
            means = arrived.means[at : at + len(spans(c))]
        return c.mean(bodies, means, weights, flight.step), present

    def _share(self, present: list[bool] | None) -> list[bool] | None:
        """A copy beyond the lanes has not heard the other islands: where there are such copies, take the island's union."""
        c = self.channels[0]
        if present is None or c.position.copies == c.lanes:
            return present
        return [bool(v) for v in self.island.largest(*map(float, present))]

    def state(self) -> list[dict[str, Any]]:
        """What is in flight, waited for, as tensors and numbers; nothing if a peer is gone, as if it had not been sent."""
        out = []
        try:
            results = [f.future.result() if f.future is not None else None for f in self.flights]
        except RuntimeError as error:
            log.warning("what was under way is not saved: %s", error)
            self.broken, results = True, []
            self._drop()
        for f, got in zip(self.flights, results, strict=True):
            arrived = None
            if got is not None:  # bodies are views of larger buffers
                bodies = [b.clone() for b in got.bodies]
                headers = [vars(h) for h in got.headers]
                arrived = {"headers": headers, "bodies": bodies, "means": got.means, "decoded": dict(got.decoded)}
            out.append({"step": f.step, "members": f.members, "parts": {k: vars(v) for k, v in f.parts.items()}, "arrived": arrived})
        return out

    def load(self, saved: Sequence[dict[str, Any]]) -> None:
        """Restore `state()`."""
        self.flights = []
        for s in saved:
            flight = Flight(s["step"], list(s["members"]), {k: Outgoing(**v).to(self.device) for k, v in s["parts"].items()}, None)
            if s["arrived"] is not None:
                got, flight.future = s["arrived"], Future()
                headers = [Header(**{**h, "flags": h["flags"] & ~STOP}) for h in got["headers"]]  # that stop has happened
                flight.future.set_result(Arrived(headers, got["bodies"], got["means"], dict(got.get("decoded", {}))))
            self.flights.append(flight)


def replica_weights(channel: Channel, headers: Sequence[Header]) -> list[float]:
    """Each replica's share in a channel's mean: its header's weight, or 1; 0 for the plain gradient of a skipped step.

    Raises:
        RuntimeError: weights are tokens and no island has counted any.
    """
    tokens = channel.reducer.weight == "tokens"
    if tokens and not any(h.weight for h in headers):
        if any(h.flags & COUNTED for h in headers):  # an exchange right after another one, at the end: nobody has seen a token since
            return [1.0] * len(headers)
        raise RuntimeError(f"channel {channel.name!r} weighs islands by tokens, but none called note(tokens=...) since the last one")
    plain = channel.before_step and channel.accumulator is None
    return [0.0 if plain and h.flags & SKIPPED else h.weight if tokens else 1.0 for h in headers]


def gathered(c: ActiveChannel) -> bool:
    """Whether the channel travels in the body of messages."""
    return c.section is not None and c.section.gathered


def spans(c: ActiveChannel) -> list[tuple[int, str]]:
    """Length and code of the channel's vectors."""
    return c.section.spans if c.section is not None else []


def _section_bytes(c: ActiveChannel) -> int:
    return c.section.num_bytes if c.section is not None else 0


def pack_bits(bits: Sequence[bool]) -> Tensor:
    """uint8 [ceil(n / 8)], bit i of the little-endian number is bits[i]."""
    n = (len(bits) + 7) // 8
    number = sum(int(b) << i for i, b in enumerate(bits))
    return torch.frombuffer(bytearray(number.to_bytes(n, "little")), dtype=torch.uint8) if n else torch.empty(0, dtype=torch.uint8)


def unpack_bits(data: Tensor, n: int) -> list[bool]:
    """The inverse of `pack_bits`."""
    number = int.from_bytes(bytes(data.tolist()), "little")
    return [bool(number >> i & 1) for i in range(n)]
