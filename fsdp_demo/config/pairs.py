"""Which two islands exchange with each other: a pure function of the round, the seed and the
islands' bandwidths, so that all compute the same pairs and nobody asks. Draws are those of Python's
Mersenne twister, which does not change between releases.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

from .parts import Pairs

Edge = tuple[int, int]
"""Two islands, the lower number first."""

BLOCK = 256
"""Rounds after which what is remembered of links begins anew: a resume computes no more."""


class PairSchedule:
    """The pairs of `islands` islands, round by round. Where their number is odd one stays alone.

    Args:
        seed: `ExchangeConfig.seed`.

    Raises:
        ValueError: the matrix of bandwidths is of another number of islands.

    Example:
        >>> PairSchedule(Pairs(), islands=4, seed=0).members(1, 2)
        (0, 2)
    """

    def __init__(self, pairs: Pairs, islands: int, seed: int):
        self._pairs, self._islands, self._seed = pairs, islands, seed
        self._edges = list(combinations(range(islands), 2))
        self._fast = fast_edges(pairs, islands) if pairs.by == "bandwidth" else []
        self._next, self._used = 0, dict[Edge, int]()
        self._found: tuple[Edge, ...] = ()

    def members(self, round: int, island: int) -> tuple[int, ...]:
        """The islands of `island`'s message in a round (from 1), ascending: two, or it alone."""
        return next((e for e in self.edges(round) if island in e), (island,))

    def edges(self, round: int) -> tuple[Edge, ...]:
        """The pairs of a round, from 1."""
        if self._pairs.by == "random":
            draws = self._draws(round, self._islands)
            return paired(sorted(range(self._islands), key=draws.__getitem__))
        number = round - 1
        if number == self._next - 1:
            return self._found
        if number < self._next or number // BLOCK > self._next // BLOCK:
            self._next = number - number % BLOCK
        while self._next <= number:
            if self._next % BLOCK == 0:
                self._used = {}
            self._found = self._by_bandwidth(self._next)
            self._used |= dict.fromkeys(self._found, self._next % BLOCK)
            self._next += 1
        return self._found

    def _by_bandwidth(self, number: int) -> tuple[Edge, ...]:
        """As SAPS-PSGD's released code: links that were never used count as used in round 0."""
        since = number % BLOCK - self._pairs.rounds
        last = {e: self._used.get(e, 0) for e in self._edges}
        recent = [e for e in self._edges if last[e] > since]
        known = self._fast
        if not connected(recent, self._islands):
            known = [e for e in self._edges if last[e] < since]
        draws = self._draws(number + 1, 2 * len(self._edges))
        first = dict(zip(self._edges, draws, strict=False))
        again = dict(zip(self._edges, draws[len(self._edges) :], strict=True))
        found = best_pairs({e: first[e] for e in known}, self._islands)
        return found or best_pairs(again, self._islands)

    def _draws(self, round: int, count: int) -> list[float]:
        drawn = random.Random(f"{self._seed} {round}")
        return [drawn.random() for _ in range(count)]


def paired(order: Sequence[int]) -> tuple[Edge, ...]:
    """The pairs of a permutation of the islands, as in NoLoCo's released code: each of the first
    half with the one that stands as far in the second.

    >>> paired([2, 0, 3, 1])
    ((0, 1), (2, 3))
    """
    half = len(order) // 2
    both = zip(order[:half], order[half : 2 * half], strict=True)
    return tuple(sorted((min(e), max(e)) for e in both))


def fast_edges(pairs: Pairs, islands: int) -> list[Edge]:
    """The links that are faster than `fast` in both directions. Raises ValueError: see above."""
    found = pairs.bandwidth
    if len(found) != islands:
        raise ValueError(
            f"pairs.bandwidth has {len(found)} rows, and there are {islands} islands: give a row "
            "and a column for each, in the order of ISLAND_RANK"
        )
    speeds = {(i, j): min(found[i][j], found[j][i]) for i, j in combinations(range(islands), 2)}
    least = pairs.fast or median(speeds.values() or [0.0])
    return [e for e, speed in speeds.items() if speed > least]


def connected(edges: Sequence[Edge], islands: int) -> bool:
    """Whether these links connect all islands."""
    reached, grown = {0}, True
    while grown:
        more = {i for e in edges if reached.intersection(e) for i in e} - reached
        reached, grown = reached | more, bool(more)
    return len(reached) == islands


def best_pairs(draws: Mapping[Edge, float], islands: int) -> tuple[Edge, ...]:
    """The pairs of all islands (but one, of an odd number) whose smallest draw is largest, then
    whose next one is, and so on; empty where these links leave more over.

    Costs are powers of two, so no two sets cost the same, and any exact search finds this one.
    """
    import networkx  # torch needs it, too

    graph = networkx.Graph()
    for place, edge in enumerate(sorted(draws, key=draws.__getitem__, reverse=True)):
        graph.add_edge(*edge, weight=-(2**place))
    found = networkx.max_weight_matching(graph, maxcardinality=True)
    return tuple(sorted((min(e), max(e)) for e in found)) if 2 * len(found) > islands - 2 else ()
