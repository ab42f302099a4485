"""The table in docs/concepts.md that maps DeMo's step to this library names functions that are
there.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def functions(package: str) -> set[str]:
    """Names of all functions and methods of a package."""
    return {
        node.name
        for path in (ROOT / "fsdp_demo" / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def test_concepts_page_names_functions_that_are_there() -> None:
    """Each line of DeMo's step has its function in this library."""
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    section = text.partition("## DeMo in this library")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*? \| `(\w+)`: `(\w+)` \|", section, re.MULTILINE)
    assert len(rows) >= 12
    missing = [f"{package}: {name}" for package, name in rows if name not in functions(package)]
    assert not missing, f"docs/concepts.md names what is not there: {', '.join(missing)}"
