"""Memory before the first step: what an exchange keeps and needs on one rank, from shapes alone.

Three parts, each on the device of the shards and on the host (the recipes' table:
`recipes/benchmarks/memory.py`):

* state: kept all the time. Accumulators on the device; anchors and outer momenta there or, with
  `offload_outer_state`, in pinned memory. torch rounds each pinned block up to a power of two
  (torch 2.13, `CachingHostAllocator.h`), which is not counted: up to as much again.
* in flight: kept between steps while payloads are under way (`schedule.delay`), at its largest.
* workspace: what one step with an exchange takes on top of both, at its largest: messages. A sparse
  or gathered one is small; a vector that is reduced is a copy of what is sent, 4 bytes per element.

What is worked on in windows (packing, transform, selection, decoding, the outer step: under 64 MB)
and copies of single shards come on top of the workspace; a test compares all figures with a
training. Where copies of a shard share the work (active copies), one more workspace holds what they
gather. The inner optimizer's own state is apart (`inner_state`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from ..channels.codec import ChannelCodec
from ..comm.peers import PIECE
from ..config.channel import Channel
from ..config.schema import ExchangeConfig
from ..hosts.optimizers import inner_class, materialise
from .message import MessageLayout
from .plan import Plan, local_shape, plan_model


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: elements of its shards.
        device_state, host_state: kept between steps.
        device_flight, host_flight: kept while payloads are under way, at most.
        device_workspace, host_workspace: taken by a step on top, at most.

    Example:
        >>> from fsdp_demo import preset
        >>> from fsdp_demo.exchange.memory import plan_memory
        >>> found = plan_memory(preset("diloco"), [("layers.0.weight", (1024, 1024))], islands=2)
        >>> found.per_parameter("device_state")  # anchor and outer momentum
        8.0
    """

    parameters: int
    device_state: int
    host_state: int
    device_flight: int
    host_flight: int
    device_workspace: int
    host_workspace: int

    def per_parameter(self, field: str) -> float:
        """One of the figures in bytes per parameter of the rank's shards."""
        return float(getattr(self, field)) / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class _Place:
    """Where things are: whether anchors and momenta are on the host, whether payloads are copied
    there, low-precision parameters.
    """

    host_home: bool
    staged: bool
    low_precision: bool
    islands: int


