"""Docstrings of public names: each says its subject itself, it does not only send the reader on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE = re.compile(r"See [`\w][^.]*(?:\.\w+[^.]*)*\.?")


def public(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(name, docstring) of every public class and function in `node`."""
    for child in ast.iter_child_nodes(node):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(child, kinds) and not child.name.startswith("_"):
            yield f"{name}.{child.name}", ast.get_docstring(child) or ""
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{name}.{child.name}")


def only_references() -> list[str]:
    """The public names whose docstring only says where else to read."""
    found = []
    for file in sorted(
        p for top in ("fsdp_demo", "deepspeed_ext") for p in (ROOT / top).rglob("*.py")
    ):
        where = str(file.relative_to(ROOT))
        for name, text in public(ast.parse(file.read_text(encoding="utf-8")), where):
            if REFERENCE.fullmatch(" ".join(text.split())):
                found.append(name)
    return found


def test_docstrings_are_not_only_references() -> None:
    """No public docstring only sends the reader on."""
    assert only_references() == []


def test_docstrings_that_are_references_are_told() -> None:
    """A docstring that is a reference is told from one that says its subject."""
    texts = {
        "See `Coder.encode`.": True,
        "See `Host.load` of hosts/base.py": True,
        "See `Coder.encode`. The scales are bf16.": False,
        "The inverse of `encode`.": False,
    }
    assert {text: bool(REFERENCE.fullmatch(text)) for text in texts} == texts
