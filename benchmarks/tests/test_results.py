"""Pages of benchmarks/: measured tables have a date, a machine and a command, or say that these
were not recorded; links lead somewhere, and commands name what exists.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import problems
from tests.support import pages

MEASURED = [
    *sorted((pages.ROOT / "benchmarks" / "results").glob("*.md")),
    pages.ROOT / "docs" / "results.md",
]
ALL = [pytest.param(page, id=pages.name(page)) for page in pages.of_benchmarks()]
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
MACHINE = re.compile(r"CPU core|Xeon|EPYC|H100|no machine matters|machine was not recorded")
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


@pytest.mark.parametrize(
    ("page", "head", "below"),
    [
        pytest.param(pages.name(page), head, below, id=f"{page.stem} {head}")
        for page in MEASURED
        for head, below in sections(page.read_text(encoding="utf-8"), inherit=True)
        if TABLE.search(below) and head not in ("What is tested where", "Pages")
    ],
)
def test_measured_table_has_date_machine_and_command(page: str, head: str, below: str) -> None:
    """A measured table has a date, a machine and a command, or says that they were not recorded."""
    lacks = [
        what
        for what, form in (
            ("a date", re.compile(r"20\d\d-\d\d-\d\d")),
            ("a machine", MACHINE),
            ("a command", COMMAND),
        )
        if not form.search(below)
    ]
    assert not lacks, f"{page}, {head}, lacks {' and '.join(lacks)}"


@pytest.mark.parametrize("page", ALL)
def test_results_links_lead_somewhere(page: Path) -> None:
    """Links of a page of benchmarks/ lead to files that are there."""
    targets = (to.partition("#")[0] for to in pages.links(page.read_text(encoding="utf-8")))
    missing = [to for to in targets if to and not (page.parent / to).exists()]
    assert not missing, f"{pages.name(page)} links to what is not there: {', '.join(missing)}"


@pytest.mark.parametrize("page", ALL)
def test_results_commands_name_what_exists(page: Path) -> None:
    """Commands on a page of benchmarks/ name programs, flags and files that exist, and each block
    says why it is not run.
    """
    text = page.read_text(encoding="utf-8")
    wrong = [p for command in pages.commands(text) for p in problems(command)]
    assert not wrong, "\n".join(wrong)
    assert all(b.not_run or b.language == "text" for b in pages.blocks(text))
