"""Tables of the keys of a configuration, from the dataclasses in fsdp_demo/config.

What a key does is read from the section `Attributes:` of its class. What is allowed is asked of the
class: it refuses a wrong value with a sentence that says so.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

from figure_cells import Rows

from fsdp_demo import presets
from fsdp_demo.config import channel, parts
from fsdp_demo.config.schema import ExchangeConfig

CLASSES: dict[str, tuple[Any, str]] = {  # table: the class, and what its keys begin with
    "keys": (ExchangeConfig, ""),
    "keys-channels": (channel.Channel, ""),
    "keys-schedule": (parts.SyncSchedule, "schedule."),
    "keys-accumulator": (parts.Accumulator, "accumulator."),
    "keys-codec": (parts.Codec, "codec."),
    "keys-reducer": (parts.Reducer, "reducer."),
    "keys-applier": (parts.Applier, "applier."),
    "keys-fragments": (parts.Fragments, "fragments."),
    "keys-later": (channel.Phase, "later."),
    "keys-drop": (parts.Drop, "drop."),
    "keys-pairs": (parts.Pairs, "pairs."),
}
ALLOWED = {  # where it depends on another key, or a value alone makes no instance
    "schedule.offset": "`0 <= offset < sync_every`",
    "drop.limit": "`limit > 0`, or `auto`",
    "later.begin": "`0 < begin < 1`, or a whole number `begin >= 1`",
    "later.feedback": ", ".join(f"`{word}`" for word in channel.FEEDBACKS),
}


def keys(table: str) -> Rows:
    """Every key of one class."""
    cls, prefix = CLASSES[table]
    hints, about = get_type_hints(cls), _attributes(cls)
    rows = [["key", "type", "default", "allowed", "what it does"]]
    for f in dataclasses.fields(cls):
        kind = _type(hints[f.name])
        link = f"[keys](#{f.name})" if "mapping" in kind else ""
        allowed = link or ALLOWED.get(prefix + f.name) or _allowed(cls, f.name, hints[f.name])
        rows.append([f"`{prefix}{f.name}`", kind, _default(f), allowed, about[f.name]])
    return rows


def preset_keywords() -> Rows:
    """The keywords of every preset, with their defaults."""
    rows = [["preset", "keywords and defaults"]]
    for name, make in presets().items():
        takes = inspect.signature(make).parameters.items()
        rows.append([f"`{name}`", ", ".join(f"`{key}={_yaml(p.default)}`" for key, p in takes)])
    return rows


def _attributes(cls: Any) -> dict[str, str]:
    """Field -> text of the section `Attributes:` of a docstring, without its full stop."""
    section = inspect.getdoc(cls).partition("\nAttributes:\n")[2].partition("\n\n")[0]
    texts = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in texts}


def _without_none(hint: Any) -> Any:
    kinds = [h for h in get_args(hint) if h is not type(None)]
    return kinds[0] if type(None) in get_args(hint) else hint


def _type(hint: Any) -> str:
    """A type in the words of yaml."""
    inner = _without_none(hint)
    if any(get_origin(each) is Literal for each in get_args(inner)):
        return f"{_type(get_args(inner)[0])}, or a word"
    if get_origin(inner) is tuple:
        each = get_args(inner)[0]
        rows = get_origin(each) is tuple
        kind = "list of " + ("texts" if each is str else "rows" if rows else "mappings")
    elif dataclasses.is_dataclass(inner):
        kind = "mapping"
    else:
        kind = {str: "text", float: "number", int: "whole number", bool: "true or false"}[inner]
    return kind if inner is hint else f"{kind}, or null"


def _default(f: dataclasses.Field[Any]) -> str:
    """The default as yaml has it."""
    if f.default is dataclasses.MISSING:
        return "needed" if f.default_factory is dataclasses.MISSING else "its defaults"
    return f"`{_yaml(f.default)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    quoted = isinstance(value, str) and not value[:1].isalnum()
    return f'"{value}"' if quoted else f"{value}"


def _allowed(cls: Any, name: str, hint: Any) -> str:
    """What the class says of a value that is never allowed; empty where it takes all of the
    type.
    """
    impossible = {str: "?", int: -(10**9), float: float("nan")}
    if _without_none(hint) not in impossible:
        return ""
    full = presets()["full"]()
    whole = {ExchangeConfig: full, channel.Channel: full.channels[0]}
    try:
        dataclasses.replace(whole.get(cls) or cls(), **{name: impossible[_without_none(hint)]})
    except ValueError as error:
        found = re.search(r"allowed (?:is|are) (.*?)(?:; did you mean .*)?$", str(error), re.DOTALL)
        return _as_code(found[1], name) if found else ""
    return ""


def _as_code(text: str, name: str) -> str:
    """`codec.topk >= 1` and `1 <= topk <= 4096`, and lists of words as code."""
    text = re.sub(rf"[\w.]*\b{name}\b", name, text)
    if re.search(r"[<>]", text):
        rule, comma, rest = text.partition(",")
        return f"`{rule}`{comma}{rest}"
    return ", ".join(f"`{word}`" for word in text.split(", "))
