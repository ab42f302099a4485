"""Names of keys and values that a configuration had before: who writes one is told the new
name, a saved configuration is translated.

Paths are those of `ExchangeConfig.changed`, without the name of a channel.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import see

KEYS = {
    "clock": "schedule",
    "clock.period": "schedule.sync_every",
    "clock.offset": "schedule.offset",
    "clock.delay": "schedule.delay",
    "codec.code": "codec.value_dtype",
    "codec.products": "codec.transform_precision",
    "reducer.kind": "reducer.mean_over",
    "applier.kind": "applier.acts_as",
    "applier.phi": "applier.sign",
    "plain": "no_transform",
    "dense": "uncompressed",
    "residual": "feedback",
    "inner": "inner_optimizers",
    "outer_state": "offload_outer_state",
    "clip_over": "clip_scope",
}
"""Old path -> new path."""

VALUES: dict[str, dict[str, Any]] = {
    "codec.select": {"all": "dense"},
    "applier.acts_as": {"outer": "outer_step"},
    "applier.sign": {"identity": False, "sign": True},
    "feedback": {"keep": "none"},
    "offload_outer_state": {"device": False, "host": True},
}
"""New path -> old value -> new value."""

KEYWORDS = {"code": "value_dtype", "inner": "inner_optimizer"}
"""Old -> new keyword of the presets' functions."""


def refuse(path: str, value: Any = None) -> None:
    """Raise ValueError if `path` (`clock.period`, `channels[0].clock.period`) or `value` is an old
    name; it says the new one.
    """
    bare = re.sub(r"^channels\[\d+\]\.", "", path)
    before = path[: len(path) - len(bare)]
    new = KEYS.get(bare)
    now = VALUES.get(new or bare, {}).get(value) if isinstance(value, str) else None
    if new is not None:
        also = "" if now is None else f": {value!r} is {_word(now)} there"
        raise ValueError(f"{path} is called {before}{new} now{also}{see('unknown-key')}")
    if now is not None:
        raise ValueError(f"{path}={value!r} is called {path}={_word(now)} now{see('unknown-key')}")


def refuse_keyword(name: str, value: Any, takes: Collection[str]) -> None:
    """Raise ValueError if `name` is an old keyword of a preset's function, which `takes` these, or
    an old top-level key.
    """
    new = KEYWORDS.get(name)
    if new in takes and value != "as_is" and isinstance(value, str):
        raise ValueError(f"{name} is called {new} now{see('unknown-key')}")
    refuse("codec.code" if name == "code" else name, value)


def translated(node: Any, path: str = "") -> Any:
    """The dict form of a configuration that an earlier version has saved, in the names of this
    one.
    """
    if isinstance(node, Mapping):
        below = {f"{path}.{key}" if path else str(key): value for key, value in node.items()}
        return {
            KEYS.get(old, old).rpartition(".")[2]: translated(value, old)
            for old, value in below.items()
        }
    if isinstance(node, list):
        return [translated(value, "" if path == "channels" else path) for value in node]
    return VALUES.get(KEYS.get(path, path), {}).get(node, node) if isinstance(node, str) else node


def _word(value: Any) -> str:
    """As yaml has it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
