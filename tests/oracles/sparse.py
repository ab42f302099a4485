"""Accumulators of which a part of every block is exchanged: DeMo, Random, Stride, decoupled
momentum, SparseLoCo.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .blocks import cut, shard_rows
from .dct import dct2, idct2
from .quantise import dequantised
from .replicas import Gradients, Replicas, Tensors, due, mean
from .threshold import passing, reached
from .topk import kept, margin, topk

# one shard of one tensor: a matrix of coefficients per block, and last a vector, what is sent whole
Pieces = list[torch.Tensor]
Positions = Callable[[int, str, int], torch.Tensor]


@dataclass
class Coding:
    """How a sparse channel compresses: k of 4096, code of the values, DCT or none, mean over
    senders or all replicas.

    positions: of seeded selections: (number of the exchange, name, shard) -> mask of the local
        tensor's shape, in which coefficient (i, j) of a block stands where element (i, j) of the
        block is. None: the k largest.
    clip: scale a replica's values of a block by min(1, median of the replicas' norms of that block
    / its norm).
    every: exchanges between two estimates of a threshold over a shard's blocks of one size; 0: the
        k largest of each block.
    """

    k: int = 32
    code: str = "int8"
    transform: bool = True
    senders: bool = True
    dense: tuple[str, ...] = ()
    plain: tuple[str, ...] = (
        "*embed*",
        "*wte*",
        "*wpe*",
        "*lm_head*",
        "output.weight",
        "head.weight",
        "score.weight",
        "classifier.*",
    )
    positions: Positions | None = None
    clip: bool = False
    every: int = 0

    def arrives(self, values: torch.Tensor) -> torch.Tensor:
        """The selected values of one block as the receivers have them."""
        return values if self.code == "fp32" else dequantised(values, self.code).to(values.dtype)

    def arrives_whole(self, values: torch.Tensor) -> torch.Tensor:
        """What is sent whole as the receivers have it."""
        return values if self.code == "fp32" else dequantised(values, "bf16").to(values.dtype)


class Shard:
    """One shard of one tensor: cut into blocks, taken to the transform domain and back,
    compressed.
    """

    def __init__(self, name: str, shape: torch.Size, coding: Coding, number: int = 0):
        def matches(patterns: tuple[str, ...]) -> bool:
            return any(fnmatch.fnmatch(name, p) for p in patterns)

        self.name, self.shape, self.coding, self.number = name, shape, coding, number
        self.levels: dict[tuple[int, tuple[int, int]], float] = {}
        self.transform = coding.transform and not matches(coding.plain)
        self.blocks, self.rest = cut(
            tuple(shape), dense=matches(coding.dense), flat=not self.transform
        )

    def forward(self, local: torch.Tensor) -> Pieces:
        flat = local.detach().reshape(-1)
        return [dct2(flat[b]) if self.transform else flat[b] for b in self.blocks] + [
            flat[self.rest]
        ]

    def inverse(self, pieces: Pieces) -> torch.Tensor:
        flat = torch.zeros(math.prod(self.shape), dtype=pieces[-1].dtype)
        for block, piece in zip(self.blocks, pieces[:-1], strict=True):
            flat[block] = idct2(piece) if self.transform else piece
        flat[self.rest] = pieces[-1]
        return flat.reshape(self.shape)

    def over_blocks(
        self, pieces: Pieces, exchange: int, replica: int
    ) -> tuple[list[list[int]], float]:
        """Of each block the positions that reach the threshold of the blocks of its size."""
        out: list[list[int]] = [[] for _ in pieces[:-1]]
        clear = math.inf
        for shape in {tuple(p.shape) for p in pieces[:-1]}:
            mine = [i for i, p in enumerate(pieces[:-1]) if tuple(p.shape) == shape]
            values = torch.stack([pieces[i] for i in mine]).reshape(-1)
            most, size = kept(self.coding.k, *shape) * len(mine), math.prod(shape)
            if exchange % self.coding.every == 0:
                self.levels[replica, shape] = reached(values, most)
            found, near = passing(values, most, self.levels[replica, shape])
            clear = min(clear, near)
            for where in found:
                out[mine[where // size]].append(where % size)
        return out, clear

    def sent(self, pieces: Pieces, exchange: int, replica: int) -> tuple[Pieces, float]:
        """(what the receivers decode, zero where nothing was sent; the smallest margin of a
        choice).
        """
        out, clear, wide = [], math.inf, []
        if self.coding.every:
            wide, clear = self.over_blocks(pieces, exchange, replica)
        for i, (block, piece) in enumerate(zip(self.blocks, pieces[:-1], strict=True)):
            if self.coding.every:
                where = wide[i]
            elif self.coding.positions is not None:
                mask = self.coding.positions(exchange, self.name, self.number).reshape(-1)[
                    block.reshape(-1)
                ]
                where = mask.nonzero().view(-1).tolist()
            else:
                k = kept(self.coding.k, *piece.shape)
                clear = min(clear, margin(piece, k))
                where = topk(piece, k)
            decoded = torch.zeros(piece.numel(), dtype=piece.dtype)
            decoded[where] = self.coding.arrives(piece.reshape(-1)[where])
            out.append(decoded.reshape(piece.shape))
        return [*out, self.coding.arrives_whole(pieces[-1])], clear

    def mean(self, decoded: list[Pieces], weights: list[float]) -> Pieces:
        """The mean over replicas of what they sent; whole tensors always over all replicas."""
        out = []
        for i in range(len(self.blocks)):
            values = [pieces[i] for pieces in decoded]
            if self.coding.clip:
                norms = [float(v.norm()) for v in values]
                ordered = sorted(norms)
                median = (ordered[(len(norms) - 1) // 2] + ordered[len(norms) // 2]) / 2
                values = [
                    v * min(1.0, median / n) if n > 0 else v
                    for v, n in zip(values, norms, strict=True)
                ]
            out.append(mean(values, weights, only_senders=self.coding.senders))
        whole = mean([pieces[-1] for pieces in decoded], weights)
        if self.coding.positions is not None:  # reduced: the mean comes back in the same code
            return [self.coding.arrives(x) for x in out] + [self.coding.arrives_whole(whole)]
        return [*out, whole]


Means = dict[str, list[Pieces]]


class Sparse(Replicas):
    """Replicas with an accumulator per replica, in the transform domain, shard by shard."""

    def __init__(
        self,
        *args: Any,
        coding: Coding | None = None,
        beta: float,
        residual: str,
        alpha: float = 1.0,
        gain: float = 1.0,
        period: int = 1,
        delay: int = 0,
        **kw: Any,
    ):
        super().__init__(*args, **kw)
        self.coding = coding or Coding()
        self.beta = beta
        self.residual = residual
        self.alpha = alpha
        self.gain = gain
        self.period, self.delay = period, delay
        self.shards = {
            n: [
                Shard(n, part.shape, self.coding, i) for i, part in enumerate(shard_rows(p, self.S))
            ]
            for n, p in self.theta[0].items()
        }
        self.a = [
            {
                n: [s.forward(torch.zeros(s.shape, dtype=self.theta[0][n].dtype)) for s in shards]
                for n, shards in self.shards.items()
            }
            for _ in range(self.R)
        ]

    def accumulate(self, r: int, source: Tensors) -> None:
        """a = beta a + gain T(source)."""
        for name, shards in self.shards.items():
            for i, part in enumerate(shard_rows(source[name], self.S)):
                new = shards[i].forward(part)
                self.a[r][name][i] = [
                    self.beta * old + self.gain * x
                    for old, x in zip(self.a[r][name][i], new, strict=True)
                ]

    def send(self) -> Means:
        """Send the selected part of every accumulator and take it out (unless the policy is keep);
        the means, as they will arrive.
        """
        means: Means = {}
        for name, shards in self.shards.items():
            means[name] = []
            for i, shard in enumerate(shards):
                decoded = []
                for r, a in enumerate(self.a):
                    q, clear = shard.sent(a[name][i], (self.t + 1) // self.period - 1, r)
                    decoded.append(q)
                    self.margin = min(self.margin, clear)
                means[name].append(shard.mean(decoded, self.weights))
                for a, q in zip(self.a, decoded, strict=True):
                    if self.residual != "keep":
                        alpha = self.alpha if self.residual == "subtract" else 1.0
                        a[name][i] = [x - alpha * y for x, y in zip(a[name][i], q, strict=True)]
        return means

    def put_back(self, means: Means) -> None:
        """Add the means to every accumulator."""
        for a in self.a:
            for name, parts in means.items():
                a[name] = [
                    [x + y for x, y in zip(old, new, strict=True)]
                    for old, new in zip(a[name], parts, strict=True)
                ]

    def back(self, pieces: Means) -> Tensors:
        """From the transform domain of all shards to full tensors."""
        return {
            n: torch.cat([s.inverse(p) for s, p in zip(self.shards[n], parts, strict=True)])
            for n, parts in pieces.items()
        }

    def sum_of_accumulators(self) -> Means:
        """Over replicas; same nesting as one replica's accumulator."""
        out = {
            n: [[x.clone() for x in pieces] for pieces in parts] for n, parts in self.a[0].items()
        }
        for a in self.a[1:]:
            for n, parts in a.items():
                out[n] = [
                    [x + y for x, y in zip(s, t, strict=True)]
                    for s, t in zip(out[n], parts, strict=True)
                ]
        return out