@dataclass
class _Level:
    """Bytes held now, and the most that were."""

    now: int = 0
    most: int = 0

    def take(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def touch(self, size: int) -> None:
        """Take and give back."""
        self.most = max(self.most, self.now + size)


@dataclass
class _Levels:
    device: _Level = field(default_factory=_Level)
    host: _Level = field(default_factory=_Level)


def plan_memory(
    config: ExchangeConfig,
    tensors: Sequence[tuple[str, Sequence[int]]],
    islands: int,
    shards: int = 1,
    shard: int = 0,
    staged: bool = True,
    low_precision: bool = False,
) -> Memory:
    """What the exchange takes on one rank of an island whose ranks hold each shard once (no
    copies).

    Args:
        tensors: names and whole shapes of the trained parameters, ties once.
        islands: number of replicas.
        shards, shard: FSDP2 shards of the first dim, and which of them (the first is the largest).
        staged: shards are on an accelerator, payloads are copied to the host; False: training on
            the CPU, where `offload_outer_state` changes nothing and both columns are of one memory.
        low_precision: parameters are not fp32 (delta channels then keep what was written into
            them).
    """
    plan = plan_model(config, tensors, islands, shards)[shard]
    place = _Place(staged and config.offload_outer_state, staged, low_precision, islands)
    states = [_state(s, place) for s in plan.sections]
    device, host = (sum(column) for column in zip(*states, strict=True))
    idle, levels = _run(plan, place)
    parameters = sum(prod(local_shape(shape, shards, shard)) for _, shape in tensors)
    spaces = levels.device.most - idle.device.most, levels.host.most - idle.host.most
    return Memory(parameters, device, host, idle.device.most, idle.host.most, *spaces)


def inner_state(
    config: ExchangeConfig,
    tensors: Sequence[tuple[str, Sequence[int]]],
    shards: int = 1,
    shard: int = 0,
) -> int:
    """Bytes of state on one rank of the inner optimizer that the preset is defined for: AdamW 8 per
    parameter, Muon 4 per element of a matrix, SGD none."""
    mine = tuple((n, local_shape(shape, shards, shard)) for n, shape in tensors)
    return _inner_state(config.inner_optimizers[0], mine)


@functools.lru_cache(64)
def _inner_state(optimizer: str, tensors: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    # the planner asks for dozens of settings, which have three optimizers between them
    named = [
        (n, torch.nn.Parameter(torch.empty(shape, device="meta", dtype=torch.float32)))
        for n, shape in tensors
    ]
    made = inner_class(optimizer)(named, lr=1.0)
    materialise(made)
    return sum(
        v.numel() * v.element_size()
        for p, state in made.state.items()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.shape == p.shape
    )


# ---- what is kept ------------------------------------------------------------------------------


def _state(section: ChannelCodec, place: _Place) -> tuple[int, int]:
    """Device and host bytes that `ChannelRunner` and `ChannelCodec` keep."""
    channel, work, device, host = section.channel, 4 * section.layout.numel, 0, 0
    if channel.accumulator is not None:
        device += work
    if channel.source == "delta":
        outer = work * (2 if channel.applier.momentum else 1)  # anchor, momentum
        device, host = (device, host + outer) if place.host_home else (device + outer, host)
        device += work if place.low_precision else 0
    return device + section.known_bytes, host


def _own(section: ChannelCodec) -> int:
    """What a sender needs again when the mean arrives."""
    return 4 * section.layout.numel if section.channel.needs_own else 0


# ---- a cycle of steps --------------------------------------------------------------------------


@dataclass
class _Flight:
    """A message under way: who is in it, what it holds on the device per channel, and on the
    host.
    """

    step: int
    members: list[int]
    own: dict[int, int]
    payload: dict[int, int]
    arrived: int = 0


class _Cycle:
    """Plays the steps of a plan: what `Exchange`, `InFlightQueue` and `ChannelRunner` hold, in
    their order.
    """

    def __init__(self, plan: Plan, place: _Place):
        self.sections, self.place = plan.sections, place
        self.flights: list[_Flight] = []
        self.levels, self.idle = _Levels(), _Levels()

    def step(self, step: int, due: Sequence[int]) -> None:
        """One step in which the channels `due` send."""
        numbers = range(len(self.sections))
        for before, first in ((True, True), (False, True), (False, False)):
            stage = [
                i
                for i in numbers
                if self._channel(i).before_step == before and bool(self._channel(i).after) != first
            ]
            self._launch(step, [i for i in due if i in stage])
            self._land(step, stage)
        self.idle.device.take(self.levels.device.now - self.idle.device.now)
        self.idle.host.take(self.levels.host.now - self.idle.host.now)

    def _channel(self, i: int) -> Channel:
        return self.sections[i].channel

    def _launch(self, step: int, due: Sequence[int]) -> None:
        if not due:
            return
        device = self.levels.device
        host = self.levels.host
        flight = _Flight(step, list(due), {}, {})
        for i in due:
            section = self.sections[i]
            device.touch(_encoding(section))
            flight.own[i], flight.payload[i] = _own(section), _payload(section)
            device.take(flight.own[i] + flight.payload[i])
        message = MessageLayout([self.sections[i] for i in due])
        for size in _job(message, self.place):
            host.touch(size)
        flight.arrived = _arrived(message, self.place)
        host.take(flight.arrived)
        self.flights.append(flight)

    def _land(self, step: int, stage: Sequence[int]) -> None:
        device = self.levels.device
        for flight in list(self.flights):
            for i in [
                i
                for i in stage
                if i in flight.own and flight.step + self._channel(i).schedule.delay <= step
            ]:
                device.take(-flight.payload[i])
                device.touch(_landing(self.sections[i], self.place))
                device.take(-flight.own.pop(i))
            if not flight.own:
                self.levels.host.take(-flight.arrived)
                self.flights.remove(flight)


def _run(plan: Plan, place: _Place) -> tuple[_Levels, _Levels]:
    """What is held between steps and within them, over a cycle of steps; where that is long, of a
    step with all channels at once.
    """
    cycle, numbers = _Cycle(plan, place), range(len(plan.sections))
    if plan.cycle > 10_000:
        cycle.step(0, numbers)
        return cycle.idle, cycle.levels
    delay = max((s.channel.schedule.delay for s in plan.sections), default=0)
    for step in range(plan.cycle, 2 * plan.cycle + delay):
        due = [i for i in numbers if plan.sections[i].channel.schedule.due(step)]
        if due or cycle.flights:
            cycle.step(step, due)
    return cycle.idle, cycle.levels


# ---- on the device -----------------------------------------------------------------------------


def _payload(section: ChannelCodec) -> int:
    """What a message holds of a channel on the device: coded, or fp32 vectors."""
    return section.num_bytes if section.gathered else sum(4 * n for n, _ in section.spans)


def _encoding(section: ChannelCodec) -> int:
    """The most that `accumulate` and `encode` hold at once, with what they hand out."""
    channel = section.channel
    work = 4 * section.layout.numel
    own = _own(section)
    payload = _payload(section)
    # the source is a workspace: that is the vector, or the body is made of it
    if channel.accumulator is None:
        return (
            work
            + (payload if section.gathered or section.codec.seeded else 0)
            + (own if section.codec.sparse else 0)
        )
    rounded = 4 * section.spans[0][0] if section.codec.seeded and channel.taken else 0
    return own + payload + rounded


def _landing(section: ChannelCodec, place: _Place) -> int:
    """The most that decoding and applying a mean hold: windows, but for the bodies on an
    accelerator and what is sent whole.
    """
    if not section.gathered:
        return 0
    bodies = place.islands * section.num_bytes * place.staged
    return bodies + (
        4 * section.layout.num_dense
        if section.codec.indexed
        else sum(4 * n for n, _ in section.spans) * section.codec.seeded
    )


# ---- on the host -------------------------------------------------------------------------------


def _rooms(size: int) -> int:
    """A receive buffer: whole pieces."""
    return max(-(-size // PIECE), 1) * PIECE


def _arrived(message: MessageLayout, place: _Place) -> int:
    """What a message leaves on the host until it is applied: all bodies, and the means."""
    means = sum(4 * n for n, _ in message.vectors)
    if place.islands == 1:
        return message.num_bytes + means
    return message.num_bytes + (place.islands - 1) * _rooms(message.num_bytes) + means


def _job(message: MessageLayout, place: _Place) -> Iterator[int]:
    """What the exchange's thread holds, stage by stage: the gather, then the two legs of the reduce
    (as `collectives.reduce`).
    """
    sizes, size = [4 * n for n, _ in message.vectors], place.islands
    pinned = sum(_payload(s) for s in message.sections.values()) if place.staged else 0
    rooms = (size - 1) * _rooms(message.num_bytes)
    yield pinned + 2 * message.num_bytes + rooms
    if not sizes:
        return
    there, back = (max(leg) for leg in message.legs(size))
    sums, largest = -(-sum(sizes) // size), -(-max(sizes) // size)
    first, second = (size - 1) * _rooms(there), (size - 1) * _rooms(back)
    base = pinned + message.num_bytes + rooms
    yield base + size * there + max(there, first)
    yield base + there + first + sums + largest
    yield base + sums + 2 * back
    yield base + back + second + size * sums + largest
