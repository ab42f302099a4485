"""What the training batches tell: tokens, and whether islands were given the same data."""

from __future__ import annotations

import logging
import zlib
from typing import Any

import torch

from ..codecs.wire import memory
from ..exchange import Exchange

log = logging.getLogger("fsdp_demo")

CURE = "give each island its own part: train_dataset=split_dataset_by_island(dataset) (fsdp_demo.integrations.data)"


def tokens_in(inputs: Any) -> int:
    """Tokens of a batch: those of `attention_mask`'s shape or `input_ids`, else its rows."""
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)} if hasattr(inputs, "items") else {}
    main = tensors.get("input_ids", next(iter(tensors.values()), None))
    if main is None:
        return 0
    return main.numel() if "input_ids" in tensors else len(main)


class FirstBatches:
    """Looks at the first batch of a training once and warns where two islands have the same, or the same rows in another order."""

    def __init__(self, exchange: Exchange, dataset: Any):
        self._exchange: Exchange | None = exchange if exchange.topology.kind == "islands" else None
        self._rows = getattr(dataset, "_fingerprint", None)

    def look(self, inputs: Any) -> None:
        """Called with every batch, on all ranks of all islands."""
        if self._exchange is None:
            return
        exchange, self._exchange = self._exchange, None
        mark = 0
        for name, value in sorted(inputs.items()) if hasattr(inputs, "items") else []:
            if isinstance(value, torch.Tensor):
                mark = zlib.crc32(memory(value.detach().cpu().contiguous().view(-1).view(torch.uint8)), zlib.crc32(name.encode(), mark))
        # A number of its own where a data set has no fingerprint: only equal fingerprints are news.
        rows = self._rows or f"{exchange.topology.island}"
        if exchange.council.repeated(mark):
            log.warning("two islands train on the same first batch: %s", CURE)
        elif exchange.council.repeated(rows):
            log.warning("two islands train on the same rows in different order: %s", CURE)
