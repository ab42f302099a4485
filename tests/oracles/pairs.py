"""Islands in pairs: who exchanges with whom in each round, by trying all ways to pair them off, and
the two methods on R replicas.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .blocks import shard_rows
from .replicas import Gradients, Replicas, Tensors, due

Pair = tuple[int, int]


def matchings(islands: list[int]) -> Iterator[list[Pair]]:
    """All ways to pair these off; of an odd number one stays alone."""
    if len(islands) < 2:
        yield []
        return
    first, rest = islands[0], islands[1:]
    for other in rest:
        for more in matchings([i for i in rest if i != other]):
            yield [(first, other), *more]
    if len(islands) % 2:  # the first one stays alone
        yield from matchings(rest)


def draws(seed: int, round: int, count: int) -> list[float]:
    """The numbers in [0, 1) that all islands draw for a round, from 1."""
    drawn = random.Random(f"{seed} {round}")
    return [drawn.random() for _ in range(count)]


def random_pairs(islands: int, seed: int, round: int) -> list[Pair]:
    """NoLoCo's release: of a permutation, the i-th with the i-th of the second half."""
    drawn = draws(seed, round, islands)
    order = sorted(range(islands), key=lambda i: drawn[i])
    half = islands // 2
    found = [(order[i], order[half + i]) for i in range(half)]
    return sorted((min(pair), max(pair)) for pair in found)


class Saps:
    """SAPS-PSGD's released rule with a threshold: of the links with both directions above it,
    unless the pairs of the last `window` rounds leave islands apart: then of links not used for
    longer, of any speed. Among these the pairs with the largest smallest draw; where these cannot
    pair all off, among all links, with new draws.
    """

    def __init__(self, speeds: list[list[float]], fast: float, window: int, seed: int):
        self.R, self.window, self.seed = len(speeds), window, seed
        self.links = [(i, j) for i in range(self.R) for j in range(i + 1, self.R)]
        self.fast = {(i, j) for i, j in self.links if min(speeds[i][j], speeds[j][i]) > fast}
        self.used = dict.fromkeys(self.links, 0)
        self.t, self.bridged = 0, False

    def next(self) -> list[Pair]:
        """The pairs of the next round."""
        drawn = draws(self.seed, self.t + 1, 2 * len(self.links))
        first, second = drawn[: len(self.links)], drawn[len(self.links) :]
        recent = [e for e in self.links if self.used[e] > self.t - self.window]
        self.bridged = not self.joined(recent)
        allowed = self.fast
        if self.bridged:
            allowed = {e for e in self.links if self.used[e] < self.t - self.window}
        found = self.best(dict(zip(self.links, first, strict=True)), allowed)
        found = found or self.best(dict(zip(self.links, second, strict=True)), set(self.links))
        self.used.update(dict.fromkeys(found, self.t))
        self.t += 1
        return sorted(found)

    def joined(self, links: list[Pair]) -> bool:
        """Whether these connect all islands."""
        label = list(range(self.R))
        for i, j in links:
            label = [label[i] if x == label[j] else x for x in label]
        return len(set(label)) == 1

    def best(self, drawn: dict[Pair, float], allowed: set[Pair]) -> list[Pair]:
        """All ways to pair off are tried; the release's takes one with the largest smallest draw,
        and this one, where they tie, that with the largest next draw.
        """
        ways = [m for m in matchings(list(range(self.R))) if set(m) <= allowed]
        return max(ways, key=lambda m: sorted(drawn[e] for e in m), default=[])


class InPairs(Replicas):
    """What both methods have. pairs: gives those of a round, from 1."""

    def __init__(self, *args: Any, pairs: Callable[[int, int], list[Pair]], period: int, **kw: Any):
        super().__init__(*args, **kw)
        self.pairs, self.period = pairs, period

    def step(self, grads: list[Gradients]) -> None:
        self.local_steps(grads)
        if due(self.t, self.period):
            found = self.pairs(self.R, (self.t + 1) // self.period)
            alone = set(range(self.R)) - {i for pair in found for i in pair}
            before = [self.now(r) for r in range(self.R)]
            for members in [*found, *((i,) for i in alone)]:
                for r in members:
                    self.act(r, [before[i] for i in members], list(members))
        self.t += 1

    def act(self, r: int, thetas: list[Tensors], members: list[int]) -> None:
        raise NotImplementedError


class NoLoCo(InPairs):
    """2506.10911: delta = alpha delta - beta mean(anchor - theta) - gamma (anchor - mean anchor);
    anchor += delta; theta = anchor. Both means are the pair's, each of a vector of its own.
    """

    def __init__(self, *args: Any, alpha: float, beta: float, gamma: float, **kw: Any):
        super().__init__(*args, **kw)
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self.anchor, self.delta = [self.now(r) for r in range(self.R)], self.zeros()
        self.old = [dict(a) for a in self.anchor]

    def step(self, grads: list[Gradients]) -> None:
        self.old = [dict(a) for a in self.anchor]
        super().step(grads)

    def act(self, r: int, thetas: list[Tensors], members: list[int]) -> None:
        for name, p in self.theta[r].items():
            anchors = [self.old[i][name] for i in members]
            outer = [a - theta[name] for a, theta in zip(anchors, thetas, strict=True)]
            apart = self.old[r][name] - sum(anchors) / len(anchors)
            delta = self.alpha * self.delta[r][name]
            delta = delta - self.beta * sum(outer) / len(outer) - self.gamma * apart
            self.delta[r][name], self.anchor[r][name] = delta, self.old[r][name] + delta
            p.data.copy_(self.anchor[r][name])


class SapsAverage(InPairs):
    """2002.09692: parameters at the positions of a round become the pair's mean. positions: gives
    masks of the shards of a tensor, from the number of the exchange, from 0.
    """

    def __init__(self, *args: Any, positions: Callable[[int, str, int], torch.Tensor], **kw: Any):
        super().__init__(*args, **kw)
        self.positions = positions

    def act(self, r: int, thetas: list[Tensors], members: list[int]) -> None:
        for name, p in self.theta[r].items():
            average = sum(theta[name] for theta in thetas) / len(thetas)
            for s, (here, new) in enumerate(
                zip(shard_rows(p.data, self.S), shard_rows(average, self.S), strict=True)
            ):
                sent = self.positions(self.t // self.period, name, s)
                # a small tensor goes whole, and so does what fills no row of 64
                sent = sent.clone() if sent.any() else torch.ones_like(sent)
                sent.view(-1)[sent.numel() // 64 * 64 :] = True
                here.copy_(torch.where(sent, new, here))
