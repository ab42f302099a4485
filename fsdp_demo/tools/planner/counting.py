"""The messages of one island in a cycle of steps, leg by leg, from shapes alone.

Bytes come from the plan that training is checked against (`exchange/plan.py`), summed over the
ranks of the island, which work side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ...config.channel import covers
from ...config.fragments import layer_of
from ...config.schema import ExchangeConfig
from ...exchange.plan import Plan, local_shape, plan_model
from .models import Tensors

LONGEST = 10_000
"""Steps of a cycle that are played one by one; a longer one is cut there."""

Leg = tuple[float, float]
"""Bytes out of an island and into it, all its ranks together."""


@dataclass(frozen=True)
class PlannedMessage:
    """A message of one island at one step, and its answer.

    Attributes:
        legs: one after the other: everybody's header and body, with the parts of vectors that are
            reduced, then the means of these.
        delay: steps after which training waits for it.
        values: number of values that the largest rank reads, codes and applies.
        sparse, transformed: how many of these go through a selection, and through a transform.
        releases: (share of the bytes, share of backward that is still to come when they are ready),
            in the order of backward.
    """

    legs: tuple[Leg, ...]
    delay: int
    values: int
    sparse: int
    transformed: int
    releases: tuple[tuple[float, float], ...]

    @property
    def bytes_out(self) -> float:
        """Bytes out of the island in all legs."""
        return sum(leg[0] for leg in self.legs)

    @property
    def bytes_in(self) -> float:
        """Bytes into the island in all legs."""
        return sum(leg[1] for leg in self.legs)


@dataclass(frozen=True)
class Cycle:
    """The messages of a number of steps after which they repeat.

    Attributes:
        steps: number of steps. due: step -> its messages, in the order in which they are sent.
    """

    steps: int
    due: dict[int, list[PlannedMessage]]


def cycle(
    config: ExchangeConfig,
    tensors: Tensors,
    islands: int,
    shards: int = 1,
    bytes_per_parameter: float | None = None,
) -> Cycle:
    """The messages of one cycle of a configuration.

    Args:
        bytes_per_parameter: what is exchanged takes so many bytes per value, moves as in a ring
            all-reduce (2 (R - 1) / R times its size) and has no header; None: as it is sent.
    """
    plans = list(_plans(config, tensors, islands, shards))
    steps, made = min(plans[0][0].cycle, LONGEST), dict[tuple[int, ...], PlannedMessage]()
    # the end of the second cycle: all fragments take part, and periods end together
    first = 2 * plans[0][0].cycle - steps
    due: dict[int, list[PlannedMessage]] = {}
    for step in range(steps):
        if plans[0][0].checks(first + step):
            bytes_each = plans[0][0].check().bytes_sent * shards
            asked = PlannedMessage(((bytes_each, bytes_each),), 0, 0, 0, 0, ())
            due.setdefault(step, []).append(asked)
        for members in plans[0][0].due(first + step):
            if members not in made:
                made[members] = _message(plans, members, tensors, bytes_per_parameter)
            due.setdefault(step, []).append(made[members])
    return Cycle(steps, due)


def _plans(
    config: ExchangeConfig, tensors: Tensors, islands: int, shards: int
) -> Iterable[tuple[Plan, int]]:
    """The plans of an island's ranks, and how many ranks have each: like shards, like plans."""
    times: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for shard in range(shards):
        times.setdefault(tuple(local_shape(s, shards, shard) for _, s in tensors), []).append(shard)
    for shapes, ranks in times.items():
        mine = [(n, shape) for (n, _), shape in zip(tensors, shapes, strict=True)]
        yield plan_model(config, mine, islands)[0], len(ranks)


def _message(
    plans: Sequence[tuple[Plan, int]],
    members: tuple[int, ...],
    tensors: Tensors,
    bytes_per_parameter: float | None,
) -> PlannedMessage:
    mine = [plans[0][0].sections[i] for i in members]
    names = [(n, shape) for n, shape in tensors if any(covers(s.channel, n) for s in mine)]
    legs = [(0.0, 0.0), (0.0, 0.0)]
    if bytes_per_parameter is None:
        for plan, times in plans:
            # headers, bodies and the parts of vectors leave together (`membership/machine.py`, a
            # launch), then the means of these
            bodies, parts, means = (*plan.rounds(members), (0, 0), (0, 0), (0, 0))[:3]
            legs = _add(legs, [(bodies[0] + parts[0], bodies[1] + parts[1]), means], times)
    else:
        size = sum(prod(shape) for _, shape in names) * bytes_per_parameter
        count = plans[0][0].size
        legs = [(size * (count - 1) / count,) * 2] * 2
    sparse = [s.layout.numel for s in mine if s.codec.sparse]
    transformed = [s.layout.numel for s in mine if s.codec.transform != "none"]
    return PlannedMessage(
        tuple(leg for leg in legs if leg[0] or leg[1]),
        min(s.channel.schedule.delay for s in mine),
        sum(s.layout.numel for s in mine),
        sum(sparse),
        sum(transformed),
        releases(names, tensors),
    )


def _add(legs: Sequence[Leg], more: Sequence[Leg], times: int) -> list[Leg]:
    return [(a + times * c, b + times * d) for (a, b), (c, d) in zip(legs, more, strict=True)]


def releases(names: Tensors, tensors: Tensors) -> tuple[tuple[float, float], ...]:
    """When backward has the gradients of `names`: (share of their values, share of backward still
    to come), in the order of backward.

    All layers of the model take equally long. What is in no layer comes with the first of them to
    be done where it stands behind the layers (head, last norm), else with the last.
    """
    layers = sorted({x for n, _ in tensors if (x := layer_of(n)) is not None})
    if not layers:
        return ((1.0, 0.0),)
    first = next(i for i, (n, _) in enumerate(tensors) if layer_of(n) is not None)
    ahead = {n for n, _ in tensors[:first]}
    left = dict.fromkeys(layers, 0)
    for name, shape in names:
        layer = layer_of(name)
        if layer is None:
            layer = layers[0] if name in ahead else layers[-1]
        left[layer] += prod(shape)
    whole = sum(left.values()) or 1
    return tuple(
        (left[x] / whole, i / len(layers))
        for i, x in sorted(enumerate(layers), reverse=True)
        if left[x]
    )
