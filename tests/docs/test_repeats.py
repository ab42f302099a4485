"""Each passage has one place, sections of the pages about the code say what they are for, and every
measured table has a date, a machine and a command, or says that these were not recorded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise

import pytest

from ..support import pages

DOCS = pages.ROOT / "docs"
MEASURED = sorted(f"measured/{p.stem}" for p in (DOCS / "measured").glob("*.md"))
GENERATED = {"docs/api.md", "docs/commands.md", "docs/configuration.md"}
FRONT = {"README.md", "docs/index.md"}  # the first page of the repository and that of the site
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
MACHINE = re.compile(r"CPU core|Xeon|EPYC|no machine matters|machine was not recorded")
COMMAND = re.compile(r"```bash|`[^`\n]*\.(?:py|sh)\b[^`\n]*`|commands? .*not recorded")


def sections(text: str, inherit: bool = False) -> list[tuple[str, str]]:
    """(heading, what stands below it up to the next heading) of a page; `inherit`: below a part of
    a section stands the beginning of its section, too, below that the beginning of the page.
    """
    lines = text.splitlines()
    code = {n for b in pages.blocks(text) for n in range(b.line, b.line + b.code.count("\n"))}
    heads = [n for n, line in enumerate(lines) if re.match(r"#{2,3} ", line) and n + 1 not in code]
    found, section, begin = [], "", "\n".join(lines[: heads[0] if heads else None])
    for start, end in pairwise([*heads, len(lines)]):
        below = "\n".join(lines[start + 1 : end]).strip() + "\n"
        section = section if lines[start].startswith("###") else below
        if inherit and TABLE.search(below):
            below += ("" if section is below else section) + begin
        found.append((lines[start].lstrip("# "), below))
    return found


def written() -> list[tuple[str, str]]:
    """(page, text) of the pages that people write, without tables that tables.py writes."""
    marked = re.compile(r"^<!-- table: .*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
    found = [(pages.name(p), p.read_text(encoding="utf-8")) for p in pages.pages()]
    return [(name, marked.sub("", text)) for name, text in found if name not in GENERATED]


def test_the_front_pages_explain_the_same_words() -> None:
    """Those that README uses, it explains as the site does."""

    def words(text: str) -> tuple[list[str], str]:
        (table,) = (t for t in TABLE.findall(text) if t.startswith("| word |"))
        return list(table.splitlines()[2:]), text.replace(table, "")

    told, rest = words((pages.ROOT / "README.md").read_text(encoding="utf-8"))
    known, _ = words((DOCS / "index.md").read_text(encoding="utf-8"))
    assert len(known) == 8
    used = [
        row for row in known if any(word in rest for word in row.split(" | ")[0][2:].split(", "))
    ]
    assert told == used


def test_a_sentence_stands_on_one_page() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for name, text in written():
        for sentence in pages.sentences(text):
            if pages.words(sentence) >= 12 and not sentence.startswith("Date: "):
                places[sentence.lower()].add(name)
    twice = {s: sorted(at) for s, at in places.items() if len(at - FRONT) > 1}
    assert not twice, "\n".join(f"{', '.join(at)}: {s}" for s, at in twice.items())


def test_a_row_of_a_table_stands_on_one_page() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for name, text in written():
        for row in re.findall(r"^\|.*[^|\-: \n].*$", pages.without_blocks(text), re.MULTILINE):
            if len(row) >= 80:
                places[row].add(name)
    twice = {row: sorted(at) for row, at in places.items() if len(at - FRONT) > 1}
    assert not twice, "\n".join(f"{', '.join(at)}: {row}" for row, at in twice.items())


@pytest.mark.parametrize(
    ("page", "head", "below"),
    [
        pytest.param(page, head, below, id=f"{page} {head}")
        for page in ("architecture", "membership", "performance", *MEASURED)
        for head, below in sections((DOCS / f"{page}.md").read_text(encoding="utf-8"))
        if not below.startswith("#")
    ],
)
def test_a_section_begins_with_a_sentence(page: str, head: str, below: str) -> None:
    first = below.splitlines()[0]
    assert re.match(r"[A-Z`\[]", first) and re.search(r"[.:]( |$)", first), (
        f"docs/{page}.md, {head}: {first!r} does not say what the section is for"
    )


@pytest.mark.parametrize(
    ("page", "head", "below"),
    [
        pytest.param(page, head, below, id=f"{page} {head}")
        for page in MEASURED
        for head, below in sections((DOCS / f"{page}.md").read_text(encoding="utf-8"), inherit=True)
        if TABLE.search(below) and head not in ("What is tested where", "Pages")
    ],
)
def test_a_measured_table_has_date_machine_and_command(page: str, head: str, below: str) -> None:
    lacks = [
        what
        for what, form in (
            ("a date", re.compile(r"20\d\d-\d\d-\d\d")),
            ("a machine", MACHINE),
            ("a command", COMMAND),
        )
        if not form.search(below)
    ]
    assert not lacks, f"docs/{page}.md, {head}, lacks {' and '.join(lacks)}"
