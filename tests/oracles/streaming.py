"""DiLoCo's outer step on fragments of the model, each on its own offset, late, mixed and in few
bits (2501.18512); MuLoCo (2505.23725).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from .dense import arrived, mean_of
from .replicas import Gradients, Replicas, Tensors, due, warmed


def fragments(names: list[str], layers: int, order: str = "strided") -> list[list[str]]:
    """Names of the parameters of each fragment: fragments of `layers` layers, and last what is in
    no layer.

    A layer is the first part of the dotted name that is a number. With P fragments of layers,
    fragment p holds layers p, p + P, ... (strided) or p * layers and those after it (sequential).
    """

    def layer(name: str) -> int | None:
        numbers = [int(part) for part in name.split(".") if re.fullmatch(r"\d+", part)]
        return numbers[0] if numbers else None

    found = sorted({i for i in map(layer, names) if i is not None})
    count = -(-len(found) // layers)
    out = []
    for p in range(count):
        chosen = found[p::count] if order == "strided" else found[p * layers : (p + 1) * layers]
        out.append([n for n in names if layer(n) in chosen])
    return [*out, [n for n in names if layer(n) is None]]


@dataclass
class Fragment:
    """Some parameters with a clock offset, their anchor and outer momentum, error feedback per
    replica, and what is under way.
    """

    names: list[str]
    offset: int
    anchor: Tensors
    m: Tensors
    a: list[Tensors]
    # when sent, the mean, each replica's own delta
    flying: list[tuple[int, Tensors, list[Tensors]]] = field(default_factory=list)
    partial: bool = False  # the latest one was sent by `finish`, inside a round
    last: int = 0


class Streaming(Replicas):
    """Every `period` steps (offset by fragment) the mean of anchor - theta takes an outer Nesterov
    step, `delay` steps after it was sent.

    A delta leaves out what this replica has under way, P; when a mean arrives theta = mix theta +
    (1 - mix) (anchor - P).

    Args:
        parts: names of each fragment (default: one with everything); fragment p of n has the offset
            floor(p period / n).
        keep: local steps since the last send stay: parameters become anchor - P - W, where W is
            anchor - P - parameters just before, P then with what lands.
        own: share of the deltas under way that stays when an earlier one lands.
        beta: decay of the error feedback; None: no feedback, what the code loses is lost. gain: of
            what joins it.
        warmup: rounds over which the outer momentum rises.
    """

    def __init__(
        self,
        *args: Any,
        period: int = 100,
        lr: float = 0.4,
        momentum: float = 0.9,
        parts: list[list[str]] | None = None,
        delay: int = 0,
        mix: float = 0.0,
        keep: bool = False,
        own: float = 1.0,
        code: str = "fp32",
        beta: float | None = None,
        gain: float = 1.0,
        warmup: int = 0,
        **kw: Any,
    ):
        super().__init__(*args, **kw)
        self.gain = gain
        self.period, self.lr, self.momentum, self.delay, self.mix = period, lr, momentum, delay, mix
        self.code, self.beta, self.warmup, self.keep = code, beta, warmup, keep
        self.own = own
        self.fragments = []
        parts = parts or [list(self.theta[0])]
        for p, names in enumerate(parts):
            anchor = {n: self.theta[0][n].detach().clone() for n in names}
            zero = {n: torch.zeros_like(x) for n, x in anchor.items()}
            a = [{n: x.clone() for n, x in zero.items()} for _ in range(self.R)]
            self.fragments.append(Fragment(names, p * period // len(parts), anchor, zero, a))

    def step(self, grads: list[Gradients]) -> None:
        self.local_steps(grads)
        self.outer_steps()

    def outer_steps(self) -> None:
        """What happens after the inner steps of all replicas."""
        for f in self.fragments:
            if due(self.t, self.period, f.offset):
                self.send(f)
            while f.flying and f.flying[0][0] + self.delay <= self.t:
                self.land(f, self.mix)
        self.t += 1

    def under_way(self, f: Fragment, r: int, name: str) -> torch.Tensor:
        """P: the sum of replica r's own deltas that are in flight."""
        return sum((own[r][name] for _, _, own in f.flying), torch.zeros_like(f.anchor[name]))

    def send(self, f: Fragment) -> None:
        own = [
            {n: f.anchor[n] - self.theta[r][n].detach() - self.under_way(f, r, n) for n in f.names}
            for r in range(self.R)
        ]
        payload = own
        if self.beta is not None:
            for a, delta in zip(f.a, own, strict=True):
                for n in f.names:
                    a[n] = self.beta * a[n] + self.gain * delta[n]
            payload = [dict(a) for a in f.a]
            for a in f.a:
                got = arrived(a, f.names, self.S, self.code)
                for n in f.names:
                    a[n] = a[n] - got[n]
        f.flying.append((self.t, mean_of(payload, f.names, self.S, self.code, self.weights), own))
        f.last = self.t + 1

    def land(self, f: Fragment, mix: float) -> None:
        since = [
            {n: f.anchor[n] - self.under_way(f, r, n) - self.theta[r][n].detach() for n in f.names}
            for r in range(self.R)
        ]
        sent, mean, _ = f.flying.pop(0)
        for _, _, own in f.flying:
            for of in own:
                of.update({n: self.own * x for n, x in of.items()})
        mu = warmed(self.momentum, self.warmup, (sent + 1 - f.offset) // self.period)
        for n in f.names:
            if f.partial and not f.flying:  # the plain mean of the replicas
                f.anchor[n] = f.anchor[n] - mean[n] / self.gain
            else:
                f.m[n] = mu * f.m[n] + mean[n]
                f.anchor[n] = f.anchor[n] - self.lr * (mean[n] + mu * f.m[n])
            for r in range(self.R):
                theta = self.theta[r][n]
                theta.data.copy_(
                    mix * theta.detach() + (1 - mix) * (f.anchor[n] - self.under_way(f, r, n))
                )
                if self.keep:
                    theta.data.sub_(since[r][n])

    def flush(self) -> None:
        """Apply what is under way, in the order it was sent."""
        while any(f.flying for f in self.fragments):
            self.land(
                min((f for f in self.fragments if f.flying), key=lambda f: f.flying[0][0]), self.mix
            )

    def finish(self) -> None:
        """Drain, then exchange what has changed since; the replicas end at the anchors. A queue is
        lengthened before it is drained: landing takes the parameters to the anchor less what is
        under way. A part of a round has outer rate 1 and no momentum."""
        for f in self.fragments:
            if self.delay >= self.period and f.last < self.t:
                self.send(f)
                f.partial = True
        self.flush()
        for f in self.fragments:
            if f.last < self.t:
                self.send(f)
                f.partial = True
                self.land(f, 0.0)
            for theta in self.theta:
                for n in f.names:
                    theta[n].data.copy_(f.anchor[n])


class MuLoCo(Streaming):
    """The inner step is not computed but given: `step(updates)` adds updates[r][name] to the
    parameters.

    Muon's bf16 products differ by how a matrix is sharded, so a run's own measured steps are what
    the outer rule is held to.
    """

    def step(self, updates: list[Gradients]) -> None:
        for theta, update in zip(self.theta, updates, strict=True):
            for n, p in theta.items():
                p.data += update[n].to(p.dtype)
        self.outer_steps()
