"""Averaging: parameters, and named states of the inner optimizers, each on a clock of its own
(Local SGD, Local Adam, DES-LOC).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .dense import mean_of
from .replicas import Gradients, Replicas, Tensors, due


@dataclass
class Sent:
    """Parameters under way: when they left, what each replica sent (corrected later), their
    mean.
    """

    t: int
    own: list[Tensors]
    mean: Tensors


class Averaging(Replicas):
    """After the step, where (t + 1) % period == 0, the parameters become their mean; each state
    likewise on its own period.

    Args:
        period: of the parameters; states: name of a state -> its period in steps.
        delay: steps until the mean of the parameters is applied: then theta += (1 - mix) (mean -
            sent), where what is still under way counts as corrected by as much. state_delay: steps
            until a state is replaced.
    """

    def __init__(
        self,
        *args: Any,
        period: int = 16,
        states: dict[str, int] | None = None,
        delay: int = 0,
        state_delay: int = 0,
        mix: float = 0.0,
        code: str = "fp32",
        **kw: Any,
    ):
        super().__init__(*args, **kw)
        self.period = period
        self.states = states or {}
        self.delay = delay
        self.state_delay = state_delay
        self.mix = mix
        self.code = code
        self.flying: list[Sent] = []
        self.states_flying: list[tuple[int, str, dict[str, torch.Tensor]]] = []
        for optimizer in self.inner:
            fresh(optimizer)

    def step(self, grads: list[Gradients]) -> None:
        self.local_steps(grads)
        names = list(self.theta[0])
        if due(self.t, self.period):
            own = [self.now(r) for r in range(self.R)]
            self.flying.append(
                Sent(self.t, own, mean_of(own, names, self.S, self.code, self.weights))
            )
        while self.flying and self.flying[0].t + self.delay <= self.t:
            self.land(self.flying.pop(0))
        for state, period in self.states.items():
            if due(self.t, period):
                own = [self.state(r, state) for r in range(self.R)]
                self.states_flying.append(
                    (self.t, state, mean_of(own, list(own[0]), self.S, self.code, self.weights))
                )
        for flight in [f for f in self.states_flying if f[0] + self.state_delay <= self.t]:
            self.states_flying.remove(flight)
            self.land_state(flight[1], flight[2])
        self.t += 1

    def land(self, sent: Sent) -> None:
        for r in range(self.R):
            for name, theta in self.theta[r].items():
                correction = (1 - self.mix) * (sent.mean[name] - sent.own[r][name])
                theta.data += correction
                for later in self.flying:
                    later.own[r][name] += correction

    def land_state(self, state: str, mean: Tensors) -> None:
        for r in range(self.R):
            for name, value in self.state(r, state).items():
                value.copy_(mean[name])

    def flush(self) -> None:
        """Apply what is under way, in order."""
        while self.flying:
            self.land(self.flying.pop(0))
        while self.states_flying:
            self.land_state(*self.states_flying.pop(0)[1:])

    def state(self, r: int, name: str) -> Tensors:
        """The tensors of one state of replica r's optimizer, by the parameter's name."""
        states = {n: self.inner[r].state[p] for n, p in self.theta[r].items()}
        return {n: s[name] for n, s in states.items() if isinstance(s.get(name), torch.Tensor)}


class Smoothed:
    """The release's average over a window: 0 until the window is full; then the newest value weighs
    0.99, the one before it 0.99 ** 2, and so on.
    """

    def __init__(self, size: int):
        self.size, self.values = size, list[float]()

    def add(self, value: float) -> float:
        self.values.append(value)
        if len(self.values) < self.size:
            return 0.0
        total = weight = 0.0
        for age, old in enumerate(reversed(self.values), start=1):
            total, weight = total + 0.99**age * old, weight + 0.99**age
        self.values.pop(0)
        return total / weight


class SelSyncMeter:
    """The released rule on the norms of one replica's gradients. `change` after a step: d; NaN or
    infinite as long as a division by a norm of 0, from the time before the first window was full,
    is among the changes.
    """

    def __init__(self, window: int):
        self.window, self.step, self.before = window, 0, 1.0
        self.norm, self.changes, self.change = Smoothed(window), Smoothed(window), math.nan

    def hear(self, norms: Sequence[float]) -> None:
        self.step += 1
        now = self.norm.add(sum(norms))
        far = abs(now - self.before)
        change = far / self.before if self.before else math.inf if far else math.nan
        self.change, self.before = self.changes.add(change), now

    @property
    def known(self) -> bool:
        return self.step >= 2 * self.window


class SelSync(Averaging):
    """Every `period` steps the replicas average if the change of any has reached `delta` since they
    last asked, or is not known yet, or `at_most` steps are over. `exchanged`: of each step.
    """

    def __init__(self, *args: Any, delta: float, window: int, at_most: int, **kw: Any):
        super().__init__(*args, **kw)
        self.delta, self.at_most, self.last = delta, at_most, -1
        self.meters = [SelSyncMeter(window) for _ in range(self.R)]
        self.changed, self.exchanged = False, list[bool]()

    def step(self, grads: list[Gradients]) -> None:
        for meter, own in zip(self.meters, grads, strict=True):
            meter.hear([float(g.double().norm()) for g in own.values() if g is not None])
            self.changed |= not meter.known or meter.change >= self.delta
        check = due(self.t, self.period)
        now = check and (self.changed or self.t - self.last >= self.at_most)
        every, self.period = self.period, 1 if now else 1 << 30
        self.exchanged.append(now)
        self.last = self.t if now else self.last
        self.changed = self.changed and not check
        super().step(grads)
        self.period = every


def fresh(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of an optimizer that has not stepped, also for parameters that never get a
    gradient: zeros, step counters at 0.
    """
    rates = [g["lr"] for g in optimizer.param_groups]
    for g in optimizer.param_groups:
        g["lr"] = 0.0
        for p in g["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for g, rate in zip(optimizer.param_groups, rates, strict=True):
        g["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
