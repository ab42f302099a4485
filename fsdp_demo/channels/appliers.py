"""The ways in which a mean acts, by their names."""

from __future__ import annotations

from collections.abc import Callable

from . import apply, pairs
from .decode import DecodedMean
from .state import LocalChannel

APPLIERS: dict[
    str, Callable[[LocalChannel, DecodedMean | None, apply.Arrival], tuple[float, float] | None]
] = {
    "gradient": apply.as_gradient,
    "outer_step": apply.outer,
    "replace": apply.replace,
    "pair_step": pairs.pair_step,
    "replace_sent": pairs.replace_sent,
}
"""The function that applies a mean (transform domain; None on a copy that only receives), by
`applier.acts_as`. It returns the squared norms of the parameters' change and of the mean, where
these are compared, else None."""
