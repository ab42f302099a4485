"""docs/api.md lists every public name, and nothing that is not there."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

LISTED = re.findall(
    r"^::: ([\w.]+)$",
    (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8"),
    re.M,
)

LEFT_OUT = {
    "fsdp_demo.__version__": "a text, not an interface",
    "fsdp_demo.checkpoint.crc32": "a checksum that other packages of this project share",
    "fsdp_demo.tools.planner.PEAK": "a table of numbers, for the recipes",
    "fsdp_demo.checkpoint.describe_part": "the head of a part; fsdp-demo inspect prints it",
}
PUBLIC = (
    "fsdp_demo",
    "fsdp_demo.checkpoint",
    "fsdp_demo.tools.planner",
    "fsdp_demo.integrations.trainer",
    "fsdp_demo.integrations.export",
    "deepspeed_ext",
)
NEEDS = {"fsdp_demo.integrations": "transformers", "deepspeed_ext": "deepspeed"}


def there(name: str) -> bool:
    """Whether the libraries that a name needs are installed."""
    wanted = [library for start, library in NEEDS.items() if name.startswith(start)]
    return all(importlib.util.find_spec(library) for library in wanted)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_listed(module: str) -> None:
    if not there(module):
        pytest.skip(f"{module} needs a library that is not installed")
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    assert names - set(LISTED) - set(LEFT_OUT) == set()


def test_what_is_left_out_is_public_and_has_a_reason() -> None:
    assert all(reason for reason in LEFT_OUT.values()) and not set(LEFT_OUT) & set(LISTED)
    for name in LEFT_OUT:
        module, _, attribute = name.rpartition(".")
        assert attribute in importlib.import_module(module).__all__


@pytest.mark.parametrize("name", LISTED)
def test_what_is_listed_is_there_and_has_a_docstring(name: str) -> None:
    if not there(name):
        pytest.skip(f"{name} needs a library that is not installed")
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


def test_no_name_is_listed_twice() -> None:
    assert len(LISTED) == len(set(LISTED)) and {
        f"fsdp_demo.{name}" for name in ("attach", "Exchange")
    } <= set(LISTED)
