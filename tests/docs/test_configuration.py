"""docs/configuration.md has every key, what is allowed and what it does; test_figures.py compares
its tables with the dataclasses.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from fsdp_demo.config import channel, parts
from fsdp_demo.config.schema import ExchangeConfig

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_configuration_page_every_key_has_a_text() -> None:
    """Each key has a text."""
    rows = re.findall(r"^\| `[\w.]+` (?:\|.*){3}\| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 50 and all(rows)


def test_configuration_page_has_every_field() -> None:
    """Each field of the dataclasses is on the page."""
    for f in (*dataclasses.fields(ExchangeConfig), *dataclasses.fields(channel.Channel)):
        assert f"| `{f.name}` |" in PAGE
    for part in (
        parts.Accumulator,
        parts.Codec,
        parts.Reducer,
        parts.Applier,
        parts.Fragments,
        parts.Drop,
        parts.Pairs,
    ):
        for f in dataclasses.fields(part):
            assert f"| `{part.__name__.lower()}.{f.name}` |" in PAGE


def test_configuration_page_has_the_allowed_values() -> None:
    """The allowed values on the page are those that the classes check."""
    assert "| `codec.topk` | whole number | `32` | `1 <= topk <= 4096` |" in PAGE
    assert "| `accumulator.gain` | number | `1.0` | `gain > 0` |" in PAGE
    assert "| `codec.transform` | text | `none` | `none`, `dct` |" in PAGE
    assert "| `clip` | number, or null | `null` | `clip > 0`, or null for no clipping |" in PAGE
    assert '| `include` | list of texts | `["*"]` |' in PAGE
