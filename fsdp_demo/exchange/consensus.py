"""Small collectives over the islands: a mean, a maximum, whether values are equal. Each peer group
exchanges JSON and numbers, then the ranks of an island agree on one answer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..elastic import agreement
from ..peers.header import QUESTION
from ..rendezvous.island import IslandGroup
from .in_flight import InFlightQueue


class IslandConsensus:
    """The collectives of `Exchange.across_islands`. All ranks of all islands call the same one at
    the same step.

    Example:
        >>> import torch, fsdp_demo
        >>> exchange = fsdp_demo.attach(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()), "diloco")
        >>> exchange.across_islands.mean([1.0, 2.0]), exchange.across_islands.all_equal({"eval_steps": 100})
        ([1.0, 2.0], True)
    """  # noqa: E501

    def __init__(self, queue: InFlightQueue, island: IslandGroup, step: Callable[[], int]):
        self._queue, self._island, self._step = queue, island, step

    def mean(self, values: Sequence[float]) -> list[float]:
        """Means over the islands, number by number; an island's number that is not finite makes the
        mean NaN.

        Raises:
            ValueError: on every replica, if islands bring different numbers of values.
        """
        everyone = self._ask([float(v) for v in values])
        found = [len(theirs) for theirs in everyone]
        if self._island.any(any(n != len(values) for n in found)):
            raise ValueError(
                f"a mean over the islands of {found} values: all must bring the same ones, in the "
                "same order"
            )
        means = [sum(column) / len(everyone) for column in zip(*everyone, strict=True)]
        # a copy without peers has none; of several shards the largest counts
        known = [theirs for theirs in self._island.everyone(means) if theirs]
        return [
            max(column) if all(map(math.isfinite, column)) else math.nan
            for column in zip(*known, strict=True)
        ]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Number by number the largest that any rank of any island brings; all bring as many."""
        everyone = self._ask([_sendable(v) for v in values]) or [[_sendable(v) for v in values]]
        columns = zip(*everyone, strict=True)
        return self._island.max(*(max(map(float, column)) for column in columns))

    def all_equal(self, value: Any) -> bool:
        """Whether the values of all islands are equal (as JSON, in each peer group)."""
        texts = {json.dumps(v, sort_keys=True) for v in self._ask(value)}
        return not self._island.any(len(texts) > 1)

    def any_equal(self, value: Any) -> bool:
        """Whether the values of any two islands are equal in any peer group."""
        everyone = [json.dumps(v, sort_keys=True) for v in self._ask(value)]
        return self._island.any(len(set(everyone)) < len(everyone))

    def _ask(self, value: Any) -> list[Any]:
        """The values of all islands; empty on a copy without peers."""
        step = self._step()
        found = self._queue.ask(lambda peers: agreement.gather_json(peers, value, QUESTION, step))
        return found or []


def _sendable(value: float) -> float:
    """As JSON knows it: no infinity."""
    return max(min(value, sys.float_info.max), -sys.float_info.max)
