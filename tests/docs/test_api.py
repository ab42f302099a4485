"""docs/api.md lists every public name, and nothing that is not there."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^::: ([\w.]+)$", PAGE, re.M)

LEFT_OUT = {
    "fsdp_demo.__version__": "a text, not an interface",
    "fsdp_demo.tools.planner.PEAK": "a table of numbers, for the recipes",
}
PUBLIC = (
    *("fsdp_demo", "fsdp_demo.checkpoint", "fsdp_demo.tools.planner", "deepspeed_ext"),
    *("fsdp_demo.integrations.trainer", "fsdp_demo.integrations.export"),
)
NEEDS = {"fsdp_demo.integrations": "transformers", "deepspeed_ext": "deepspeed"}


def there(name: str) -> bool:
    """Whether the libraries that a name needs are installed."""
    wanted = [library for start, library in NEEDS.items() if name.startswith(start)]
    return all(importlib.util.find_spec(library) for library in wanted)


@pytest.mark.parametrize("module", PUBLIC)
def test_api_page_lists_every_public_name(module: str) -> None:
    """docs/api.md lists each public name, but for those left out with a reason."""
    if not there(module):
        pytest.skip(f"{module} needs a library that is not installed")
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    assert names - set(LISTED) - set(LEFT_OUT) == set()


def test_api_page_left_out_names_are_public() -> None:
    """A name that is left out is public and has a reason."""
    assert all(reason for reason in LEFT_OUT.values()) and not set(LEFT_OUT) & set(LISTED)
    for name in LEFT_OUT:
        module, _, attribute = name.rpartition(".")
        assert attribute in importlib.import_module(module).__all__


@pytest.mark.parametrize("name", LISTED)
def test_api_page_names_are_there(name: str) -> None:
    """A name that is listed is there and has a docstring."""
    if not there(name):
        pytest.skip(f"{name} needs a library that is not installed")
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


def test_api_page_lists_no_name_twice() -> None:
    """No name is listed twice."""
    assert len(LISTED) == len(set(LISTED))
    assert {f"fsdp_demo.{name}" for name in ("attach", "Exchange")} <= set(LISTED)
