"""Yaml as users write it: a key that stands twice is an error, not the last one's win, and every
error says where.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

LONGEST = 50_000
"""Characters of a text: configurations have a few thousand."""

MOST = 10_000
"""Values in it, each alias counted as what it stands for: a few lines of them can stand for
billions.
"""


def read(text: str, where: str) -> Any:
    """Plain data of a yaml text.

    Args:
        where: the text's file, or other words for it, with which errors begin.

    Raises:
        ValueError: no yaml, or one of more than `LONGEST` characters or `MOST` values, or nested
            too deeply; or a key that stands twice, be it once dotted (`codec.topk`) and once
            nested.

    Example:
        >>> from fsdp_demo.config.yaml_text import read
        >>> read("preset: demo", "a.yaml")
        {'preset': 'demo'}
    """
    if len(text) > LONGEST:
        raise ValueError(f"{where} has {len(text):,} characters, allowed are {LONGEST:,}")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if _values(root, {}) > MOST:
            raise ValueError(
                f"{where} has more than {MOST:,} values, each alias counted as what it stands for"
            )
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is no yaml: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply, or in itself") from None
    lines: dict[str, int] = {}
    for path, line in _keys(root, ""):
        if path in lines:
            raise ValueError(
                f"{where}: {path} stands twice, in line {lines[path]} and in line {line}: "
                "remove one of them"
            )
        lines[path] = line
    return data


def _values(node: yaml.Node | None, known: dict[int, int]) -> int:
    """How many values a node stands for. Raises RecursionError for one that stands in itself."""
    if id(node) not in known:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.CollectionNode):
            pairs = isinstance(node, yaml.MappingNode)
            inner = [n for pair in node.value for n in pair] if pairs else node.value
        known[id(node)] = 1 + sum(_values(n, known) for n in inner)
    return known[id(node)]


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Every key as a dotted path, and its line, from 1."""
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _keys(item, f"{prefix.removesuffix('.')}[{i}].")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _keys(value, f"{prefix}{key.value}.")
