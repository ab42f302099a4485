"""Every key of a configuration as a page: `python -m fsdp_demo.config.reference >
docs/configuration.md`.

Keys, types and defaults are read from the dataclasses. What is allowed is asked of them: each
refuses a wrong value with a sentence that says so. What a key does stands in the docstring of its
class (`Args:`, `Attributes:`), or beside its field (`channel.about`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

from .channel import FEEDBACKS, Channel
from .presets import presets
from .schema import ExchangeConfig

ALLOWED = {
    "SyncSchedule.offset": "`0 <= offset < sync_every`",
    "Phase.begin": "`0 < begin < 1`, or a whole number `begin >= 1`",
    "Phase.feedback": ", ".join(f"`{word}`" for word in FEEDBACKS),
}
"""What is allowed, where that depends on another key, or a value alone makes no instance."""

HEAD = """# Configuration

<!-- Written by `python -m fsdp_demo.config.reference > docs/configuration.md`. Change the dataclasses in fsdp_demo/config instead. -->

This page lists every key of an exchange. [Concepts](concepts.md) explains the parts, [Methods](methods.md) the presets.

You rarely write a whole configuration. Start from a preset and change keys, in one of these ways:

```python
import fsdp_demo

config = fsdp_demo.preset("demo", topk=16)                      # a keyword of the preset
config = fsdp_demo.preset("demo", clip=0.5)                     # a key of the top level
config = fsdp_demo.preset("demo", **{"codec.topk": 16})         # a dotted path: all channels
config = fsdp_demo.preset("demo", **{"momentum.codec.topk": 16})  # one channel by its name (`fsdp-demo presets NAME --yaml` shows it)
config = fsdp_demo.load_config("demo", ["codec.topk=16"])       # as --set codec.topk=16 says it
text = config.to_yaml()                                         # the whole configuration, to start a file from
```

A yaml file has one of two forms:

* *Short*: `preset: NAME`, with keywords and paths beside it. A path may be dotted (`codec.topk: 16`) or nested.
* *Whole*: what `fsdp-demo presets NAME --yaml` prints, with `channels`. A whole file knows no keywords, nor does `--set` on it. Change
  `schedule.sync_every` there, not `period`.

This is a short file:

```yaml
preset: decoupled_momentum
period: 8
topk: 16
codec.value_dtype: bf16
```

* `--set` wins over the file, be the key named by its keyword or by its path.
* In one place a key is named once: `period: 8` beside `schedule.sync_every: 12` in one file is an error.
* A path for one channel (`momentum.codec.topk`) wins over the keyword.
* Several changes stand after one `--set`: `--set period=5 topk=16`.

These are errors:

* An unknown key or value. The message says what is allowed and the nearest right name.
* Settings that have no meaning together.
* A path of yours that has no effect, such as `codec.topk` in `diloco`, which sends every value. The message says why.
* A key that stands twice in a yaml file. The message names both lines.
* A yaml text of more than 50,000 characters or 10,000 values. An alias counts as what it stands for.
"""  # noqa: E501

CHANNEL = (
    "Keys of each entry of `channels`. As a dotted path a key stands alone (all channels) or after "
    "the channel's name."
)
WHOLE = """## What goes whole

A sparse channel sends these values whole, without choice and transform:

* every tensor of fewer than 4096 values, such as biases, norms, and matrices up to 63 x 64;
* at most the last 63 values of a tensor that is cut into blocks of 4096 values in a row;
* tensors that `uncompressed` names. It is empty in every preset.

Under FSDP2 and ZeRO it is the size of a rank's shard that counts. A value that goes whole is fp32 where `codec.value_dtype` is, else
bf16. In a small model most values may go whole. The log says how many at the start: `100 of 6500 values of sparse channels go whole`.
"""  # noqa: E501
PRESET_HEAD = """## Keywords of the presets

`preset(NAME, keyword=value)`, `--set keyword=value`, or a key of a short yaml file. Keywords are the numbers of the paper.
`period` is `schedule.sync_every`, the H or K of papers. [Methods](methods.md) says what the others mean.

`lr` has two meanings:

* As a keyword of `diloco`, `streaming_diloco`, `decoupled_momentum`, `sparse_loco`, `sign_loco`, `muloco` and `sign_muloco` it is the rate of the outer step
  (`applier.lr`).
* Beside other presets, and in a whole yaml file, it is the published rate of the inner optimizer. It changes one thing: the rate
  that `base_optimizer(config, params)` takes where you give it no `lr`.

You give your own optimizer its rate yourself: `pretrain.py --lr`. An outer rate below 0.05 is warned of at the start.

