"""Buffers: running statistics are averaged with the parameters, and all islands end with the same
model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import Topology, preset
from fsdp_demo.channels import bind
from fsdp_demo.checkpoint import CheckpointManager, RunState

from ..support.inside import in_ranks, in_threads
from ..support.small import same
from ..support.threaded import Tap, islands, values

CONFIGS = {
    "full": preset("full"),
    "demo": preset("demo"),
    "diloco": preset("diloco", period=4),
    "diloco late": preset("diloco", period=4, **{"schedule.delay": 1, "applier.mix": 0.5}),
    "decoupled_momentum": preset("decoupled_momentum", period=4),
    "released": preset("decoupled_momentum", period=4, rule="released"),
    "local_sgd": preset("local_sgd", period=4),
    "streaming_diloco": preset("streaming_diloco", period=4, delay=1, layers=0),
}


class Net(torch.nn.Module):
    """BatchNorm's running statistics, a counter, a table that is not saved, and one in double
    precision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 1)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("exact", torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def made(config, topology: Topology, state=None, saved=None) -> tuple[Net, Any, Any]:
    torch.manual_seed(3)
    model = Net()
    kind: Any = torch.optim.SGD if config.inner_optimizers[0] == "sgd" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    given = {"model": model, "topology": topology, "state": state}
    return model, optimizer, fsdp_demo.attach(optimizer, config, **given)


def step(model: Net, optimizer: Any, exchange: Any, island: int) -> None:
    g = torch.Generator().manual_seed(100 * exchange.step + island)
    model(torch.randn(16, 6, generator=g) + island).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", CONFIGS)
@in_ranks(1, 1)
def test_buffers_equal_at_end(name: str) -> None:
    """All islands end with equal buffers."""

    def island(i: int, topology: Topology) -> Any:
        model, optimizer, exchange = made(CONFIGS[name], topology)
        for _ in range(6):
            step(model, optimizer, exchange, i)
        apart = model.norm.running_mean.clone()
        exchange.finish()
        return apart, {n: b.clone() for n, b in model.named_buffers()}

    found = values(islands(island))
    apart, ended = zip(*found, strict=True)
    assert not torch.equal(apart[0], apart[1])
    for name in ended[0]:
        assert torch.equal(ended[0][name], ended[1][name]), name
    assert int(ended[0]["norm.num_batches_tracked"]) == 6
    assert ended[0]["exact"].dtype == torch.float64


@in_ranks(1, 1)
def test_buffers_mean_in_message_of_parameters() -> None:
    """Buffers are averaged, and they travel in the message of the parameters."""

    def island(i: int, topology: Topology) -> Any:
        model, optimizer, exchange = made(CONFIGS["diloco"], topology)
        tap = Tap(exchange)
        for _ in range(3):
            step(model, optimizer, exchange, i)
        before = copy.deepcopy(model)
        # what the fourth forward makes of the statistics
        step(before, torch.optim.SGD(before.parameters(), lr=0.0), exchange, i)
        assert not tap.sent
        step(model, optimizer, exchange, i)
        sent = len(tap.all_left())
        with exchange.outer_parameters(model):  # an anchor is known: nothing is sent for it
            pass
        assert len(tap.sent) == sent
        exchange.detach()
        return before.norm.running_mean, model.norm.running_mean.clone(), sent

    (own, mean, sent), (other, same, _) = values(islands(island))
    torch.testing.assert_close(mean, (own + other) / 2)
    # header, two legs: one message for parameters and buffers
    assert torch.equal(mean, same) and sent == 3


@in_ranks(1, 1)
def test_buffers_under_gradient_presets() -> None:
    """Gradient presets average the buffers at every so many steps only."""
    bind.EVERY = 3  # of a process of its own

    def island(i: int, topology: Topology) -> Any:
        model, optimizer, exchange = made(CONFIGS["demo"], topology)
        seen = []
        for _ in range(6):
            step(model, optimizer, exchange, i)
            seen.append(model.norm.running_var.clone())
        exchange.detach()
        return seen

    both = zip(*values(islands(island)), strict=True)
    assert [torch.equal(a, b) for a, b in both] == [False, False, True, False, False, True]


@pytest.mark.parametrize("name", ["diloco late", "demo"])
@in_ranks(1, 1)
def test_buffers_after_resume(name: str) -> None:
    """A resumed run has the same buffers as the uninterrupted one."""
    bind.EVERY = 3  # of a process of its own
    saved: dict[int, Any] = {}

    def run(i: int, topology: Topology) -> Any:
        """The whole run, and then the one that goes on from what was saved."""
        state = saved[i][2] if i in saved else None
        model, optimizer, exchange = made(CONFIGS[name], topology, state, saved.get(i))
        while exchange.step < 10:
            step(model, optimizer, exchange, i)
            if exchange.step == 4:  # with a delay, a payload with buffers in it is under way
                held = (model.state_dict(), optimizer.state_dict(), exchange.state_dict())
                saved[i] = copy.deepcopy(held)
        exchange.detach()
        return model.state_dict()

    assert same(values(islands(run)), values(islands(run)))


@pytest.mark.parametrize("name", ["demo", "diloco"])
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
@in_ranks(2, 1)
def test_buffers_mask_not_averaged(me: Any, name: str, lowest: float) -> None:
    """A mask stays as it is: its mean is no number, and a checkpoint holds it."""
    topology = Topology.from_env()
    torch.manual_seed(3)
    model = Net()
    model.register_buffer("mask", torch.full((3, 3), lowest).triu(1))
    optimizer = fsdp_demo.base_optimizer(CONFIGS[name], model.named_parameters(), 0.01)
    checkpoints = CheckpointManager(me.folder / topology.name, topology)
    state = RunState(checkpoints, model, optimizer)
    exchange = fsdp_demo.attach(optimizer, CONFIGS[name], model=model, topology=topology)
    mask = model.mask.clone()
    for _ in range(4):
        step(model, optimizer, exchange, me.island)
    state.save(exchange)
    exchange.finish()
    assert torch.equal(model.mask, mask) and list(checkpoints.whole()) == [4]
    assert exchange.metrics()["not_finite"] == 0


def test_buffers_unsharded_islands_of_unlike_size(run_ranks: Callable[..., Any]) -> None:
    """Unsharded islands of 2 ranks (the buffers of one island are equal, as DDP has them) and of 1:
    every rank ends with the mean.
    """

    def run(me: Any) -> Any:
        model, optimizer, exchange = made(CONFIGS["local_sgd"], Topology.from_env())
        for _ in range(6):
            step(model, optimizer, exchange, me.island)
        exchange.finish()
        return model.norm.running_mean.tolist()

    found = run_ranks(run, procs=[2, 1])
    assert found[0] == found[1] == found[2]


@in_threads()
def test_buffers_none_cost_nothing(topology: Topology) -> None:
    """A model without buffers sends nothing for them."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, topology=topology)
    exchange.detach()
    assert exchange._runtime.buffers == []


@pytest.mark.parametrize("stage", ["zero1", "zero3-parts"])
def test_buffers_under_zero(run_ranks: Callable[..., Any], stage: str) -> None:
    """A ZeRO engine's model keeps its buffers whole on every rank: the mean of the islands, rank by
    rank.
    """
    pytest.importorskip("deepspeed")
    import deepspeed_ext

    from ..support import zero

    def run(me: Any) -> Any:
        made = zero.engine(zero.settings(stage))
        exchange = deepspeed_ext.attach(made, "diloco", period=2)
        made.module.scale.fill_(1.0 + 2.0 * me.island)
        zero.train(made, range(2), me.rank)
        mean = made.module.scale.tolist()
        made.module.scale.fill_(5.0 * me.island)
        zero.train(made, range(2, 3), me.rank)
        exchange.finish()
        return mean, made.module.scale.tolist()

    assert run_ranks(run, 2, 2, timeout=120) == [([2.0] * 3, [2.5] * 3)] * 4
