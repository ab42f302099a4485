"""Backup islands: an exchange goes on without an island that is late, and what that has trained
counts in its next one, once.

Real processes over ZeroMQ. An island is late because its training waits, before the step of the
exchange, until the island has passed: nothing here depends on how fast a machine is. Which islands
were late is read from the run, and the simulation beside it is given the same.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fsdp_demo
from fsdp_demo import ExchangeConfig, preset
from fsdp_demo.compression.dense import round_trip
from fsdp_demo.config.channel import Channel
from fsdp_demo.config.parts import Accumulator, Applier, Codec, Reducer, SyncSchedule
from fsdp_demo.exchange import message, watch
from fsdp_demo.peers.header import PASSED, Header

from ..support.inside import in_ranks
from ..support.two_layers import step

ENV = {"ISLAND_DEAD": "6", "ISLAND_STOP": "20"}
PERIOD, STEPS = 4, 18  # exchanges in steps 3, 7, 11, 15; two steps are left for the last one
SIZE = (3, 5000)


def config(code: str = "fp32", weight: str = "equal", **changes: Any) -> ExchangeConfig:
    """Outer Nesterov on the mean delta, with error feedback where a code rounds."""
    outer = Applier("outer_step", lr=0.7, momentum=0.9, nesterov=True)
    rounds = {"accumulator": Accumulator(beta=1.0), "feedback": "subtract"}
    channel = Channel(
        "delta",
        "delta",
        SyncSchedule(PERIOD),
        codec=Codec(value_dtype=code),
        reducer=Reducer(weight=weight),
        applier=outer,
        **(rounds if code == "int4" else {}),
    )
    return ExchangeConfig("made", (channel,), backup_islands=1).changed(changes)


def gradient(island: int, t: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * t + island)) / 16


def tokens(island: int, t: int) -> int:
    return 10 + 3 * island + t


def until_passed(exchange: Any) -> None:
    """Wait in training, as one that is slow: the island has passed the coming exchange."""
    while exchange._runtime.backup.pending < 0:
        time.sleep(0.01)


def attached(me: Any, method: ExchangeConfig) -> Any:
    w = torch.nn.Parameter(torch.zeros(SIZE))
    model = torch.nn.Module()
    model.w = w
    optimizer = torch.optim.SGD([w], lr=1.0)
    return w, optimizer, fsdp_demo.attach(optimizer, method, model=model)


def noted(exchange: Any) -> dict[int, list[int]]:
    """From now on: the step of each exchange that was applied, and the islands that were late."""
    queue, found = exchange._queue, dict[int, list[int]]()
    count = queue.watch.count

    def hear(peers: Any, headers: Any, slots: Any, at: int) -> None:
        late = [slot for slot, h in zip(slots, headers, strict=True) if h.late]
        assert found.setdefault(at, late) == late
        count(peers, headers, slots, at)

    queue.watch.count = hear
    return found


def trained(me: Any, method: ExchangeConfig, late: dict[int, int], steps: int = STEPS) -> Any:
    """Train; island late[t] is late for the exchange of step t."""
    w, optimizer, exchange = attached(me, method)
    told, seen = noted(exchange), []
    for t in range(steps):
        if late.get(t) == me.island:
            until_passed(exchange)
        exchange.report(tokens=tokens(me.island, t))
        w.grad = gradient(me.island, t)
        optimizer.step()
        seen.append(w.detach().clone())
    metrics = exchange.metrics()
    exchange.finish()
    return told, seen, w.detach().clone(), exchange.digests_equal(), metrics["late"]


class Simulated:
    """The same on plain tensors: `theta[r]` of each island, what it has kept (`left`), one anchor."""

    def __init__(self, islands: int, by_tokens: bool, rounds: bool, lr: float = 0.7, mu: float = 0.9):
        self.theta, self.left = ([torch.zeros(SIZE) for _ in range(islands)] for _ in range(2))
        self.anchor, self.momentum = torch.zeros(SIZE), torch.zeros(SIZE)
        self.rounds = rounds
        self.weight = [0.0] * islands
        self.by_tokens, self.lr, self.mu = by_tokens, lr, mu

    def step(self, t: int) -> None:
        for r, theta in enumerate(self.theta):
            theta.sub_(gradient(r, t))
            self.weight[r] += tokens(r, t)

    def sent(self, r: int) -> torch.Tensor:
        delta = self.anchor - self.theta[r]
        if not self.rounds:
            return delta
        self.left[r].add_(delta)
        coded = round_trip("int4", self.left[r].view(-1), 3).view(SIZE)
        self.left[r].sub_(coded)
        return coded

    def exchange(self, late: list[int], plain: bool = False) -> None:
        here = [r for r in range(len(self.theta)) if r not in late]
        w = {r: self.weight[r] if self.by_tokens else 1.0 for r in here}
        mean = torch.zeros(SIZE)
        for r in here:
            mean.add_(self.sent(r), alpha=w[r])
        mean.div_(sum(w.values()))
        kept = {r: self.anchor - self.theta[r] for r in late}
        if plain:
            self.anchor.sub_(mean)
        else:
            self.momentum.mul_(self.mu).add_(mean)
            self.anchor.sub_(mean.add_(self.momentum, alpha=self.mu), alpha=self.lr)
        for r in range(len(self.theta)):
            self.theta[r] = self.anchor - kept[r] if r in late else self.anchor.clone()
            if r not in late:
                self.weight[r] = 0.0


def simulated(told: dict[int, list[int]], method: ExchangeConfig, steps: int) -> Any:
    """Every island's parameters after each step, and those at the end."""
    (channel,), seen = method.channels, []
    sim = Simulated(3, channel.reducer.weight == "tokens", channel.feedback != "none")
    for t in range(steps):
        sim.step(t)
        if (t + 1) % PERIOD == 0:
            sim.exchange(told[t])
        seen.append([theta.clone() for theta in sim.theta])
    if steps % PERIOD or told[steps - 1]:
        if not steps % PERIOD:  # nobody but the late ones has trained since
            sim.by_tokens = False
        sim.exchange([], plain=True)
    return seen, sim.anchor