class Demo(Sparse):
    """DeMo with any base optimizer: the sign (or not) of the decoded mean is the gradient;
    2411.19870.

    With a period the gradients of all steps gather, with a delay the mean comes later; where none
    comes the base optimizer does not step. With `lr_inside` the momentum holds the learning rate of
    the step times the gradient, as the released code has it. `smallest[name]` is the smallest
    |decoded mean| so far at each element where it was not exactly zero: where this is not far above
    rounding, the sign of an fp32 implementation may differ.
    """

    def __init__(
        self,
        *args: Any,
        sign: bool = True,
        beta: float = 0.999,
        residual: str = "subtract",
        lr_inside: bool = False,
        **kw: Any,
    ):
        super().__init__(*args, beta=beta, residual=residual, **kw)
        self.sign, self.lr_inside = sign, lr_inside
        self.smallest = {
            n: torch.full_like(p, math.inf, requires_grad=False) for n, p in self.theta[0].items()
        }
        self.seen: set[str] = set()
        self.flying: list[tuple[int, Means, set[str]]] = []

    def step(self, grads: list[Gradients]) -> None:
        for r, own in enumerate(self.clipped_all(grads)):
            source = self.with_zeros(own)
            self.accumulate(
                r, {n: self.lr(r, n) * g for n, g in source.items()} if self.lr_inside else source
            )
            self.seen |= {n for n, g in own.items() if g is not None}
        if due(self.t, self.period):
            self.flying.append((self.t, self.send(), set(self.seen)))
        while self.flying and self.flying[0][0] + self.delay <= self.t:
            self.land()
        self.t += 1

    def land(self) -> None:
        _, means, names = self.flying.pop(0)
        update = {n: u for n, u in self.back(means).items() if n in names}
        for n, u in update.items():
            self.smallest[n] = torch.minimum(
                self.smallest[n], torch.where(u == 0, math.inf, u.abs())
            )
        gradient = {n: torch.sign(u) for n, u in update.items()} if self.sign else update
        for r in range(self.R):
            self.inner_step(r, gradient)

    def flush(self) -> None:
        """Apply what is under way, one step of the base optimizer for each."""
        while self.flying:
            self.land()


