"""Whose tokens a model card and `inspect` count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_demo.integrations.export.card import _counted
from fsdp_demo.tools.inspect import of_islands

SINCE = ", each since it began, joined or took over"


def held(folder: str, islands: list[int], of: int) -> Any:
    """A part of a checkpoint with 100 tokens of each island."""
    return SimpleNamespace(
        folder=folder,
        islands=islands,
        paths=[(island, 0) for island in islands],
        heads=[{"islands": of}],
        outline=lambda rank, island: SimpleNamespace(tokens=100),
    )


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (
            [held("a", [0], 2), held("b", [1], 2)],
            "200, the sum over islands 0 and 1" + SINCE,
        ),
        ([held("a", [0], 2)], "100, of island 0; island 1 holds no step 8"),
        ([held("a", [1], 3)], "100, of island 1; islands 0 and 2 hold no step 8"),
        # the last start of a run that had more islands before
        ([held("a", [0], 1)], "100, of island 0"),
        (
            [held("a", [0, 1], 3)],
            "200, the sum over islands 0 and 1" + SINCE + "; island 2 holds no step 8",
        ),
    ],
)
def test_card_tokens_of_islands(seen: list[Any], says: str) -> None:
    """The number of tokens in a model card says whose they are."""
    assert list(_counted(SimpleNamespace(seen=seen, step=8))) == [("tokens", says)]
    assert of_islands([2, 0]) == "the sum over islands 0 and 2"
