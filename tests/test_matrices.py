"""The table of matrices names tests that are there."""

import re
from pathlib import Path

import pytest

from .support.matrices import KEPT


@pytest.mark.parametrize("row", KEPT)
def test_a_row_names_a_test(row: str) -> None:
    path, _, name = row.partition("::")
    assert re.search(rf"^def {name}\(", (Path(__file__).parent / path).read_text(), re.M), row
    re.compile(KEPT[row])
