"""README.md fits ten minutes, and the pages behind it are written in sentences that need no second
reading.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support import pages

README = pages.ROOT / "README.md"


def mean(text: str) -> float:
    """Words per sentence."""
    counts = [pages.words(s) for s in pages.sentences(text)]
    return sum(counts) / len(counts) if counts else 0.0


def test_what_counts_as_a_sentence() -> None:
    text = (
        "# Not this\n\nOne `two three` four. Five [six](seven.md)!\n\n* Eight\n  "
        "nine.\n\n```text\nnot this\n```\n"
    )
    text += "| not | this |\n<!-- nor this -->\n"
    assert [pages.words(s) for s in pages.sentences(text)] == [3, 2, 2]


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_its_sentences_are_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert mean(text) <= 20
    long = [s for s in pages.sentences(text) if pages.words(s) > 30]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=pages.name(p)) for p in pages.pages() if p != README]
)
def test_sentences_of_pages_are_short(page: Path) -> None:
    found = sorted(pages.sentences(page.read_text(encoding="utf-8")), key=pages.words)
    assert mean(page.read_text(encoding="utf-8")) <= 22, "the longest:\n" + "\n".join(found[-3:])


@pytest.mark.parametrize("page", [pytest.param(p, id=pages.name(p)) for p in pages.pages()])
def test_no_sentence_is_very_long(page: Path) -> None:
    found = pages.sentences(page.read_text(encoding="utf-8"))
    long = [s for s in found if pages.words(s) > 35]
    assert not long, f"{pages.name(page)}: split\n" + "\n".join(long)


@pytest.mark.parametrize("page", [pytest.param(p, id=pages.name(p)) for p in pages.pages()])
def test_links_lead_somewhere(page: Path) -> None:
    targets = (to.partition("#")[0] for to in pages.links(page.read_text(encoding="utf-8")))
    missing = [to for to in targets if to and not (page.parent / to).exists()]
    assert not missing, f"{pages.name(page)} links to what is not there: {', '.join(missing)}"
