"""What the training batches tell: tokens, and whether islands were given the same data."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from ...exchange.exchange import Exchange
from ...peers.header import memory

log = logging.getLogger("fsdp_demo")

CURE = (
    "give each island its own part: train_dataset=split_dataset_by_island(dataset) "
    "(fsdp_demo.integrations.data)"
)


def tokens_in(inputs: Any) -> int:
    """Tokens of a batch: the elements of `input_ids`, else the rows of its first tensor."""
    tensors = (
        {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
        if hasattr(inputs, "items")
        else {}
    )
    main = tensors.get("input_ids", next(iter(tensors.values()), None))
    if main is None:
        return 0
    return main.numel() if "input_ids" in tensors or main.ndim == 0 else len(main)


def _tensors(inputs: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dictionaries and sequences, in order."""
    if isinstance(inputs, torch.Tensor):
        yield inputs
    elif hasattr(inputs, "items"):
        for _, value in sorted(inputs.items()):
            yield from _tensors(value)
    elif isinstance(inputs, (list, tuple)):
        for value in inputs:
            yield from _tensors(value)


def _first_row(dataset: Any) -> str | None:
    """A mark of a map-style data set without a fingerprint, by its first row."""
    if not hasattr(dataset, "__getitem__"):
        return None
    try:
        return f"row {zlib.crc32(repr(dataset[0]).encode())}"
    except Exception:  # whatever its rows are like, training does not depend on this
        return None


class FirstBatches:
    """Looks at the first batch of a training once and warns where two islands have the same, or the
    same rows in another order.
    """

    def __init__(self, exchange: Exchange, dataset: Any):
        # the others have been asked at their first step
        asked = exchange.topology.kind == "islands" and not exchange.newcomer
        self._exchange: Exchange | None = exchange if asked else None
        self._rows = getattr(dataset, "_fingerprint", None) or _first_row(dataset)

    def look(self, inputs: Any) -> None:
        """Called with every batch, on all ranks of all islands."""
        if self._exchange is None:
            return
        exchange, self._exchange = self._exchange, None
        mark = 0
        for value in _tensors(inputs):
            mark = zlib.crc32(
                memory(value.detach().cpu().contiguous().view(-1).view(torch.uint8)), mark
            )
        exchange.rows_compared()
        # A word of its own where there is nothing to compare: only what is equal is news.
        rows = self._rows or f"island {exchange.topology.island}"
        if exchange.across_islands.any_equal(mark or f"island {exchange.topology.island}"):
            log.warning("two islands train on the same first batch: %s", CURE)
        elif exchange.across_islands.any_equal(rows):
            log.warning("two islands train on the same rows in different order: %s", CURE)
