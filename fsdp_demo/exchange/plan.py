"""The bytes and the memory of an exchange on one rank, computed from shapes alone. A plan counts
the same messages (`message.py`) as a run, to the byte.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import prod

import torch

from ..channels.codec import ChannelCodec
from ..compression.blocks import WINDOW_GPU, Layout
from ..config.channel import Channel, covers, tensor_layout_kind
from ..config.fragments import expand
from ..config.parts import BLOCK
from ..config.schema import ExchangeConfig
from ..hosts.base import exchangeable
from ..hosts.lowrank import moment_shape
from ..hosts.optimizers import inner_class, materialise
from ..peers.header import HEADER, Meter
from .message import MessageLayout, kept_vector
from .on_change import CHECK


class Plan:
    """The bytes that a list of channels sends on one rank, counted by the meter that training uses.

    Args:
        sections: of the channels, in the order of the configuration.
        size: number of replicas.
        rank: which of them this is (parts of a reduce may differ by an element).
    """

    def __init__(self, sections: Sequence[ChannelCodec], size: int, rank: int = 0):
        self.sections, self.size, self.rank = list(sections), size, rank
        if size > 2 and any(s.channel.applier.acts.pairs for s in sections):
            self.size, self.rank = 2, rank % 2  # with one other island

    @property
    def cycle(self) -> int:
        """Steps after which the pattern of exchanges repeats."""
        return math.lcm(*(s.channel.schedule.sync_every for s in self.sections))

    def due(self, step: int) -> list[tuple[int, ...]]:
        """The messages of a step, each as the numbers of its sections: gradients, then what follows
        the optimizer's step, then what comes after another channel. Each check counts as one.
        """
        stages: list[list[int]] = [[], [], []]
        for i, section in enumerate(self.sections):
            if section.channel.schedule.due(step):
                stages[_stage(section.channel)].append(i)
        return [tuple(members) for members in stages if members]

    def message(self, step: int) -> Meter:
        """Counts of the exchanges that start at `step` (all zero if nothing is due)."""
        total = Meter()
        for members in self.due(step):
            total.add(self._counts(members))
        if self.checks(step):
            total.add(self.check())
        return total

    def checks(self, step: int) -> bool:
        """Whether the islands decide at `step` whether to exchange."""
        schedules = [s.channel.schedule for s in self.sections]
        return self.size > 1 and any(t.due(step) and not t.pure for t in schedules)

    def check(self) -> Meter:
        """Counts of such a decision."""
        meter, size = Meter(), (HEADER.size + CHECK) * (self.size - 1)
        meter.count(size, size)
        return meter

    def rounds(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Bytes sent and received in each round of sends of a message of these sections: bodies to
        all, and where vectors are reduced their parts, and the means of these.
        """
        if self.size == 1:
            return []
        message, others = MessageLayout([self.sections[i] for i in members]), self.size - 1
        found = [(others * message.num_bytes, others * message.num_bytes)]
        if message.vectors:
            there, back = message.legs(self.size)
            found.append((sum(there) - there[self.rank], others * there[self.rank]))
            found.append((others * back[self.rank], sum(back) - back[self.rank]))
        return found

    def _counts(self, members: Sequence[int]) -> Meter:
        """Counts of one message."""
        meter = Meter(exchanges=1)
        for sent, received in self.rounds(members):
            meter.count(sent, received)
        return meter

    def over(self, steps: range) -> Meter:
        """Sums of `message` over a range of steps."""
        total = Meter()
        for step in steps:
            total.add(self.message(step))
        return total

    def average(self) -> tuple[float, float, float]:
        """(bytes sent, bytes received, messages) per step: the means over a cycle. Where that is
        longer than 10 000 steps, each channel's exchanges count alone, each with a header, without
        checks.
        """
        if self.cycle <= 10_000:
            found = [(self.over(range(self.cycle, 2 * self.cycle)), self.cycle)]
        else:
            periods = [s.channel.schedule.sync_every for s in self.sections]
            found = [(self._counts([i]), period) for i, period in enumerate(periods)]
        return (
            sum(m.bytes_sent / steps for m, steps in found),
            sum(m.bytes_received / steps for m, steps in found),
            sum(m.messages / steps for m, steps in found),
        )

    def most(self) -> Meter:
        """The step of a cycle that sends the most bytes (all channels, where a cycle is long)."""
        if self.cycle > 10_000:
            return self._counts(range(len(self.sections)))
        return max(
            (self.message(step) for step in range(self.cycle, 2 * self.cycle)),
            key=lambda m: m.bytes_sent,
        )


