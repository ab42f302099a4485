"""The table of matrices, the table of rules and the faults to be found name what is there."""

import re
from pathlib import Path

import pytest

from .support.matrices import KEPT


@pytest.mark.parametrize("file", KEPT)
def test_matrices_rows_name_tests(file: str) -> None:
    """A row of the table of matrices names a test that is there."""
    source = (Path(__file__).parent / file).read_text()
    for name, kept in KEPT[file].items():
        assert re.search(rf"^def {name}\(", source, re.M), name
        re.compile(kept)


ROOT = Path(__file__).parents[1]
RULE = re.compile(r"^\| ([a-z-]+(?:, [a-z-]+)*) \| .* \| (.*) \|$", re.M)


def test_membership_rules_name_tests() -> None:
    """A row of the table of rules in docs/membership.md names tests that are there."""
    page = (ROOT / "docs/membership.md").read_text(encoding="utf-8").partition("## Histories")[2]
    page = page.partition("\n## ")[0]
    letters = dict(re.findall(r"`([A-Z])` is `(tests/[\w/]+\.py)`", page))
    rules = RULE.findall(page)
    assert len(rules) >= 23
    for rule, shown in rules:
        tests = re.findall(r"`([\w/.]+)::(\w+)`", shown)
        assert tests, rule
        for where, name in tests:
            source = (ROOT / letters.get(where, where)).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", source, re.M), (rule, name)


PATCHES = sorted((ROOT / "tests/mutants").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_mutants_apply(patch: Path) -> None:
    """The lines that a fault replaces stand in the library, and its tests are there."""
    what, tests, _, to, *lines = patch.read_text(encoding="utf-8").splitlines()
    source = (ROOT / to.removeprefix("+++ b/")).read_text(encoding="utf-8")
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    assert what.startswith("# ") and source.count(before) == 1
    for name in tests.removeprefix("# tests: ").split():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), name
