"""How much of what a channel had to say it has sent: the kept energy, computed on request."""

from __future__ import annotations

from collections.abc import Iterable

from ..channels.channel import ChannelRunner
from ..comm.island import IslandGroup


def kept(channels: Iterable[ChannelRunner], island: IslandGroup) -> dict[str, float]:
    """1 - |m - q|^2 / |m|^2 of each channel in its last exchange, over all shards of the island.

    m is what the channel encoded: its accumulator, or the delta, gradient or parameters themselves
    where it has none, in the transform domain, in which norms are those of the elements. q is what
    the others decode of it. With exact values q is a part of m, so this is |q|^2 / |m|^2: the share
    of the energy that a selection of coefficients keeps. Rounding makes it smaller, and a coarse
    code can make it negative. 1 where m is zero.

    All ranks of the island call it together. Channels that have not sent since the request are left
    out. No communication where nobody has asked.
    """
    found: dict[str, float] = {}
    channels = [c for c in channels if c.watches_energy]  # on all ranks or on none
    for c in channels:
        mine = (0.0, 0.0) if c.energy is None else tuple(c.energy.tolist())
        whole, left, known = island.sum(*mine, float(c.energy is not None))
        if known:
            found[c.channel.name] = 1.0 - left / whole if whole else 1.0
    return found
