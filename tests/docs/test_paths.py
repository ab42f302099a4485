"""Files that the pages about the code name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("architecture.md", "membership.md", "contributing.md", "wire-format.md")
FILES = {
    f.relative_to(ROOT).as_posix()
    for top in ("fsdp_demo", "deepspeed_ext", "tests", "recipes")
    for f in (ROOT / top).rglob("*.py")
}


@pytest.mark.parametrize("page", PAGES)
def test_paths_of_named_files_are_there(page: str) -> None:
    """Files that a page names are in the tree."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/]+\.py)", text) if "NAME" not in name}
    assert (
        named
        and {
            name
            for name in named
            if not any(file == name or file.endswith(f"/{name}") for file in FILES)
        }
        == set()
    )
