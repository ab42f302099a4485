"""An island joins a run under way: after the steps that it makes up for it stands where an island stands that was there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import base_optimizer, preset

from ..support import joining, threaded

STEPS = 12


class Net(nn.Module):
    """Two layers with running statistics, a head, a frozen vector."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(66, 66), nn.BatchNorm1d(66)) for _ in range(2)])
        self.head, self.shift = nn.Linear(66, 70), nn.Parameter(torch.randn(70), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) + self.shift


def made(config: Any, seed: int = 0) -> tuple[Net, torch.optim.Optimizer, Any]:
    """Model, optimizer and a schedule that gives each step another rate."""
    model = Net(seed)
    optimizer = base_optimizer(config, model.named_parameters(), lr=config.lr or 0.01)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 5))


def step(model: Net, optimizer: torch.optim.Optimizer, t: int, island: int) -> None:
    torch.manual_seed(100 * t + island)
    generator = torch.Generator().manual_seed(1000 * t + island)
    model(torch.randn(4, 66, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def recorded(config: Any, steps: int = STEPS) -> tuple[joining.Record, list[dict[str, Any]]]:
    """Two islands train; what the first one's desk has seen, and where it stood after every step."""

    def island(i: int, topology: Any) -> Any:
        model, optimizer, schedule = made(config, i)
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology, agree={"steps": 100})
        record = joining.Record(exchange) if i == 0 else None
        stands = [joining.stand(exchange._flow)]
        for t in range(steps):
            exchange.note(tokens=10 + 3 * i + t, loss=float(t))
            step(model, optimizer, t, i)
            schedule.step()
            stands.append(joining.stand(exchange._flow))
        exchange.state_dict()  # what is under way comes in
        exchange.detach()
        return record, stands

    return threaded.values(threaded.islands(island))[0]


def joins(config: Any, record: joining.Record, at: int, until: int | None = None) -> tuple[list[dict[str, Any]], Any, Net]:
    """A newcomer joins at step `at`: where it stood after each step that it has made up for, its exchange and its model."""
    stands: list[dict[str, Any]] = []
    patch = joining.watched(lambda flow: stands.append(joining.stand(flow)))
    try:
        model, optimizer, _ = made(config, 7)
        fed = joining.Fed(record, at, until)
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=joining.topology(fed), agree={"steps": 100})
    finally:
        patch.undo()
    assert exchange.newcomer and fed.goes_on == exchange.step
    return stands, exchange, model


CASES = {
    "full": preset("full"),
    "full-late": preset("full", **{"clock.delay": 2}, clip=0.1),
    "demo-seldom": preset("demo", **{"clock.period": 2, "clock.delay": 5}),
    "demo": preset("demo"),
    "demo-late": preset("demo", **{"clock.delay": 3}),
    "demo-norm": preset("demo", clip=0.05, clip_over="islands"),
    "demo-rates": preset("demo", lr_inside=True),
    "demo-2": preset("demo", version=2),
    "demo-adamw": preset("demo", inner="adamw"),
    "random": preset("random"),
    "stride": preset("stride", inner="adamw"),
    "local_sgd": preset("local_sgd", period=4),
    "local_sgd-late": preset("local_sgd", period=4, **{"clock.delay": 2, "applier.mix": 0.25}),
    "local_sgd-queue": preset("local_sgd", period=2, **{"clock.delay": 5}),
    "local_adam": preset("local_adam", period=3),
    "desloc": preset("desloc", period=2, **{"exp_avg.clock.delay": 1}),
    "diloco": preset("diloco", period=3, momentum_warmup=2),
    "diloco-int8": preset("diloco", period=3, code="int8"),
    "diloco-late": preset("diloco", period=4, **{"clock.delay": 3, "applier.mix": 0.5}),
    "diloco-queue": preset("diloco", period=2, **{"clock.delay": 5}),
    "diloco-tokens": preset("diloco", period=3, **{"reducer.weight": "tokens"}),
    "streaming_diloco": preset("streaming_diloco", period=4, layers=1, delay=2),
    "streaming-queue": preset("streaming_diloco", period=3, layers=1, delay=4, code="fp32"),
    "decoupled_momentum": preset("decoupled_momentum", period=2),
    "consensus-late": preset("decoupled_momentum", period=3, **{"clock.delay": 2, "applier.mix": 0.5}),
    "released": preset("decoupled_momentum", rule="released", period=2, average_every=2),
    "sparse_loco": preset("sparse_loco", period=2),
    "muloco": preset("muloco", period=3),
    "muloco-queue": preset("muloco", period=2, code="int4", **{"clock.delay": 3}),
}


def compare(config: Any, now: dict[str, Any], then: dict[str, Any]) -> None:
    """What a newcomer must share with an island that was there."""
    assert now["step"] == then["step"] and joining.same(now["clocks"], then["clocks"]), (now["clocks"], then["clocks"])
    assert now["loss"] == then["loss"] or now["loss"] != now["loss"]
    if not any(c.applier.local_delta for c in config.channels):
        assert joining.same(now["anchors"], then["anchors"]) and joining.same(now["momenta"], then["momenta"])
        assert all(not a.any() for a in now["accumulators"])
    assert all(far == 0 for far in now["away"])
    if all(c.before_step for c in config.channels):
        assert joining.same(now["parameters"], then["parameters"]) and joining.same(now["states"], then["states"])
    for c in config.channels:
        t = now["step"] - 1
        if c.source == "parameter" and not c.clock.delay and not c.applier.mix and c.clock.due(t):
            assert joining.same(now["parameters"], then["parameters"])
        if c.state_name and c.clock.due(t) and not c.clock.delay and not c.exclude:
            assert all(torch.equal(a[c.state_name], b[c.state_name]) for a, b in zip(now["states"], then["states"], strict=True))
        if c.state_name:
            assert all(torch.equal(a["step"], b["step"]) for a, b in zip(now["states"], then["states"], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_newcomer_stands_where_the_others_stand(run_ranks, name: str) -> None:
    """Joining after every step, and following up to the end."""
    config = CASES[name]

    def run() -> None:
        record, truth = recorded(config)
        assert sorted(record.snapshots) == list(range(1, STEPS + 1))
        for at in record.snapshots:
            stands, exchange, model = joins(config, record, at)
            assert [s["step"] for s in stands] == list(range(at + 1, STEPS + 1)) and exchange.step == STEPS
            assert exchange.optimizers[0].param_groups[0]["lr"] == exchange.optimizers[0].param_groups[0]["initial_lr"]
            for now in [*stands, joining.stand(exchange._flow)]:
                compare(config, now, truth[now["step"]])
            exchange.detach()

    run_ranks(run, islands=1, procs=1)
