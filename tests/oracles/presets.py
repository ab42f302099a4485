"""The published methods on R replicas held as lists in one process, with nothing packed, sharded over processes or sent.

Every class takes the initial parameters (name -> full tensor), the number of replicas and of shards per replica, and
a function that makes the inner optimizer; `step(grads)` takes one optimizer step, grads[r][name] being the mean gradient
of replica r (None: no gradient), and changes `theta[r][name]`. All arithmetic is in `dtype` (float64 by default).
`margin` is the smallest relative distance of any top-k choice so far to its alternative: where it is far above the
rounding of fp32, an implementation in fp32 must have made the same choices.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .blocks import cut, shard_rows
from .dct import dct2, idct2
from .quantise import dequantised
from .topk import kept, margin, topk

Tensors = dict[str, torch.Tensor]
Gradients = dict[str, "torch.Tensor | None"]
Inner = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class Coding:
    """How a sparse channel compresses: k of 4096, code of the values, DCT or none, mean over senders or all replicas."""

    k: int = 32
    code: str = "int8"
    transform: bool = True
    senders: bool = True
    dense: tuple[str, ...] = ()
    plain: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "*lm_head*")


def due(t: int, period: int, offset: int = 0) -> bool:
    """Whether a channel acts at step t = 0, 1, 2, ..."""
    return t + 1 > offset and (t + 1 - offset) % period == 0


def mean(values: list[torch.Tensor], weights: list[float], only_senders: bool = False) -> torch.Tensor:
    """Weighted mean over replicas, or at each position over the replicas whose value there is not zero; added in order."""
    total, weight = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for value, w in zip(values, weights, strict=True):
        total = total + w * value
        weight = weight + (w * (value != 0) if only_senders else w)
    return total / torch.where(weight == 0, 1.0, weight)


class Replicas:
    """R copies of the parameters, each with an inner optimizer of its own."""

    def __init__(self, params: Tensors, replicas: int, inner: Inner, shards: int = 1, clip: float | None = None, dtype=torch.float64):
        self.R, self.S, self.clip, self.t = replicas, shards, clip, 0
        self.theta: list[Tensors] = [{n: p.detach().to(dtype).clone().requires_grad_() for n, p in params.items()} for _ in range(replicas)]
        self.inner = [inner(list(theta.values())) for theta in self.theta]
        self.weights = [1.0] * replicas
        self.margin = math.inf

    def inner_step(self, r: int, grads: Gradients) -> None:
        """One step of replica r's own optimizer."""
        for name, p in self.theta[r].items():
            g = grads.get(name)
            p.grad = None if g is None else g.to(p.dtype).clone()
        self.inner[r].step()

    def clipped(self, grads: Gradients) -> Gradients:
        """Gradients scaled so that their norm over all parameters is at most `clip`."""
        if self.clip is None:
            return grads
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads.values() if g is not None))
        scale = min(1.0, self.clip / (norm + 1e-6))
        return {n: None if g is None else g * scale for n, g in grads.items()}

    def zeros(self) -> list[Tensors]:
        """Per replica, a zero for every parameter."""
        return [{n: torch.zeros_like(p) for n, p in theta.items()} for theta in self.theta]

    def with_zeros(self, grads: Gradients) -> Tensors:
        """Gradients in `dtype`, a missing one replaced by zero."""
        return {n: torch.zeros_like(p) if grads.get(n) is None else grads[n].to(p.dtype) for n, p in self.theta[0].items()}


class Full(Replicas):
    """The mean gradient over the replicas at every step; then clip; then the inner optimizer."""

    def step(self, grads: list[Gradients]) -> None:
        local = [self.with_zeros(g) for g in grads]
        names = [n for n in local[0] if any(g.get(n) is not None for g in grads)]
        average = self.clipped({n: mean([g[n] for g in local], self.weights) for n in names})
        for r in range(self.R):
            self.inner_step(r, average)
        self.t += 1


