"""The table of matrices names tests that are there."""

import re
from pathlib import Path

import pytest

from .support.matrices import KEPT


@pytest.mark.parametrize("file", KEPT)
def test_rows_name_tests(file: str) -> None:
    source = (Path(__file__).parent / file).read_text()
    for name, kept in KEPT[file].items():
        assert re.search(rf"^def {name}\(", source, re.M), name
        re.compile(kept)
