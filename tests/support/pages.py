"""The pages that users read, in pieces: fenced blocks with their marks, commands, links.

A mark is one line directly above a fence: `<!-- not run: REASON -->`, or `<!-- run first: PATH -->`
with a file of python (from the repository root) that gives the block what a reader has already.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$")
MARK = re.compile(r"^ *<!-- (?P<kind>not run|run first):(?P<words>.*)-->$")
COMMAND = re.compile(r"^((\.venv/bin/)?(python3? |fsdp-demo )|bash recipes/|bash tests/)")
OPERATORS = set("|&;()<>")


def pages() -> list[Path]:
    """README.md, docs/**/*.md and the README of recipes/: what users read."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *docs, ROOT / "recipes" / "README.md"]


def of_benchmarks() -> list[Path]:
    """The READMEs of benchmarks/ and its pages of results."""
    return sorted((ROOT / "benchmarks").rglob("*.md"))


def metrics_table() -> dict[str, tuple[str, str, str, str]]:
    """Name of a metric -> (unit, whose, what it is, when), by docs/metrics.md."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("| name | unit | of |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([\w/]+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", table, re.M)
    return {name: (unit, of, text, when) for name, unit, of, text, when in rows}


def metric(name: str) -> str:
    """The row of `metrics_table` for what a tracker gets as `exchange/NAME`."""
    plain = name.removeprefix("exchange/")
    return "kept_energy/CHANNEL" if plain.startswith("kept_energy/") else plain


def name(page: Path) -> str:
    """For the id of a test."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of its first line of code, from 1. language: "" where the fence names none.
        not_run: the reason in its mark, "" where that is empty, None without such a mark.
        first: the file that its other mark names.
    """

    line: int
    language: str
    code: str
    not_run: str | None = None
    first: str | None = None


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, also indented ones."""
    found, lines, at = [], text.splitlines(), 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if not fence:
            at += 1
            continue
        end = at + 1
        while end < len(lines) and not re.match(
            rf"^ *{fence['ticks'][0]}{{{len(fence['ticks'])},}} *$", lines[end]
        ):
            end += 1
        mark = MARK.match(lines[at - 1]) if at else None
        marks = {mark["kind"]: mark["words"].strip()} if mark else {}
        code = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
        language = fence["info"].split()[0] if fence["info"].strip() else ""
        found.append(Block(at + 2, language, code, marks.get("not run"), marks.get("run first")))
        at = end + 1
    return found


# ---- commands ----------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Words of every command in the bash blocks of a page, and in its inline code."""
    for block in blocks(text):
        if block.language == "bash":
            for line in re.sub(r"\\\n", " ", block.code).splitlines():
                yield from _simple(line)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", " ".join(without_blocks(text).split())):
        if COMMAND.match(span):
            yield from _simple(span)


def _simple(line: str) -> Iterator[list[str]]:
    """A line of shell, cut at its operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:  # a quote that goes on in the next line
        words = line.split()
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= OPERATORS:
            if command:
                yield command
            command = []
        else:
            command.append(word)


# ---- prose -------------------------------------------------------------------------------------


def without_blocks(text: str) -> str:
    """A page without its fenced blocks."""
    out, lines = [], text.splitlines()
    inside = {n for b in blocks(text) for n in range(b.line - 1, b.line + b.code.count("\n") + 1)}
    for number, line in enumerate(lines, 1):
        out.append("" if number in inside else line)
    return "\n".join(out)


def links(text: str) -> list[str]:
    """Targets of the links and pictures of a page, but for those into the web."""
    text = re.sub(r"`[^`]+`", "", without_blocks(text))
    return [to for to in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"^[a-z]+:", to)]
