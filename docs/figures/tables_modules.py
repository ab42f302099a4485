"""What each file of a package is, by the first sentence of its docstring."""

from __future__ import annotations

import ast
import re

from figure_cells import ROOT, Rows


def modules(package: str) -> Rows:
    """The files of a package of `fsdp_demo`."""
    rows = [["file", "what it is"]]
    for path in sorted((ROOT / "fsdp_demo" / package).glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
        rows.append([f"`{path.name}`", first])
    return rows
