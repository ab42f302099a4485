"""Settings that a method does not use: refused where somebody sets one, and left alone where it
only has its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .channel import Channel

_OFF = ("none", "replica")
"""Words that switch a setting off, as 0, false and null do: true of a method without it."""

_MOMENTUM = ("applier.momentum", "applier.nesterov", "applier.momentum_warmup")


def refuse_unused(
    channels: Sequence[Channel], clips_mean: bool, changes: Mapping[str, Any]
) -> None:
    """Refuse changes that change nothing. A path for all channels is one that any of them uses.

    Args:
        channels, clips_mean: of the configuration with the changes made.
        changes: paths as `ExchangeConfig.changed` takes them, and their values.

    Raises:
        ValueError: a setting without effect; says why.
    """
    names, above = {c.name: c for c in channels}, _unused_above(channels, clips_mean)
    for path, value in changes.items():
        if not value or value in _OFF:
            continue
        head, _, rest = path.partition(".")
        chosen, key = ([names[head]], rest) if head in names and rest else (channels, path)
        if why := above.get(path, "") or reason(chosen, key):
            raise ValueError(f"{path}={value!r} has no effect: {why}; leave {path} out")


def reason(channels: Sequence[Channel], path: str) -> str:
    """Why a path for all channels would have no effect; empty where any channel uses it."""
    reasons = [_unused(c).get(path, "") for c in channels]
    return reasons[0] if all(reasons) else ""


def _unused(c: Channel) -> dict[str, str]:
    """The settings that the channel does not use -> why. `uncompressed` and `no_transform` are not
    among them: what they ask for is so where nothing is compressed or transformed.
    """
    a, name = c.applier, f"channel {c.name!r}"
    whole = f"{name} sends every value (codec.select='dense')"
    found: dict[str, str] = {}
    if not c.codec.sparse:
        found |= dict.fromkeys(("codec.topk", "applier.dense_lr"), whole)
    if c.feedback != "subtract":
        found["accumulator.alpha"] = f"it is for feedback='subtract', found {c.feedback!r}"
    if a.momentum == 0:
        found["applier.momentum_warmup"] = f"{name} has no momentum (applier.momentum=0)"
    if a.local_delta:
        local = "whose momentum is the accumulator's (accumulator.beta)"
        found |= dict.fromkeys(_MOMENTUM, f"{name} has applier.local_delta=True, {local}")
    if a.acts_as != "outer_step":
        found |= dict.fromkeys(
            (*_MOMENTUM, "applier.lr", "applier.dense_lr"),
            f"{name} takes no outer step (applier.acts_as={a.acts_as!r}), and its rate is that of "
            "your optimizer",
        )
    return found


def _unused_above(channels: Sequence[Channel], clips_mean: bool) -> dict[str, str]:
    """The same for keys of the top level."""
    found: dict[str, str] = {}
    if not any(c.codec.seeded for c in channels):
        found["seed"] = "no channel draws positions (codec.select='random' or 'stride')"
    if not any(c.source == "delta" for c in channels):
        found["offload_outer_state"] = "no channel keeps an anchor (source 'delta')"
    if clips_mean:
        found["clip_scope"] = "the mean gradient is clipped, by the one norm that all islands see"
    return found
