"""docs/configuration.md is what the dataclasses say, and every key says what it does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fsdp_demo.config import channel, parts, reference
from fsdp_demo.config.schema import ExchangeConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_configuration_page_is_made_from_the_dataclasses() -> None:
    """The page is what `fsdp_demo.config.reference` prints."""
    assert PAGE.read_text(encoding="utf-8") == reference.page(), (
        "run python -m fsdp_demo.config.reference > docs/configuration.md"
    )


def test_configuration_page_every_key_has_a_text() -> None:
    """Each key has a text."""
    assert reference.missing() == []


def test_configuration_page_has_every_field() -> None:
    """Each field of the dataclasses is on the page."""
    text = reference.page()
    for f in (*dataclasses.fields(ExchangeConfig), *dataclasses.fields(channel.Channel)):
        assert f"| `{f.name}` |" in text
    for part in (
        parts.Accumulator,
        parts.Codec,
        parts.Reducer,
        parts.Applier,
        parts.Fragments,
    ):
        for f in dataclasses.fields(part):
            assert f"| `{part.__name__.lower()}.{f.name}` |" in text


def test_configuration_page_has_the_allowed_values() -> None:
    """The allowed values on the page are those that the classes check."""
    text = reference.page()
    assert "| `codec.topk` | whole number | `32` | `1 <= topk <= 4096` |" in text
    assert "| `accumulator.gain` | number | `1.0` | `gain > 0` |" in text
    assert "| `codec.transform` | text | `none` | `none`, `dct` |" in text
    assert "| `clip` | number, or null | `null` | `clip > 0`, or null for no clipping |" in text
    assert '| `include` | list of texts | `["*"]` |' in text
