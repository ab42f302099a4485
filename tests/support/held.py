"""What an exchange holds while a small model trains: every tensor that it makes is followed until
it is freed.

The model is made of plain tensors, and its peer is an `Echo`, which sends back what it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from math import lcm, prod
from typing import Any
from unittest import mock

import torch
from torch import nn

import fsdp_demo
from fsdp_demo import ExchangeConfig, preset
from fsdp_demo.compression import formats
from fsdp_demo.compression.formats import CODERS
from fsdp_demo.compression.transform import matrix, onednn
from fsdp_demo.exchange.exchange import Exchange
from fsdp_demo.exchange.plan import Memory
from fsdp_demo.exchange.runtime import StepRuntime
from fsdp_demo.exchange.sending import CommWorker
from fsdp_demo.hosts.optimizers import materialise
from fsdp_demo.rendezvous.topology import Topology
from fsdp_demo.tools.planner.models import Tensors

from .tensor_ledger import Echo, Ledger

PERIODS = {
    "local_sgd": 2,
    "local_adam": 2,
    "desloc": 2,
    "diloco": 2,
    "decoupled_momentum": 2,
    "sparse_loco": 2,
    "sign_loco": 2,
    "muloco": 2,
    "sign_muloco": 2,
}


@contextmanager
def followed(ledger: Ledger) -> Iterator[None]:
    """Within this context the ledger follows what exchanges make, and nothing that the inner
    optimizer makes.
    """

    def inside(call: Callable[..., Any], mode: Callable[[], Ledger]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return call(*args, **kwargs)

        return run

    submit = CommWorker.submit
    with (
        mock.patch.object(
            CommWorker,
            "submit",
            # on a CPU nothing is made by what waits for the device
            lambda self, job, staged=None: submit(self, inside(job, ledger.inner), staged),
        ),
        mock.patch.object(StepRuntime, "before", inside(StepRuntime.before, lambda: ledger)),
        mock.patch.object(StepRuntime, "after", inside(StepRuntime.after, lambda: ledger)),
        mock.patch.object(Exchange, "_join", inside(Exchange._join, lambda: ledger)),
    ):
        yield


def measure(
    config: ExchangeConfig,
    tensors: Tensors,
    islands: int,
    steps: int,
    topology: Topology | None = None,
) -> Memory:
    """`plan_memory`'s figures, measured in `steps` steps on the CPU (its `staged=False`), one
    shard.

    State is what is held between steps at the least, in flight what comes on top at the most (so a
    step with nothing under way is needed to tell them apart).
    """
    named = [(n, nn.Parameter(torch.randn(shape))) for n, shape in tensors]
    gradients = [torch.randn(shape) for _, shape in tensors]
    optimizer = fsdp_demo.base_optimizer(config, named, lr=1e-3)
    materialise(optimizer)
    ledger, between, most = Ledger(), [], {"device": 0, "host": 0}
    with followed(ledger):
        exchange = fsdp_demo.attach(
            optimizer, config, topology=topology or Echo("mesh", 0, islands)
        )
        warm(exchange)
        for _ in range(steps):
            for (_, p), g in zip(named, gradients, strict=True):
                p.grad = g
            ledger.most.update(ledger.now)
            optimizer.step()
            # the accounts are read when all has arrived
            wait({f.future for f in exchange._queue.flights if f.future is not None})
            most = {account: max(most[account], ledger.most[account]) for account in most}
            between.append(dict(ledger.now))
        exchange.detach()
    last = between[-max(c.schedule.sync_every + c.schedule.delay for c in config.channels) :]
    state, held = (
        {account: best(b[account] for b in last) for account in most} for best in (min, max)
    )
    return Memory(
        sum(prod(shape) for _, shape in tensors),
        state["device"],
        state["host"],
        held["device"] - state["device"],
        held["host"] - state["host"],
        most["device"] - held["device"],
        most["host"] - held["host"],
    )


def warm(exchange: Exchange) -> None:
    """Make the tables that a process makes once (16 kB each at most): they belong to no
    exchange.
    """
    for c in exchange.channels:
        for n in {n for g in c.layout.groups for n in (g.r, g.s)} if c.layout is not None else ():
            matrix("dct", n, exchange.host.device)
    onednn()
    for code in CODERS:
        formats.decode(code, formats.encode(code, torch.ones(1, 32)), 1, 32)


def small(rows: int = 1024, layers: int = 6, norm: int = 16384) -> Tensors:
    """An embedding, matrices and vectors, by default of 29 M parameters, the largest tensor 16 MB.

    Rows of 4096 elements of the whole and of each fragment divide by 2 and 4: a reduce then cuts
    equal parts, as `Echo` needs.
    """
    out: Tensors = [("embed.weight", (4 * rows, rows))]
    for i in range(layers):
        out += [
            (f"layers.{i}.up.weight", (2 * rows, rows)),
            (f"layers.{i}.down.weight", (rows, 2 * rows)),
            (f"layers.{i}.norm", (norm,)),
        ]
    return out


def shortened(name: str) -> ExchangeConfig:
    """A preset with a period that a measurement reaches."""
    if name == "streaming_diloco":
        return preset(name, period=6, delay=1, layers=3)
    return preset(name, period=PERIODS[name]) if name in PERIODS else preset(name)


def steps_of(config: ExchangeConfig) -> int:
    """Steps in which every channel has sent, all that are due together have met, and what was under
    way has landed.
    """
    return lcm(*(c.schedule.sync_every for c in config.channels)) + max(
        c.schedule.sync_every + c.schedule.delay for c in config.channels
    )