class DecoupledMomentum(Sparse):
    """Decoupled momentum, rule "consensus" or "released"; 2510.03371. Whole tensors (1-D, small,
    `dense`) step with `dense_lr`.

    A delta leaves out what the replica has under way, and parameters become anchor - that, mixed
    with themselves. `average_every` = J: after every J-th exchange all parameters become their
    mean, and the anchors with them.
    """

    def __init__(
        self,
        *args: Any,
        rule: str = "consensus",
        period: int = 128,
        beta: float = 0.95,
        lr: float | None = None,
        average_every: int = 0,
        mix: float = 0.0,
        **kw: Any,
    ):
        released = rule == "released"
        dense_lr = kw.pop("dense_lr", 0.7 if released else 1.0)
        super().__init__(
            *args, beta=beta, residual="put_back" if released else "subtract", period=period, **kw
        )
        self.released, self.average_every, self.mix = released, average_every, mix
        self.lr, self.dense_lr = lr if lr is not None else (0.7 if released else 1.0), dense_lr
        self.anchor = [self.now(r) for r in range(self.R)]
        self.flying: list[tuple[int, Means, list[Tensors]]] = []

    def rate(self) -> Tensors:
        """The outer rate of every element."""
        out = {}
        for n, shards in self.shards.items():
            parts = []
            for s in shards:
                flat = torch.full((math.prod(s.shape),), self.lr, dtype=self.theta[0][n].dtype)
                flat[s.rest] = self.dense_lr
                parts.append(flat.reshape(s.shape))
            out[n] = torch.cat(parts)
        return out

    def step(self, grads: list[Gradients]) -> None:
        self.local_steps(grads)
        if due(self.t, self.period):
            self.outgoing()
        while self.flying and self.flying[0][0] + self.delay <= self.t:
            self.land()
        if self.average_every and due(self.t, self.period * self.average_every):
            for n in self.theta[0]:
                average = mean([theta[n].detach() for theta in self.theta], self.weights)
                for theta, anchor in zip(self.theta, self.anchor, strict=True):
                    theta[n].data.copy_(average)
                    anchor[n] = average.clone()
        self.t += 1

    def under_way(self, r: int, name: str) -> torch.Tensor:
        """The sum of replica r's own deltas that are in flight."""
        return sum(
            (own[r][name] for _, _, own in self.flying), torch.zeros_like(self.anchor[r][name])
        )

    def outgoing(self) -> None:
        own = [
            {
                n: a - self.theta[r][n].detach() - self.under_way(r, n)
                for n, a in self.anchor[r].items()
            }
            for r in range(self.R)
        ]
        for r in range(self.R):
            self.accumulate(r, own[r])
        self.flying.append((self.t, self.send(), own))

    def land(self) -> None:
        _, means, own = self.flying.pop(0)
        if self.released:
            self.put_back(means)
        average, rate = self.back(means), self.rate()
        for r in range(self.R):
            momentum = self.back(self.a[r]) if self.released else {}
            for n, anchor in self.anchor[r].items():
                anchor -= rate[n] * (
                    own[r][n] + self.beta * momentum[n] if self.released else average[n]
                )
                theta = self.theta[r][n]
                theta.data.copy_(
                    self.mix * theta.detach() + (1 - self.mix) * (anchor - self.under_way(r, n))
                )

    def flush(self) -> None:
        """Apply what is under way, in order."""
        while self.flying:
            self.land()

    def finish(self) -> None:
        """Rule consensus without a delay: a part of a round, of which what is sent is averaged at
        rate 1. What the accumulators keep is lost."""
        assert not self.released and not self.flying and not self.mix
        if self.t % self.period:
            rates = self.lr, self.dense_lr
            self.lr = self.dense_lr = 1.0
            self.outgoing()
            self.land()
            self.lr, self.dense_lr = rates


class SparseLoCo(DecoupledMomentum):
    """Error feedback on the pseudo-gradient, without a transform: its largest values in few bits,
    block norms clipped; 2508.15706.
    """

    def __init__(
        self,
        *args: Any,
        k: int = 64,
        code: str = "2bit",
        clip_blocks: bool = True,
        every: int = 0,
        **kw: Any,
    ):
        coding = Coding(k=k, code=code, transform=False, clip=clip_blocks, every=every)
        super().__init__(
            *args, rule="consensus", coding=coding, **{"period": 30, "beta": 0.95, **kw}
        )