| preset | keywords and defaults |
|---|---|"""  # noqa: E501
PATHS = {"Channel": "channels"}


def page() -> str:
    """The whole page, markdown."""
    sections = (_section(cls, path) for cls, path in _classes())
    parts = [HEAD, *sections, WHOLE, _keywords()]
    return "\n".join(parts)


def missing() -> list[str]:
    """Keys without a text, as CLASS.FIELD."""
    return [
        f"{cls.__name__}.{f.name}"
        for cls, _ in _classes()
        for f in dataclasses.fields(cls)
        if not _text(cls, f)
    ]


def _classes() -> Iterator[tuple[Any, str]]:
    """Each dataclass of a configuration with the path under which it stands there, the outer ones
    first.
    """
    queue: list[tuple[Any, str]] = [(ExchangeConfig, "")]
    seen = set()
    while queue:
        cls, path = queue.pop(0)
        if cls in seen:  # a part of a phase is one of a channel
            continue
        seen.add(cls)
        yield cls, path
        queue += [
            (_part(hint), PATHS.get(_part(hint).__name__, name))
            for name, hint in get_type_hints(cls).items()
            if _part(hint)
        ]


def _part(hint: Any) -> Any:
    """The dataclass in a type: itself, of a list, or optional; None if there is none."""
    return next((h for h in (hint, *get_args(hint)) if dataclasses.is_dataclass(h)), None)


def _section(cls: Any, path: str) -> str:
    title = f"## `{path}`" if path else "## Top level"
    about = (
        CHANNEL
        if cls is Channel
        else (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
    )
    hints, prefix = get_type_hints(cls), f"{path}." if path and cls is not Channel else ""
    rows = [_row(cls, f, hints[f.name], prefix) for f in dataclasses.fields(cls)]
    return "\n".join(
        [
            title,
            "",
            about,
            "",
            "| key | type | default | allowed | what it does |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _row(cls: Any, f: dataclasses.Field[Any], hint: Any, prefix: str) -> str:
    inner = _part(hint)
    link = f"[keys](#{PATHS.get(inner.__name__, f.name)})" if inner else _allowed(cls, f.name, hint)
    cells = [f"`{prefix}{f.name}`", _type(hint), _default(f), link, _text(cls, f)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(hint: Any) -> str:
    """A type in the words of yaml."""
    if type(None) in get_args(hint):
        return _type(next(h for h in get_args(hint) if h is not type(None))) + ", or null"
    if get_origin(hint) is tuple:
        return "list of mappings" if _part(hint) else "list of texts"
    if dataclasses.is_dataclass(hint):
        return "mapping"
    return {str: "text", float: "number", int: "whole number", bool: "true or false"}[hint]


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
    return (
        f'"{value}"'
        if isinstance(value, str) and (not value or not value[0].isalnum())
        else f"{value}"
    )


def _allowed(cls: Any, name: str, hint: Any) -> str:
    """What the class says of a value that nobody would allow; empty where it takes all of the
    type.
    """
    if f"{cls.__name__}.{name}" in ALLOWED:
        return ALLOWED[f"{cls.__name__}.{name}"]
    wrong: Any = {bool: None, str: "?", int: -(10**9), float: float("nan")}.get(_plain(hint))
    if wrong is None:
        return ""
    full = presets()["full"]()
    whole: Any = full if cls is ExchangeConfig else full.channels[0] if cls is Channel else cls()
    try:
        dataclasses.replace(whole, **{name: wrong})
    except ValueError as error:
        found = re.search(r"allowed (?:is|are) (.*?)(?:; did you mean .*)?$", str(error), re.DOTALL)
        return _plainly(found[1], name) if found else ""
    return ""


def _plain(hint: Any) -> Any:
    return (
        next((h for h in get_args(hint) if h is not type(None)), hint)
        if type(None) in get_args(hint)
        else hint
    )


def _plainly(text: str, name: str) -> str:
    """`codec.topk >= 1` and `1 <= topk <= 4096`, and lists of words as code."""
    text = re.sub(rf"[\w.]*\b{name}\b", name, text)
    if re.search(r"[<>]", text):
        rule, comma, rest = text.partition(",")
        return f"`{rule}`{comma}{rest}"
    return ", ".join(f"`{word}`" for word in text.split(", "))


def _text(cls: Any, f: dataclasses.Field[Any]) -> str:
    """What a key does: of the class's docstring, else of the field."""
    text: str = _documented(cls).get(f.name) or f.metadata.get("about", "")
    return text.removesuffix(".")


def _documented(cls: Any) -> dict[str, str]:
    """Field -> text of the sections `Args:` and `Attributes:` of a docstring."""
    found: dict[str, str] = {}
    section, current = False, ""
    for line in (inspect.getdoc(cls) or "").splitlines():
        if re.fullmatch(r"\w+:", line):
            section, current = line in ("Args:", "Attributes:"), ""
        elif section and (start := re.fullmatch(r"    (\w+): (.*)", line)):
            current = start[1]
            found[current] = start[2]
        elif section and current and line.startswith("        "):
            found[current] += " " + line.strip()
    return found


def _keywords() -> str:
    rows = []
    for name, make in presets().items():
        takes = [
            f"`{key}={_yaml(p.default)}`" for key, p in inspect.signature(make).parameters.items()
        ]
        rows.append(f"| `{name}` | {', '.join(takes)} |")
    return "\n".join([PRESET_HEAD, *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
