"""Small questions that the islands settle among themselves at one step: a mean, whether all or any
two say the same.

Every rank of every island asks the same question at the same step; each peer group talks for
itself, then the ranks of an island take one answer. JSON and numbers only: nothing a peer sends is
executed.
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
    """The questions of `Exchange.across_islands`. All ranks of all islands ask the same one at the
    same step.

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
        """Whether all islands say the same (compared as JSON, rank by rank along the peer
        groups).
        """
        texts = {json.dumps(v, sort_keys=True) for v in self._ask(value)}
        return not self._island.any(len(texts) > 1)

    def any_equal(self, value: Any) -> bool:
        """Whether any two islands say the same on any peer group."""
        everyone = [json.dumps(v, sort_keys=True) for v in self._ask(value)]
        return self._island.any(len(set(everyone)) < len(everyone))

    def _ask(self, value: Any) -> list[Any]:
        """What every island says; nothing on a copy without peers, which follows its island."""
        step = self._step()
        return (
            self._queue.ask(lambda peers: agreement.gather_json(peers, value, QUESTION, step)) or []
        )


def _sendable(value: float) -> float:
    """As JSON knows it: no infinity."""
    return max(min(value, sys.float_info.max), -sys.float_info.max)
