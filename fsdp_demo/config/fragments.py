"""The channels of a configuration as they run on one model: fragments of layers, each with an
offset of its own.

A pure function of the configuration and the parameter names, so that it gives the same on all
replicas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from . import rules
from .channel import Channel, covers, literal
from .schema import ExchangeConfig

# what attach calls a parameter that nobody has named
_NAMELESS = re.compile(r"optimizer\d+\.group\d+\.parameter\d+$")
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def layer_of(name: str) -> int | None:
    """The layer a parameter belongs to: the first number in its dotted name; None if there is none
    (embedding, head, last norm).

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("lm_head.weight")
    (3, None)
    """
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def expand(config: ExchangeConfig, names: Sequence[str]) -> list[Channel]:
    """The channels of a configuration on a model with these parameter names: a channel with
    `fragments` becomes one channel per fragment.

    With n fragments, fragment p has the offset floor(p period / n). `after` a channel with
    fragments means after all of them.

    Raises:
        ValueError: fragments of a model without layers; two channels that would act on one
            parameter without an order.
    """
    out: list[Channel] = []
    for channel in config.channels:
        out += [channel] if channel.fragments is None else _cut(channel, names)
    # under its channel's name, which is what `after` speaks of
    configured = [replace(c, name=c.name.partition(".")[0]) for c in out]
    for i, c in enumerate(out):
        for j, other in enumerate(out[:i]):
            reason = rules.conflict(configured[j], configured[i])
            for n in names if reason else ():
                if covers(c, n) and covers(other, n):
                    raise ValueError(f"parameter {n!r}: {reason}")
    return out


def _cut(channel: Channel, names: Sequence[str]) -> list[Channel]:
    assert channel.fragments is not None
    mine = [n for n in names if covers(channel, n)]
    layers = sorted({layer for n in mine if (layer := layer_of(n)) is not None})
    if not layers:
        cure = "the model has none to cut between, so"
        if any(_NAMELESS.match(n) for n in mine):
            cure = "pass model= to attach, which gives parameters their names, or"
        raise ValueError(
            f"channel {channel.name!r} has fragments of {channel.fragments.layers} layers, but no "
            "parameter name holds a layer number "
            f"(names such as {', '.join(mine[:3])}): {cure} do without fragments: layers=0"
        )
    count = ceil(len(layers) / channel.fragments.layers)
    strided = channel.fragments.order == "strided"
    place = {
        layer: i % count if strided else i // channel.fragments.layers
        for i, layer in enumerate(layers)
    }
    parts: list[list[str]] = [[] for _ in range(count + 1)]
    for n in mine:
        layer = layer_of(n)
        parts[count if layer is None else place[layer]].append(n)
    parts = [p for p in parts if p]
    return [
        replace(
            channel,
            name=f"{channel.name}.{p}",
            include=tuple(literal(n) for n in part),
            exclude=(),
            fragments=None,
            schedule=replace(
                channel.schedule, offset=p * channel.schedule.sync_every // len(parts)
            ),
        )
        for p, part in enumerate(parts)
    ]
