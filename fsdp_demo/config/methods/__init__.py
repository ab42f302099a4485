"""Methods by name, published ones and two of ours. Each is a short function that returns an
`ExchangeConfig`, in a file of its family: a new paper is a new function there, and its name in
`_PRESETS` here. Keywords of a function are the numbers its paper talks about.
"""

from __future__ import annotations

from collections.abc import Callable

from ..schema import ExchangeConfig
from .averages import desloc, full, local_adam, local_sgd, sel_sync
from .demo import demo, random, stride
from .diloco import diloco, muloco, sign_muloco, streaming_diloco
from .pairs import noloco, saps
from .sparse import decoupled_momentum, sign_loco, sparse_loco

RECOMMENDED = (
    "sign_muloco",
    "sign_loco",
    "muloco",
    "demo",
    "diloco",
    "decoupled_momentum",
    "sparse_loco",
)
"""What to start from; the other presets stand for their papers."""

UNPUBLISHED = {"full": "baseline", "sign_loco": "ours", "sign_muloco": "ours"}
"""Presets that stand for no paper, and what they are."""

_PRESETS: tuple[Callable[..., ExchangeConfig], ...] = (
    full,
    local_sgd,
    sel_sync,
    local_adam,
    desloc,
    diloco,
    streaming_diloco,
    demo,
    random,
    stride,
    decoupled_momentum,
    sparse_loco,
    sign_loco,
    muloco,
    sign_muloco,
    noloco,
    saps,
)


def presets() -> dict[str, Callable[..., ExchangeConfig]]:
    """Name -> function of every preset; the first line of its docstring says what it is.

    Example:
        >>> from fsdp_demo import presets
        >>> "demo" in presets()
        True
    """
    return {f.__name__: f for f in _PRESETS}
