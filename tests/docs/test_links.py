"""README.md fits ten minutes, links of all pages lead somewhere, and files that pages name are
there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support import pages

ROOT = Path(__file__).parents[2]

PAGES = ("architecture.md", "membership.md", "contributing.md", "wire-format.md")

FILES = {
    f.relative_to(ROOT).as_posix()
    for top in ("fsdp_demo", "deepspeed_ext", "tests", "recipes", "benchmarks")
    for f in (ROOT / top).rglob("*.py")
}


@pytest.mark.parametrize("page", PAGES)
def test_paths_of_named_files_are_there(page: str) -> None:
    """Files that a page names are in the tree."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/]+\.py)", text) if "NAME" not in name}
    there = [name for name in named if any(f"/{file}".endswith(f"/{name}") for file in FILES)]
    assert named and named == set(there), named - set(there)


README = pages.ROOT / "README.md"


def test_readme_length() -> None:
    """README.md has at most 120 lines."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", [pytest.param(p, id=pages.name(p)) for p in pages.pages()])
def test_links_lead_somewhere(page: Path) -> None:
    """Links of a page lead to files that are there."""
    targets = (to.partition("#")[0] for to in pages.links(page.read_text(encoding="utf-8")))
    missing = [to for to in targets if to and not (page.parent / to).exists()]
    assert not missing, f"{pages.name(page)} links to what is not there: {', '.join(missing)}"
