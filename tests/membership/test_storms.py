"""Random lives of five islands: crashes, suspicions, leavers and joiners while messages of all
kinds go on (tests/support/storms.py).

Checked after every step: I1 to I5, I8 and the bound of 2 q kept messages. At the end all faults
stop, and I9 must hold: the members stand in one epoch, have delivered every message, and have one
history.
"""

from __future__ import annotations

import pytest

from ..support.storms import storms


def test_storm_of_random_faults() -> None:
    """Random crashes, suspicions, leavers and joiners keep the invariants."""
    happened = storms(range(100))
    assert min(happened[kind] for kind in ("crash", "suspect", "leave", "join")) > 40
    assert happened["change"] > 80
    assert happened["all gone"] < 10


def test_storm_with_one_rank_and_many_open_messages() -> None:
    """Random lives with one rank for each island, and up to four messages open, keep the
    invariants.
    """
    happened = storms(range(80), peer_groups=1, window=4, faults=6)
    assert happened["change"] > 100


@pytest.mark.parametrize("options", [{}, {"peer_groups": 1, "window": 1}])
@pytest.mark.parametrize(
    "lives",
    [
        pytest.param(range(24), id="24"),
        pytest.param(range(24, 400), id="376", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_storm_of_newcomers(lives: range, options: dict[str, int]) -> None:
    """Newcomers begin in random lives, and many of them behind a question that lies at their
    base.
    """
    among = ("join", "join", "join", "suspect")
    happened = storms(lives, faults=6, messages=24, among=among, **options)
    assert happened["begun"] > len(lives) / 3 and happened["behind"] > len(lives) / 8


def test_storm_newcomer_frees_what_a_leaver_sent_ahead_of_questions() -> None:
    """A newcomer that begins behind questions keeps nothing of a leaver's part of one of them."""
    for seed in (1002864, 1004004):
        happened = storms(range(seed, seed + 1), peer_groups=1, window=1, faults=3)
        assert happened["early"] and happened["behind"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("part", range(10))
def test_storm_of_a_hundred_thousand_lives(part: int) -> None:
    """Ten parts of 10,000 random lives each keep the invariants."""
    options = {"peer_groups": 1 + part % 3, "window": 1 + part % 4, "faults": 3 + part % 5}
    happened = storms(range(10**6 + part * 10**4, 10**6 + (part + 1) * 10**4), **options)
    assert happened["change"] > 5000
