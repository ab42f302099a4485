"""What the makers of tables share: the figures, how numbers are written, the marks in pages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "recipes"))

Rows = list[list[str]]
Tables = Mapping[str, Callable[[], Rows]]

MARK = re.compile(
    r"^<!-- table: (?P<name>[\w-]+) -->\n(?P<text>.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE
)


def load(name: str) -> Any:
    """What a file of this folder holds."""
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def rate(link: str) -> str:
    """As "100 Mbit/s"."""
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", link).groups()  # type: ignore[union-attr]
    return f"{number} {unit}/s"


def markdown(rows: Rows) -> str:
    """A table whose columns of numbers are aligned to the right."""
    number = re.compile(r"^[\d.,]+( of [\d.]+)?( ?[%xs]| [kMGT]?B)?$|^-$|^not run$")
    right = [all(number.match(row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("---:" if r else "---" for r in right) + "|")
    return "\n".join(lines) + "\n"


def marked(name: str, rows: Rows) -> str:
    """A table between its marks."""
    return f"<!-- table: {name} -->\n{markdown(rows)}<!-- end -->"


def write(tables: Tables, pages: Iterable[Path]) -> None:
    """Put every table between its marks in some pages."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        made = MARK.sub(lambda m: marked(m["name"], tables[m["name"]]()), text)
        if made != text:
            page.write_text(made, encoding="utf-8")


def printed(tables: Tables) -> str:
    """All tables, each between its marks."""
    return "\n\n".join(marked(name, make()) for name, make in tables.items())