class DiLoCo(Replicas):
    """Every H steps a Nesterov step with the mean of anchor - theta as the gradient; 2311.08105."""

    def __init__(self, *args, period: int = 500, lr: float = 0.7, momentum: float = 0.9, code: str = "fp32", **kw):
        super().__init__(*args, **kw)
        self.period, self.lr, self.momentum, self.code = period, lr, momentum, code
        self.anchor = {n: p.detach().clone() for n, p in self.theta[0].items()}
        self.m = {n: torch.zeros_like(a) for n, a in self.anchor.items()}

    def coded(self, x: torch.Tensor) -> torch.Tensor:
        """What arrives of a delta (and, coded again, of the mean): code "fp32" or "bf16"."""
        return x if self.code == "fp32" else dequantised(x, self.code).to(x.dtype)

    def step(self, grads: list[Gradients]) -> None:
        for r in range(self.R):
            self.inner_step(r, self.clipped(grads[r]))
        if due(self.t, self.period):
            for name, anchor in self.anchor.items():
                deltas = [anchor - theta[name].detach() for theta in self.theta]
                delta = self.coded(mean([self.coded(d) for d in deltas], self.weights))
                m = self.m[name] = self.momentum * self.m[name] + delta
                anchor -= self.lr * (delta + self.momentum * m)
                for theta in self.theta:
                    theta[name].data.copy_(anchor)
        self.t += 1