LATE = {3: 1, 11: 2}
ALL = {
    "equal": (config(), LATE, STEPS),
    "tokens": (config(weight="tokens"), LATE, STEPS),
    "int4": (config("int4"), LATE, STEPS),
    "equal, the last": (config(), {7: 1}, 8),
    "tokens, the last": (config(weight="tokens"), {7: 1}, 8),
    "int4, the last": (config("int4"), {7: 1}, 8),
    "two in a row": (config(late_rounds=2), {7: 1, 11: 1}, STEPS),
}
QUICK = ("int4", "tokens, the last")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in ALL]
)
def test_backup_islands_as_simulated(run_ranks, case: str) -> None:
    """Three islands of which one is late in given rounds hold the parameters of a simulation bit
    by bit, after every step and at the end; also where it is late for the last exchange.
    """
    method, late, steps = ALL[case]
    found = run_ranks(trained, 3, 1, env=ENV, args=(method, late, steps))
    told = found[0][0]
    assert all(f[0] == told for f in found) and all(told[t] == [r] for t, r in late.items())
    seen, end = simulated(told, method, steps)
    for r, (_, values, last, equal, count) in enumerate(found):
        for t, value in enumerate(values):
            assert torch.equal(value, seen[t][r]), (r, t)
        assert equal and torch.equal(last, end) and count == sum(map(len, told.values()))


@in_ranks(2, 2, env=ENV)
def test_backup_islands_ranks_pass_together(me: Any) -> Any:
    """Two ranks of one island, whose weight is cut between them, pass an exchange together, and
    islands end with one model.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=me.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = fsdp_demo.attach(optimizer, config(), model=model)
    told = noted(exchange)
    for t in range(10):
        if me.island == 1 and t == 3:
            until_passed(exchange)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * t + me.island))
        step(optimizer, (model(x) - x).square().mean())
    exchange.finish()
    assert told[3] == [1] and exchange.digests_equal()
    return told, model.weight.full_tensor().detach()
