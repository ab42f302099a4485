"""README.md fits ten minutes, and links of all pages lead somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support import pages

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
