"""Which two islands exchange: a pure function of round, seed and bandwidths, so that all islands
compute the same pairs. Draws are those of Python's Mersenne twister, which stays what it is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

from .parts import Pairs

Edge = tuple[int, int]
BLOCK = 256
"""Rounds after which what is remembered of links begins anew: a resume computes no more."""


class PairSchedule:
    """The pairs of so many islands. Raises ValueError: bandwidths of another number of them."""

    def __init__(self, pairs: Pairs, islands: int, seed: int):
        self._pairs, self._islands, self._seed = pairs, islands, seed
        self._edges = list(combinations(range(islands), 2))
        self._fast = _fast(pairs, self._edges, islands) if pairs.bandwidth else []
        self._next, self._used, self._found = 0, dict[Edge, int](), tuple[Edge, ...]()

    def members(self, round: int, island: int) -> tuple[int, ...]:
        """The islands of a message in a round (from 1): two, of an odd number perhaps one."""
        return next((e for e in self.edges(round) if island in e), (island,))

    def edges(self, round: int) -> tuple[Edge, ...]:
        """The pairs of a round."""
        if self._pairs.by == "random":
            draws = self._draws(round, self._islands)
            return paired(sorted(range(self._islands), key=draws.__getitem__))
        if not self._next <= round <= self._next - self._next % BLOCK + BLOCK:
            self._next = (round - 1) // BLOCK * BLOCK
        while self._next < round:
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
        known = self._fast
        if not connected([e for e in self._edges if last[e] > since], self._islands):
            known = [e for e in self._edges if last[e] < since]
        draws = iter(self._draws(number + 1, 2 * len(self._edges)))
        first, again = (dict(zip(self._edges, draws, strict=False)) for _ in range(2))
        found = best_pairs({e: first[e] for e in known}, self._islands)
        return found or best_pairs(again, self._islands)

    def _draws(self, round: int, count: int) -> list[float]:
        drawn = random.Random(f"{self._seed} {round}")
        return [drawn.random() for _ in range(count)]


def paired(order: Sequence[int]) -> tuple[Edge, ...]:
    """The i-th of a permutation with the i-th of its second half, as in NoLoCo's released code."""
    both = zip(order[: len(order) // 2], order[len(order) // 2 :], strict=False)
    return tuple(sorted((min(e), max(e)) for e in both))


def _fast(pairs: Pairs, edges: Sequence[Edge], islands: int) -> list[Edge]:
    if len(found := pairs.bandwidth) != islands:
        what = f"pairs.bandwidth has {len(found)} rows for {islands} islands"
        raise ValueError(f"{what}: give each a row and a column, in the order of ISLAND_RANK")
    speeds = {(i, j): min(found[i][j], found[j][i]) for i, j in edges}
    least = pairs.fast or median(speeds.values())
    return [e for e, speed in speeds.items() if speed > least]


def connected(edges: Sequence[Edge], islands: int) -> bool:
    """Whether these links connect all islands."""
    reached = {0}
    while more := {i for e in edges if reached.intersection(e) for i in e} - reached:
        reached |= more
    return len(reached) == islands


def best_pairs(draws: Mapping[Edge, float], islands: int) -> tuple[Edge, ...]:
    """The pairs whose smallest draw is largest, then whose next one is, ...; none where these links
    leave two islands over. Costs are powers of two: any exact search finds the same pairs.
    """
    import networkx  # torch needs it, too

    graph = networkx.Graph()
    for place, edge in enumerate(sorted(draws, key=draws.__getitem__, reverse=True)):
        graph.add_edge(*edge, weight=-(2**place))
    found = networkx.max_weight_matching(graph, maxcardinality=True)
    return tuple(sorted((min(e), max(e)) for e in found)) if 2 * len(found) > islands - 2 else ()