class Shard:
    """One shard of one tensor: cut into blocks, taken to the transform domain and back, compressed.

    In the transform domain it is a list: one r x s matrix of coefficients per block, and last a vector, what is sent whole.
    """

    def __init__(self, name: str, shape: torch.Size, coding: Coding):
        def matches(patterns: tuple[str, ...]) -> bool:
            return any(fnmatch.fnmatch(name, p) for p in patterns)

        self.coding = coding
        self.shape = shape
        self.transform = coding.transform and not matches(coding.plain)
        self.blocks, self.rest = cut(tuple(shape), dense=matches(coding.dense), flat=not self.transform)

    def forward(self, local: torch.Tensor) -> list[torch.Tensor]:
        flat = local.detach().reshape(-1)
        return [dct2(flat[b]) if self.transform else flat[b] for b in self.blocks] + [flat[self.rest]]

    def inverse(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.zeros(math.prod(self.shape), dtype=pieces[-1].dtype)
        for block, piece in zip(self.blocks, pieces[:-1], strict=True):
            flat[block] = idct2(piece) if self.transform else piece
        flat[self.rest] = pieces[-1]
        return flat.reshape(self.shape)

    def sent(self, pieces: list[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
        """(what the receivers decode, zero where nothing was sent; the smallest margin of a choice)."""
        out, clear = [], math.inf
        for piece in pieces[:-1]:
            k = kept(self.coding.k, *piece.shape)
            clear = min(clear, margin(piece, k))
            where = topk(piece, k)
            decoded = torch.zeros(piece.numel(), dtype=piece.dtype)
            values = piece.reshape(-1)[where]
            decoded[where] = values if self.coding.code == "fp32" else dequantised(values, self.coding.code).to(piece.dtype)
            out.append(decoded.reshape(piece.shape))
        whole = pieces[-1]
        out.append(whole.clone() if self.coding.code == "fp32" else dequantised(whole, "bf16").to(whole.dtype))
        return out, clear

    def mean(self, decoded: list[list[torch.Tensor]], weights: list[float]) -> list[torch.Tensor]:
        """The mean over replicas of what they sent; whole tensors always over all replicas."""
        last = len(self.blocks)
        return [mean([pieces[i] for pieces in decoded], weights, only_senders=self.coding.senders and i != last) for i in range(last + 1)]


class Sparse(Replicas):
    """Replicas with an accumulator per replica, in the transform domain, shard by shard."""

    def __init__(self, *args, coding: Coding | None = None, beta: float, residual: str, alpha: float = 1.0, gain: float = 1.0, **kw):
        super().__init__(*args, **kw)
        self.coding, self.beta, self.residual, self.alpha, self.gain = coding or Coding(), beta, residual, alpha, gain
        self.shards = {n: [Shard(n, part.shape, self.coding) for part in shard_rows(p, self.S)] for n, p in self.theta[0].items()}
        self.a = [
            {n: [s.forward(torch.zeros(s.shape, dtype=self.theta[0][n].dtype)) for s in shards] for n, shards in self.shards.items()}
            for _ in range(self.R)
        ]

    def accumulate(self, r: int, source: Tensors) -> None:
        """a = beta a + gain T(source)."""
        for name, shards in self.shards.items():
            for i, part in enumerate(shard_rows(source[name], self.S)):
                new = shards[i].forward(part)
                self.a[r][name][i] = [self.beta * old + self.gain * x for old, x in zip(self.a[r][name][i], new, strict=True)]

    def exchange(self) -> dict[str, list[list[torch.Tensor]]]:
        """Send the selected part of every accumulator, treat what was sent by the residual policy, return the means."""
        means = {}
        for name, shards in self.shards.items():
            means[name] = []
            for i, shard in enumerate(shards):
                decoded = []
                for a in self.a:
                    q, clear = shard.sent(a[name][i])
                    decoded.append(q)
                    self.margin = min(self.margin, clear)
                average = shard.mean(decoded, self.weights)
                for a, q in zip(self.a, decoded, strict=True):
                    if self.residual in ("subtract", "put_back"):
                        a[name][i] = [x - self.alpha * y for x, y in zip(a[name][i], q, strict=True)]
                    if self.residual == "put_back":
                        a[name][i] = [x + y for x, y in zip(a[name][i], average, strict=True)]
                means[name].append(average)
        return means

    def back(self, pieces: dict[str, list[list[torch.Tensor]]]) -> Tensors:
        """From the transform domain of all shards to full tensors."""
        return {n: torch.cat([s.inverse(p) for s, p in zip(self.shards[n], parts, strict=True)]) for n, parts in pieces.items()}

    def sum_of_accumulators(self) -> dict[str, list[list[torch.Tensor]]]:
        """Over replicas; same nesting as one replica's accumulator."""
        out = {n: [[x.clone() for x in pieces] for pieces in parts] for n, parts in self.a[0].items()}
        for a in self.a[1:]:
            for n, parts in a.items():
                for i, pieces in enumerate(parts):
                    out[n][i] = [x + y for x, y in zip(out[n][i], pieces, strict=True)]
        return out


class Demo(Sparse):
    """DeMo with any base optimizer: the sign (or not) of the decoded mean is the gradient; 2411.19870.

    `smallest[name]` is the smallest |decoded mean| so far at each element where it was not exactly zero: where this is not
    far above rounding, the sign of an fp32 implementation may differ.
    """

    def __init__(self, *args, sign: bool = True, beta: float = 0.999, residual: str = "subtract", **kw):
        super().__init__(*args, beta=beta, residual=residual, **kw)
        self.sign = sign
        self.smallest = {n: torch.full_like(p, math.inf, requires_grad=False) for n, p in self.theta[0].items()}

    def step(self, grads: list[Gradients]) -> None:
        for r in range(self.R):
            self.accumulate(r, self.with_zeros(self.clipped(grads[r]) if self.sign else grads[r]))
        update = self.back(self.exchange())
        for n, u in update.items():
            self.smallest[n] = torch.minimum(self.smallest[n], torch.where(u == 0, math.inf, u.abs()))
        gradient = {n: torch.sign(u) for n, u in update.items()} if self.sign else self.clipped(update)
        for r in range(self.R):
            self.inner_step(r, gradient)
        self.t += 1


class DecoupledMomentum(Sparse):
    """Decoupled momentum, rule "consensus" or "released"; 2510.03371.

    Whole tensors (1-D, small, `dense`) step with `dense_lr`.
    """

    def __init__(self, *args, rule: str = "consensus", period: int = 128, beta: float = 0.95, lr: float | None = None, **kw):
        released = rule == "released"
        dense_lr = kw.pop("dense_lr", 0.7 if released else 1.0)
        super().__init__(*args, beta=beta, residual="put_back" if released else "subtract", **kw)
        self.released, self.period = released, period
        self.lr, self.dense_lr = lr if lr is not None else (0.7 if released else 1.0), dense_lr
        self.anchor = [{n: p.detach().clone() for n, p in theta.items()} for theta in self.theta]

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
        for r in range(self.R):
            self.inner_step(r, self.clipped(grads[r]))
        if due(self.t, self.period):
            self.outer_step()
        self.t += 1

    def outer_step(self) -> None:
        deltas = [{n: a - theta[n].detach() for n, a in anchor.items()} for anchor, theta in zip(self.anchor, self.theta, strict=True)]
        for r in range(self.R):
            self.accumulate(r, deltas[r])
        average, rate = self.back(self.exchange()), self.rate()
        for r in range(self.R):
            momentum = self.back(self.a[r]) if self.released else {}
            for n, anchor in self.anchor[r].items():
                anchor -= rate[n] * (deltas[r][n] + self.beta * momentum[n] if self.released else average[n])
                self.theta[r][n].data.copy_(anchor)
