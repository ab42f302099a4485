"""Plain data (dicts, lists, scalars, texts of a command line) into checked dataclasses: every error
names the field, the value found and what is allowed, with the nearest right name. Yaml as users
write it: a key that stands twice is an error, not the last one's win, and every error says where.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from ..errors import see

MEANT = dict.fromkeys(("period", "check_every", "h"), "schedule.sync_every") | {"k": "codec.topk"}
"""What papers and other packages call a key, in lower case -> its path."""


def nearest(found: Any, known: Sequence[str], cutoff: float = 0.4) -> str:
    """The text `; did you mean ...?` with the name of `known` most like `found`; else empty."""
    near = difflib.get_close_matches(str(found), known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def proposal(found: str, known: Sequence[str]) -> str:
    """The text `; did you mean ...?` for a key: with the path of what papers call so (`MEANT`),
    else the one path of `known` that ends in the same word, else the nearest.
    """
    leaf = found.rpartition(".")[2]
    if meant := MEANT.get(leaf.lower(), ""):
        # a whole path, one behind a channel's name, or a key alone
        chosen = [k for k in known if f".{k}".endswith((f".{meant}", f".{meant.split('.')[1]}"))]
        if chosen:
            return f"; did you mean {chosen[0]!r}?"
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    return f"; did you mean {same[0]!r}?" if len(same) == 1 else nearest(found, known, 0.5)


def one_of(where: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`; the message offers the nearest."""
    if value not in allowed:
        raise ValueError(
            f"{where}={value!r} is not known: allowed are "
            f"{', '.join(allowed)}{nearest(value, allowed, 0.6)}"
        )


