"""Bytes before the first step: what one rank sends and receives at each step, from shapes alone,
through the meter that training uses.

A plan counts the same messages (`message.py`) as a run; a test compares the two to the byte for
every preset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..channels.codec import ChannelCodec
from ..comm.meter import Meter
from ..compression.blocks import Layout
from ..config.fragments import expand
from ..config.patterns import covers, tensor_layout_kind
from ..config.schema import ExchangeConfig
from .message import MessageLayout


class Plan:
    """What a list of channels sends on one rank.

    Args:
        sections: of the channels, in the order of the configuration.
        size: number of replicas.
        rank: which of them this is (parts of a reduce may differ by an element).
    """

    def __init__(self, sections: Sequence[ChannelCodec], size: int, rank: int = 0):
        self.sections, self.size, self.rank = list(sections), size, rank

    @property
    def cycle(self) -> int:
        """Steps after which the pattern of exchanges repeats: the least common multiple of the
        periods.
        """
        return (
            math.lcm(*(s.channel.schedule.sync_every for s in self.sections))
            if self.sections
            else 1
        )

    def message(self, step: int) -> Meter:
        """Counts of the exchanges that start at `step` (all zero if nothing is due)."""
        meter = Meter()
        due = [s for s in self.sections if s.channel.schedule.due(step)]
        first = [s for s in due if not s.channel.after]
        self._count(meter, [s for s in first if s.channel.before_step])
        self._count(meter, [s for s in first if not s.channel.before_step])
        self._count(meter, [s for s in due if s.channel.after])
        return meter

    def _count(self, meter: Meter, due: Sequence[ChannelCodec]) -> None:
        """One message."""
        if not due:
            return
        meter.exchanges += 1
        if self.size == 1:
            return
        message = MessageLayout(due)
        meter.count(*[(self.size - 1) * message.num_bytes] * 2)
        if not message.vectors:
            return
        there, back = message.legs(self.size)
        meter.count(sum(there) - there[self.rank], (self.size - 1) * there[self.rank])
        meter.count((self.size - 1) * back[self.rank], sum(back) - back[self.rank])

    def over(self, steps: range) -> Meter:
        """Sums of `message` over a range of steps."""
        total = Meter()
        for step in steps:
            if any(s.channel.schedule.due(step) for s in self.sections):
                total.add(self.message(step))
        return total

    def per_step(self) -> float:
        """Mean bytes sent per step, exact over a cycle; where that is longer than 10 000 steps each
        channel's exchanges alone, each with a header."""
        return self.average()[0]

    def average(self) -> tuple[float, float, float]:
        """(bytes sent, bytes received, messages) per step, the means over a cycle as in
        `per_step`.
        """
        if self.cycle <= 10_000:
            alone = [(self.over(range(self.cycle, 2 * self.cycle)), self.cycle)]
        else:
            alone = [
                (Plan([s], self.size, self.rank)._alone(), s.channel.schedule.sync_every)
                for s in self.sections
            ]
        sent, received = (
            sum(getattr(m, name) / n for m, n in alone) for name in ("bytes_sent", "bytes_received")
        )
        return sent, received, sum(m.messages / n for m, n in alone)

    def _alone(self) -> Meter:
        meter = Meter()
        self._count(meter, self.sections)
        return meter

    def most(self) -> Meter:
        """The step that sends the most bytes, within a cycle (all channels at once where the cycle
        is long).
        """
        if self.cycle > 10_000:
            return self._alone()
        return max(
            (self.message(step) for step in range(self.cycle, 2 * self.cycle)),
            key=lambda m: m.bytes_sent,
            default=Meter(),
        )


def plan_model(
    config: ExchangeConfig,
    tensors: Sequence[tuple[str, Sequence[int]]],
    islands: int,
    shards: int = 1,
    rank: int = 0,
) -> list[Plan]:
    """The plans of the ranks of one island (one per shard) that train a model under a
    configuration.

    Args:
        tensors: names and whole shapes of the trained parameters (of a model on the meta device,
            say), ties once.
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
            layout = Layout(
                [shape for _, shape in mine], [tensor_layout_kind(channel, n) for n, _ in mine]
            )
            sections.append(ChannelCodec(layout, channel, islands, config.seed))
        plans.append(Plan(sections, islands, rank))
    return plans


def local_shape(shape: Sequence[int], shards: int, shard: int) -> tuple[int, ...]:
    """What FSDP2 gives to a shard: ceil(rows / shards) rows, the last shards less or none."""
    if shards == 1 or not shape:
        return tuple(shape)
    rows = -(-shape[0] // shards)
    return (max(0, min(rows, shape[0] - shard * rows)), *shape[1:])