def _stage(channel: Channel) -> int:
    """The number of the channel's message within a step."""
    return 0 if channel.before_step else 2 if channel.after else 1


def plan_model(
    config: ExchangeConfig,
    tensors: Sequence[tuple[str, Sequence[int]]],
    islands: int,
    shards: int = 1,
    rank: int = 0,
) -> list[Plan]:
    """The plans of the ranks of one island, one per shard.

    Args:
        tensors: names and whole shapes of the trained parameters, ties once.
        islands: number of replicas; rank: which of them.
        shards: FSDP2 shards of the first dim, ceil(rows / shards) rows each.
    """
    channels, plans = expand(config, [n for n, _ in tensors]), []
    for shard in range(shards):
        sections = []
        for channel in channels:
            mine = [
                (n, local_shape(shape, shards, shard)) for n, shape in tensors if covers(channel, n)
            ]
            low = config.inner_rank if channel.state_name else 0
            layout = Layout(
                [moment_shape(n, shape, low) for n, shape in mine],
                [tensor_layout_kind(channel, n) for n, _ in mine],
            )
            sections.append(ChannelCodec(layout, channel, islands, config.seed))
        plans.append(Plan(sections, islands, rank))
    return plans


def local_shape(shape: Sequence[int], shards: int, shard: int) -> tuple[int, ...]:
    """The local shape of an FSDP2 shard: ceil(rows / shards) rows, fewer in the last ones."""
    if shards == 1 or not shape:
        return tuple(shape)
    rows = -(-shape[0] // shards)
    return (max(0, min(rows, shape[0] - shard * rows)), *shape[1:])


# ---- memory ------------------------------------------------------------------------------------
#
# Three parts, each on the device of the shards and on the host (`benchmarks/memory.py`):
#
# * state: kept all the time. Accumulators on the device; anchors and outer momenta there or, with
#   `offload_outer_state`, in pinned memory. torch rounds each pinned block up to a power of two
#   (torch 2.13, `CachingHostAllocator.h`), which is not counted: up to as much again. On a CPU a
#   vector that is sent whole in every step, and its mean, keep their memory (`VectorPool`); 4
#   bytes per element more while the other islands have not said that they have the last message.
# * in flight: kept between steps while payloads are under way (`schedule.delay`), at its largest.
# * workspace: taken on top of both by a step with an exchange, at its largest. A sparse or gathered
#   message is small; a vector that is reduced is a copy of the values, 4 bytes per element.
#
# The order within a message is left out, and a buffer that channels share is counted for each: at
# most 2 % too much, as a test shows. What is made of the window that a coded channel works on is
# counted on an accelerator, where that is up to 134 MB. Not counted: windows of a CPU (under 64
# MB), copies of single shards, one more workspace where copies of a shard share the work, and
# `inner_state`.

OF_WINDOW = 14
"""Bytes per element of a window that coding takes on an accelerator, at most; 4 where positions are
known to all."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: elements of its shards.
        device_state, host_state: kept between steps.
        device_flight, host_flight: kept while payloads are under way, at most.
        device_workspace, host_workspace: taken by a step on top, at most.

    >>> from fsdp_demo import preset
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


def plan_memory(
    config: ExchangeConfig,
    tensors: Sequence[tuple[str, Sequence[int]]],
    islands: int,
    shards: int = 1,
    shard: int = 0,
    staged: bool = True,
    low_precision: bool = False,
) -> Memory:
    """The memory of the exchange on one rank of an island without copies of shards.

    Args:
        tensors, islands, shards: as for `plan_model`. shard: which of them (the first is the
            largest).
        staged: shards are on an accelerator, payloads are copied to the host; False: training on
            the CPU, where `offload_outer_state` changes nothing and both columns are of one memory.
        low_precision: parameters are not fp32, so delta channels keep the values written to them.
    """
    if len(config.begins) > 1:  # the figures of a run that changes are the largest of its stages
        found = [
            plan_memory(stage, tensors, islands, shards, shard, staged, low_precision)
            for stage in _stages(config)
        ]
        return Memory(*(max(getattr(m, f.name) for m in found) for f in fields(Memory)))
    plan = plan_model(config, tensors, islands, shards)[shard]
    offloaded = staged and config.offload_outer_state
    alone = sum(not s.gathered for s in plan.sections) == 1
    again = None if staged else kept_vector(plan.sections)
    device = [_on_device(s, staged, offloaded, low_precision, s is again) for s in plan.sections]
    host = [_on_host(s, staged, offloaded, alone, s is again) for s in plan.sections]
    pairs = zip(_totals(device, plan.cycle), _totals(host, plan.cycle), strict=True)
    parameters = sum(prod(local_shape(shape, shards, shard)) for _, shape in tensors)
    whole = Memory(parameters, *(figure for pair in pairs for figure in pair))
    windows = [
        min(s.layout.numel, WINDOW_GPU * BLOCK) * (OF_WINDOW if s.gathered else 4)
        for s in plan.sections
        if staged and (s.gathered or s.codec.seeded)
    ]
    return replace(whole, device_workspace=whole.device_workspace + max(windows, default=0))


def _stages(config: ExchangeConfig) -> list[ExchangeConfig]:
    """The configuration in each stage; with a delay momentum stays until earlier messages apply."""
    stages = [config.at(step) for step in config.begins]
    for before, after in list(pairwise(stages)):
        pairs = zip(before.channels, after.channels, strict=True)
        both = [
            replace(b, applier=replace(b.applier, momentum=a.applier.momentum))
            if b.schedule.delay and a.applier.momentum
            else b
            for a, b in pairs
        ]
        stages.append(replace(after, channels=tuple(both)))
    return stages


def inner_state(
    config: ExchangeConfig,
    tensors: Sequence[tuple[str, Sequence[int]]],
    shards: int = 1,
    shard: int = 0,
) -> int:
    """Bytes of inner state on a rank: AdamW 8 per parameter, Muon 4 per matrix element, SGD 0,
    `LowRankAdamW` 8 per element of a moment and 4 per element of a projection."""
    mine = tuple((n, local_shape(shape, shards, shard)) for n, shape in tensors)
    return _inner_state(config.inner_optimizers[0], config.inner_rank, mine)


@functools.lru_cache(64)
def _inner_state(
    optimizer: str, rank: int, tensors: tuple[tuple[str, tuple[int, ...]], ...]
) -> int:
    # the planner asks for dozens of settings, which have three optimizers between them
    named = [
        (n, torch.nn.Parameter(torch.empty(shape, device="meta", dtype=torch.float32)))
        for n, shape in tensors
    ]
    made = inner_class(optimizer)(named, lr=1.0, **({"rank": rank} if rank else {}))
    materialise(made)
    return sum(
        v.numel() * v.element_size()
        for p, state in made.state.items()
        for v in map(state.__getitem__, exchangeable(p, state))
    )


# ---- the figures of a channel ------------------------------------------------------------------


@dataclass(frozen=True)
class _Use:
    """Bytes of one channel in one memory.

    Attributes:
        kept: all the time.
        sent: from the step that sends until the answer is applied.
        sending, applying: on top of that, during the one or the other.
    """

    channel: Channel
    kept: int
    sent: int
    sending: int
    applying: int = 0

    @property
    def delay(self) -> int:
        return self.channel.schedule.delay

    def under_way(self, first: int, last: int) -> int:
        """Bytes of the messages sent from step `first` to step `last`."""
        schedule = self.channel.schedule
        return self.sent * (schedule.round(last) - schedule.round(first - 1))


def _on_device(
    section: ChannelCodec, staged: bool, offloaded: bool, low_precision: bool, again: bool
) -> _Use:
    """A channel's use of the device: its workspaces, its payload (coded, or fp32 vectors that are
    reduced, whose memory may be used `again`), and the values that a sender needs again when the
    mean arrives.
    """
    channel, work = section.channel, 4 * section.layout.numel
    kept = section.known_bytes + (0 if channel.accumulator is None else work)
    if channel.source == "delta":
        kept += (0 if offloaded else _outer(section)) + work * low_precision
    own, payload = work * channel.needs_own, _payload(section)
    if channel.accumulator is not None:  # the values subtracted from it are rounded first
        sending = 4 * section.spans[0][0] if section.codec.seeded and section.taken else 0
    elif section.codec.sparse:
        sending = work
    else:  # the vector is what is sent, or what the sender needs again
        sending = work - own if section.gathered else 0
    applying = 0
    if section.gathered:  # on an accelerator all bodies, and tensors that are sent whole
        whole = section.layout.num_dense if section.codec.indexed else 0
        whole += sum(n for n, _ in section.spans) if section.codec.seeded else 0
        applying = section.size * section.num_bytes * staged + 4 * whole - payload
    if again:
        kept, payload = kept + payload, 0
    return _Use(channel, kept, own + payload, sending, applying)


def _on_host(
    section: ChannelCodec, staged: bool, offloaded: bool, alone: bool, again: bool
) -> _Use:
    """A channel's use of the host: the bodies of all islands and the means, until they are applied;
    during the exchange a copy of the payload, or the coded parts of the means. fp32 vectors of one
    channel `alone` are averaged in place, where one share of one part arrives, too: only the
    further ones come on top.
    """
    message, means = MessageLayout([section]), 0
    coded = message.num_bytes
    if message.vectors:
        means = sum(4 * n for n, _ in message.vectors)
        share, part = (max(leg) for leg in message.legs(section.size))
        in_place = alone and [code for _, code in message.vectors] == ["fp32"]
        coded = max(section.size - 2, 0) * share if in_place else section.size * part
    bodies = section.size * message.num_bytes
    kept = _outer(section) if offloaded else 0
    if again:
        kept, means = kept + means, 0
    return _Use(section.channel, kept, bodies + means, coded + _payload(section) * staged)


def _outer(section: ChannelCodec) -> int:
    """Anchor and outer momentum, and that of own deltas."""
    if section.channel.source != "delta":
        return 0
    applier = section.channel.applier
    return 4 * section.layout.numel * (1 + bool(applier.momentum) * (1 + applier.own_step))


def _payload(section: ChannelCodec) -> int:
    return section.num_bytes if section.gathered else sum(4 * n for n, _ in section.spans)


# ---- all channels together ---------------------------------------------------------------------


def _totals(uses: Sequence[_Use], cycle: int) -> tuple[int, int, int]:
    """Bytes kept; under way between two steps, at the most; within a step on top, at the most."""
    end = 2 * cycle + max((u.delay for u in uses), default=0)
    steps = range(end - min(cycle, 10_000), end)  # periods without a delay all end in these
    between = max(sum(u.under_way(t - u.delay + 1, t) for u in uses) for t in steps)
    within = max(_within(uses, stage, t) for t in steps for stage in range(3))
    return sum(u.kept for u in uses), between, within - between


def _within(uses: Sequence[_Use], stage: int, step: int) -> int:
    """Bytes under way while one stage sends and applies: earlier ones are done, later ones not."""
    held = sending = applying = 0
    for u in uses:
        own = _stage(u.channel)
        held += u.under_way(step - u.delay + (own < stage), step - (own > stage))
        if own == stage:
            sending += u.sending * u.channel.schedule.due(step)
            applying += u.applying * u.channel.schedule.due(step - u.delay)
    return held + max(sending, applying)
