"""A configuration from the name of a preset or a yaml file, and changes, as in
`attach("diloco", period=50)`, `--exchange` and `--set`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from ..errors import see
from . import rules
from .auto import AUTO, auto
from .methods import presets
from .parsing import MEANT, by_path, nearest, one_of, read_yaml, typed
from .schema import ExchangeConfig

MADE = ("adamw", "qhadamw", "lowrankadamw", "muonadamw", "sgd")
"""Inner optimizers that `base_optimizer` makes."""

PERIODS = ("period", "check_every")
"""Keywords of presets that set `schedule.sync_every`: each preset takes one of them, or none."""

TOP = tuple(sorted({f.name for f in fields(ExchangeConfig)} - {"preset", "channels"}))
"""The keys of the top level that a change may name."""


def preset(name: str, **changes: Any) -> ExchangeConfig:
    """The configuration of a published method, with changes.

    Args:
        name: one of `presets()`, or "auto" (`config/auto.py`).
        changes: keywords of the preset's function, where `sync_every` is the same as `period` (of
            sel_sync as `check_every`); `inner_optimizer`, one of those it is defined for ("qhadamw"
            and "lowrankadamw" where AdamW is); top-level fields (`clip`, `clip_scope`,
            `inner_optimizers`, `inner_rank`, `max_in_flight`, `norm_limit`, `offload_outer_state`,
            `own_tensors`, `seed`, and `lr`, the inner rate, where the function has no `lr` of its
            own); or dotted paths.

    Raises:
        ValueError: for an unknown name, key, or value; it says what is allowed and the nearest
            right name. For a path that has no effect in this method (`rules.py`) it says why.

    Example:
        >>> from fsdp_demo import preset
        >>> preset("diloco", period=100).channels[0].schedule.sync_every
        100
        >>> preset("demo", **{"codec.topk": 16}).channels[0].codec.topk
        16
    """
    _refuse_twice(changes)
    return _made(name, changes)


def _made(name: str, changes: dict[str, Any]) -> ExchangeConfig:
    """`preset`, where a path wins over a keyword for the same key."""
    if name == AUTO:
        return auto(**changes)
    known = presets()
    one_of("preset", name, (*known, AUTO))
    takes = inspect.signature(known[name]).parameters
    hints = get_type_hints(known[name])
    if "sync_every" in changes and (word := _period(takes)):
        if word in changes:
            raise ValueError(f"{word} and sync_every are the same: give one of them")
        changes[word] = changes.pop("sync_every")
    own = {k: typed(hints[k], v, k) for k, v in changes.items() if k in takes}
    rest = {k: v for k, v in changes.items() if k not in own}
    if "inner_optimizer" in rest:
        rest["inner_optimizers"] = _inner(known[name](**own), rest.pop("inner_optimizer"), rest)
    for key in rest:
        if "." not in key and key not in TOP:
            options = [*takes, *(name for name in TOP if name not in takes)]
            allowed = f"{', '.join(options)}, or a dotted path such as schedule.sync_every"
            raise ValueError(
                f"preset {name!r} has no setting {key!r}{_meant(key, options, known[name]())} "
                f"(allowed: {allowed}){see('unknown-key')}"
            )
    return known[name](**own).changed(rest)


def _inner(config: ExchangeConfig, chosen: Any, rest: Mapping[str, Any]) -> tuple[str, ...]:
    """The `inner_optimizers` that `inner_optimizer=chosen` stands for, if the preset is defined for
    it: `QHAdamW` and `LowRankAdamW` are AdamW with other moments.
    """
    if "inner_optimizers" in rest:
        raise ValueError("inner_optimizer and inner_optimizers are the same: give one of them")
    first, names = config.inner_optimizers[0], {*config.inner_optimizers}
    made = {"adamw": {"qhadamw", "lowrankadamw"}, "any": {*MADE}}
    names |= made.get(first, set())
    fits = (first,) if first == "muonadamw" else tuple(n for n in MADE if n in names)
    one_of(f"preset {config.preset!r}: inner_optimizer", chosen, fits)
    return (chosen,)


def changed(config: ExchangeConfig, changes: Mapping[str, Any]) -> ExchangeConfig:
    """`config.changed(changes)`, where a keyword of its preset's function is refused as such.

    Raises:
        ValueError: for wrong keys and values, too; it says how to write the change.
    """
    known = presets()
    takes = inspect.signature(known[config.preset]).parameters if config.preset in known else {}
    for key, value in changes.items():
        word = _period(takes) if key == "sync_every" else key
        if word in takes and word not in TOP:
            paths = [*by_path(config.to_dict()["channels"][0])] if len(config.channels) == 1 else []
            path = MEANT.get(word) or next((p for p in paths if p.endswith(f".{word}")), "")
            other = f"{path}={value!r}, or " if path in paths else ""
            raise ValueError(
                f"{key} is a keyword of the preset, and this is a whole configuration: write "
                f"{other}preset({config.preset!r}, {word}={value!r}){see('unknown-key')}"
            )
    return config.changed(changes) if changes else config


def _period(words: Iterable[str]) -> str:
    """That of these keywords of a preset which sets `schedule.sync_every`; empty: none does."""
    return next((word for word in PERIODS if word in words), "")


def _refuse_twice(changes: Mapping[str, Any]) -> None:
    """Raise ValueError where a keyword and a path for all channels differ on one key."""
    for word, value in changes.items():
        path = next((p for p in changes if _same_key(word, p)), "")
        if path and changes[path] != value:
            raise ValueError(
                f"{word}={value!r} and {path}={changes[path]!r} set the same key: give one of them"
            )


def _same_key(word: str, path: str) -> bool:
    """Whether a dotted path for all channels is what the keyword `word` sets."""
    section, dot, leaf = path.partition(".")
    plain = dot and section in ("schedule", "accumulator", "codec", "applier", "fragments")
    return bool(plain) and "." not in word and (path == MEANT.get(word) or leaf == word)


def _meant(key: str, options: list[str], config: ExchangeConfig) -> str:
    """The proposal for a wrong keyword of a preset: what papers call it, then the one path that
    ends in it, with the reason if it has no effect here; else the nearest.
    """
    path = MEANT.get(key.lower(), "schedule.sync_every" if key == "sync_every" else "")
    every = path == "schedule.sync_every"
    word = _period(options) if every else path.rpartition(".")[2]
    if word and word in options:
        return f"; did you mean {word!r}?"
    if every:
        return f"; did you mean {path!r}?"
    paths = [*by_path(config.to_dict()["channels"][0])]
    same = [path] if path else [p for p in paths if p.endswith(f".{key}")]
    if len(same) != 1:
        return nearest(key, options, 0.5)
    if why := rules.no_effect(config.channels, same[0]):
        return f", and {same[0]} has no effect: {why}"
    return f"; did you mean {same[0]!r}?"


def load_config(source: str, overrides: Iterable[str] | Mapping[str, Any] = ()) -> ExchangeConfig:
    """The configuration that `--exchange` and `--set` say.

    Args:
        source: a preset name, or the path of a yaml file: a whole configuration
            (`ExchangeConfig.to_yaml`), or `preset: NAME` with keywords and dotted paths beside it.
        overrides: texts `path=value`, values read as yaml, or a mapping of changes as `preset`
            takes them.

    Raises:
        ValueError: for unknown names, keys or values, keys that stand twice, and settings without
            effect, or given by keyword and by path; FileNotFoundError for a yaml path that is not
            there.

    Example:
        >>> from fsdp_demo import load_config
        >>> load_config("demo", ["codec.topk=16"]).channels[0].codec.topk
        16
    """
    changes = _changes(overrides)
    if not source.endswith((".yaml", ".yml")) and not os.path.isfile(source):
        return preset(source, **changes)
    data = _read_file(source)
    if "channels" in data:
        return changed(_in_file(source, lambda: ExchangeConfig.from_dict(data)), changes)
    name, flat = data.pop("preset"), by_path(data)
    _in_file(source, lambda: _refuse_twice(flat))
    _refuse_twice(changes)
    names = {*PERIODS, "sync_every"}
    words = names if names & {*changes} else set()
    words |= {key for key in flat if any(_same_key(word, key) for word in changes)}
    kept = {key: value for key, value in flat.items() if key not in words}
    try:
        return _made(name, {**kept, **changes})
    except ValueError as error:
        if changes:  # whose fault it is
            _in_file(source, lambda: _made(name, flat))
            raise
        raise ValueError(f"{source}: {error}") from None


def _read_file(source: str) -> dict[str, Any]:
    if not os.path.exists(source):
        raise FileNotFoundError(
            f"{source!r} is neither a preset nor a file that is there (presets: "
            f"{', '.join(presets())})"
        )
    with open(source, encoding="utf-8") as file:
        data = read_yaml(file.read(), source)
    if not isinstance(data, dict) or "preset" not in data:
        raise ValueError(
            f"{source} must be a mapping with the key 'preset'; `fsdp-demo presets NAME --yaml` "
            "prints one to start from"
        )
    return data


def _changes(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Changes by path, from a mapping or from texts `path=value`."""
    if isinstance(overrides, str):
        raise ValueError(
            f"changes must be a list of texts or a mapping, found the text {overrides!r}: write "
            f"[{overrides!r}]"
        )
    if isinstance(overrides, Mapping):
        return dict(overrides)
    changes = dict[str, Any]()
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals:
            raise ValueError(
                f"override {text!r} must read path=value, as in schedule.sync_every=50"
            )
        changes[path.strip()] = read_yaml(value, f"override {text!r}")
    return changes


def _in_file(source: str, read: Callable[[], Any]) -> Any:
    """The result of `read`, which reads the file alone; errors name the file."""
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