def in_range(where: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise ValueError unless low <= value <= high (NaN is refused too)."""
    if not low <= value <= high:
        allowed = f"{low} <= {where} <= {high}" if high != float("inf") else f"{where} >= {low}"
        raise ValueError(f"{where}={value} is out of range: allowed is {allowed}")


def set_path(data: dict[str, Any], top: Sequence[str], path: str, value: Any) -> None:
    """Set one dotted path in a configuration as plain data, in place: a key of the top level, or a
    key of one channel where the path begins with its name, else of all channels. A later phase of
    the channel that has the same value there gets the new one, too.

    Args:
        data: the configuration, as of `ExchangeConfig.to_dict`.
        top: keys of the top level that may be set.

    Raises:
        ValueError: there is no such key; offers the nearest.
    """
    head, _, rest = path.partition(".")
    by_name = {c["name"]: c for c in data["channels"]}
    targets, within = (
        ([by_name[head]], rest) if head in by_name and rest else (list(by_name.values()), path)
    )
    if head in top and not rest:
        names = head in ("inner_optimizers", "own_tensors")
        data[head] = [value] if names and isinstance(value, str) else value
        return
    if head == "drop" and head not in by_name:
        data[head] = {**(data[head] or {}), rest: value}
        return
    for target in targets:
        *parents, leaf = within.split(".")
        node: Any = target
        for key in parents:
            # an optional part that was absent: start it with its defaults
            if isinstance(node, dict) and key in node and node[key] is None:
                node[key] = {}
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, dict) or (
            leaf not in node and parents not in (["accumulator"], ["fragments"])
        ):
            raise ValueError(_no_key(path, top, by_name))
        for phase in target["later"]:
            own = functools.reduce(lambda part, key: (part or {}).get(key), parents, phase)
            if own and leaf in own and own[leaf] == node.get(leaf):
                own[leaf] = value
        node[leaf] = value


def _no_key(path: str, top: Sequence[str], by_name: Mapping[str, Any]) -> str:
    """The message for a path that `set_path` does not find: a proposal, and the keys like it."""
    head, _, rest = path.partition(".")
    paths = sorted({p for channel in by_name.values() for p in by_path(channel)})
    sections = {p.partition(".")[0] for p in paths if "." in p}
    near = difflib.get_close_matches(head, list(by_name), n=1)
    if rest and near and head not in sections:  # NAME.path, with NAME as it is or misspelt
        known = [f"{near[0]}.{p}" for p in sorted(by_path(by_name[near[0]]))]
        meant = proposal(f"{near[0]}.{rest}", known)
    else:
        meant = proposal(path, known := [*top, *paths])
        known = [k for k in known if head in sections and k.startswith(f"{head}.")] or known
    found = f"{path!r} is no key of the configuration{meant}"
    here = f"; channels: {', '.join(by_name)}" if rest and head not in sections else ""
    return f"{found} (known: {', '.join(known)}{here}){see('unknown-key')}"


def by_path(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their dotted paths."""
    out: dict[str, Any] = {}
    for key, value in node.items():
        inner = isinstance(value, dict)
        out |= by_path(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return out


# kept: to evaluate the types of a dataclass's fields takes longer than all the rest
_hints = functools.cache(get_type_hints)


def build(cls: Any, data: Any, where: str) -> Any:
    """An instance of dataclass `cls` from plain data.

    Args:
        where: dotted path of the data, for errors; empty for the whole configuration.

    Raises:
        ValueError: an unknown or missing key, or a value of another type; names the field.
    """
    if not isinstance(data, Mapping):
        raise ValueError(
            f"{where or 'the configuration'}={data!r} must be a mapping with keys "
            f"{', '.join(f.name for f in fields(cls))}"
        )
    known, hints = [f.name for f in fields(cls)], _hints(cls)
    prefix = f"{where}." if where else ""
    for key in data:
        if key not in known:
            found = f"unknown key {prefix}{key}{proposal(key, known)}"
            raise ValueError(f"{found} (allowed: {', '.join(known)}){see('unknown-key')}")
    missing = [
        f.name
        for f in fields(cls)
        if f.name not in data and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where or 'the configuration'} lacks {', '.join(missing)}")
    return cls(**{k: typed(hints[k], value, f"{prefix}{k}") for k, value in data.items()})


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    type(None): "nothing (null)",
}
"""Types in the words of yaml."""


def typed(hint: Any, value: Any, where: str, more: str = "") -> Any:
    """One plain value as the type that a field declares.

    Args:
        hint: the type.
        where: name of the field, for errors.
        more: further words on what is allowed, for errors.

    Raises:
        ValueError: the value has another type; names the field.
    """
    args = get_args(hint)
    if type(None) in args:
        inner = next(a for a in args if a is not type(None))
        return None if value is None else typed(inner, value, where, ", or null")
    words = [w for a in args if get_origin(a) is Literal for w in get_args(a)]
    if words:  # a number, or a word in its place
        return value if value in words else typed(args[0], value, where, f", or {words[0]}")
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}={value!r} must be a mapping, as in {{exp_avg: 3}}")
        return {
            typed(args[0], k, f"{where} key"): typed(args[1], v, f"{where}.{k}")
            for k, v in value.items()
        }
    if is_dataclass(hint):
        return build(hint, value, where)
    if get_origin(hint) is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}={value!r} must be a list")
        return tuple(typed(get_args(hint)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(value, str) and hint in (int, float):  # yaml reads 1e-3 and 1e3 as text
        value = _number(hint, value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        wanted = f"{_WORDS.get(hint, hint.__name__)}{more}"
        found = _WORDS.get(type(value), type(value).__name__)
        raise ValueError(f"{where}={value!r} must be {wanted}; found {found}")
    return value


def _number(hint: Any, text: str) -> Any:
    """The number that a text says; the text where it says none, or no whole one for an int."""
    try:
        value = float(text)
        if hint is float:
            return value
        whole = int(value)
        return whole if whole == value and abs(whole) < 2**53 else int(text)
    except (ValueError, OverflowError):
        return text


# ---- yaml --------------------------------------------------------------------------------------

LONGEST = 50_000
"""Characters of a text: configurations have a few thousand."""

MOST = 10_000
"""Values in it, each alias counted as what it stands for: a few lines of them can stand for
billions.
"""


def read_yaml(text: str, where: str) -> Any:
    """Plain data of a yaml text.

    Args:
        where: the text's file, or other words for it, with which errors begin.

    Raises:
        ValueError: no yaml, or one of more than `LONGEST` characters or `MOST` values, or nested
            too deeply; or a key that stands twice, be it once dotted (`codec.topk`) and once
            nested.

    >>> read_yaml("preset: demo", "a.yaml")
    {'preset': 'demo'}
    """
    if len(text) > LONGEST:
        raise ValueError(f"{where} has {len(text):,} characters, allowed are {LONGEST:,}")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_keys(root, where)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is no yaml: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply, or in itself") from None


def _check_keys(root: yaml.Node | None, where: str) -> None:
    """Refuse a key that stands twice, and more than `MOST` values."""
    lines: dict[str, int] = {}
    for path, line in _values(root, ""):
        if path in lines:
            raise ValueError(
                f"{where}: {path} stands twice, in line {lines[path]} and in line {line}: "
                "remove one of them"
            )
        lines[path] = line
        if len(lines) > MOST:
            raise ValueError(
                f"{where} has more than {MOST:,} values, each alias counted as what it stands for"
            )


def _values(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """The dotted path of every key and of every item of a list, and its line, from 1."""
    inner: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        inner = [(f"{prefix}[{i}]", item, item) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        dot = "." if prefix else ""
        inner = [(f"{prefix}{dot}{key.value}", key, value) for key, value in node.value]
    for path, key, value in inner:
        yield path, key.start_mark.line + 1
        yield from _values(value, path)
