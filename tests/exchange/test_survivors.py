"""Training goes on when an island is killed or expelled: real processes over ZeroMQ, real presets,
and the survivors end with one model.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.elastic import failure_detector
from fsdp_demo.exchange.watch import LIMIT

from ..support.two_layers import step

CASES = {
    "demo": preset("demo"),
    "demo, late": preset("demo", **{"schedule.delay": 2}),
    "random": preset("random"),
    "full": preset("full"),
    "diloco": preset("diloco", period=3, momentum_warmup=0),
    "diloco, int4": preset("diloco", period=3, momentum_warmup=0, value_dtype="int4"),
    "diloco, tokens": preset("diloco", period=3, momentum_warmup=0, **{"reducer.weight": "tokens"}),
    "streaming_diloco": preset("streaming_diloco", period=6, delay=3, layers=1),
    "sel_sync": preset("sel_sync", check_every=2, window=2, delta=1.0, at_most=4),
    "desloc": preset("desloc", period=2),
    "decoupled_momentum": preset("decoupled_momentum", period=3),
    "decoupled_momentum, late": preset("decoupled_momentum", period=2, **{"schedule.delay": 3}),
    "muloco": preset("muloco", period=3),
}
BY_SGD = ("demo", "random", "full")
ENV = {"ISLAND_DEAD": "4"}


class Small(torch.nn.Module):
    """Four layers, for presets that cut between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss(model: torch.nn.Module, island: int, t: int) -> torch.Tensor:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * t + island))
    return (model(x) - x).square().mean()


def optimizer_for(case: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if case.startswith("muloco"):
        return fsdp_demo.MuonAdamW(list(model.named_parameters()), lr=1e-3)
    kind = torch.optim.SGD if case.startswith(BY_SGD) else torch.optim.AdamW
    return kind(model.parameters(), lr=1e-3)


def by_sgd(me: Any, folder: Path, config: fsdp_demo.ExchangeConfig) -> tuple[Any, Any, Any]:
    """Model, optimizer and exchange of an island whose status lies in `folder`/status<island>."""
    os.environ["ISLAND_STATUS"] = str(folder / f"status{me.island}")
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, fsdp_demo.attach(optimizer, config, model=model)


def trained(me: Any, case: str, victim: int, at: int, steps: int = 14) -> Any:
    """Train; the victim dies in a process of its own, so that its end tells the server nothing."""
    if me.island == victim and (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        model = Small()
        optimizer = optimizer_for(case, model)
        exchange = fsdp_demo.attach(optimizer, CASES[case], model=model)
        for t in range(steps):
            if me.island == victim and t == at:
                os._exit(9)
            exchange.report(tokens=10 + me.island, loss=1.0 + me.island)
            step(optimizer, loss(model, me.island, t))
        metrics = exchange.metrics() | exchange.totals()
        exchange.finish()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        return exchange.digests_equal(), exchange.peers and exchange.peers.slots, metrics, values
    finally:
        if me.island == victim:
            os._exit(1)


@pytest.mark.parametrize("case", CASES)
def test_survivors_train_on(run_ranks, case: str) -> None:
    """The survivors of a killed island train on and end with one model."""
    found = run_ranks(trained, 3, 1, env=ENV, args=(case, 1, 7))
    assert found[1] == 9
    one, two = found[0], found[2]
    assert all(torch.isfinite(v).all() for v in one[3].values())
    if CASES[case].equal_after_exchange:
        assert one[0] and two[0]
        assert all(torch.equal(one[3][n], two[3][n]) for n in one[3])
    assert one[2]["loss"] == two[2]["loss"] == 2.0  # of islands 0 and 2
    if case in ("demo", "diloco"):  # the lost island took part in the exchanges up to step 7, or 6
        steps = {"demo": 3 * 7 + 2 * 7, "diloco": 3 * 6 + 2 * 8}[case]
        assert [one[2]["global_tokens"], two[2]["global_tokens"]] == [10 * steps, 12 * steps]


def test_survivors_woken_island_exits_75(run_ranks, tmp_path: Path) -> None:
    """An island that wakes after the others went on (SIGSTOP for longer than ISLAND_DEAD) writes
    nothing and ends with status 75.
    """

    def fn(me: Any) -> Any:
        model, optimizer, exchange = by_sgd(me, tmp_path, preset("full"))
        steps, stopped = tmp_path / f"steps{me.island}", tmp_path / "stopped"
        for t in range(10):
            if me.island == 1 and t == 4:
                stopped.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            step(optimizer, loss(model, me.island, t))
            steps.write_text(str(t + 1))
            while me.island == 0 and t == 3 and not stopped.exists():
                time.sleep(0.02)
        exchange.finish()
        if me.island == 0:
            os.kill(int(stopped.read_text()), signal.SIGCONT)
        return exchange.digests_equal(), model.layers[0].weight.detach().clone()

    one, two, three = run_ranks(fn, 3, 1, env={**ENV, "ISLAND_DEAD": "2"}, check=False)
    assert one.error is None and three.error is None, (one.log, three.log)
    assert one.value[0] and torch.equal(one.value[1], three.value[1])
    assert two.status == 75 and (tmp_path / "status1" / "rank0").read_text() == "75", two.log
    assert (tmp_path / "steps1").read_text() == "4" and (tmp_path / "steps0").read_text() == "10"
    assert "saves nothing: the others go on without it" in two.log


@pytest.mark.parametrize("stands", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_survivors_stalled_island_ends(run_ranks, tmp_path: Path, stands: int) -> None:
    """An island that stands still ends, and never the one that waits for it. Its heartbeats go on:
    ISLAND_STALL counts, not ISLAND_DEAD, nor ISLAND_TIMEOUT; and the slot does not.
    """

    def fn(me: Any) -> Any:
        pytest.MonkeyPatch().setattr(failure_detector, "PATIENCE", 1.0)
        model, optimizer, exchange = by_sgd(me, tmp_path, preset("full"))
        for t in range(7):
            while me.island == stands and t == 5 and not (tmp_path / "done").exists():
                time.sleep(0.02)
            if t == 4:
                time.sleep(0.6)  # so that heartbeats, two a second, see it move
            step(optimizer, loss(model, me.island, t))
        exchange.finish()
        (tmp_path / "done").touch()
        return exchange.digests_equal()

    found = run_ranks(fn, 2, 1, 200, env={**ENV, "ISLAND_STALL": "2"}, check=False)
    waits, stood = found[1 - stands], found[stands]
    assert waits.error is None and waits.value, waits.log
    name = f"island {stands} (island{stands})"
    assert re.search(rf"waiting for {re.escape(name)} for \d+ s: it is alive", waits.log), waits.log
    assert stood.status == 75, stood.log
    assert "of this island, which stands" in stood.log, stood.log


@pytest.mark.parametrize("bad", [1e6, float("nan")], ids=["far", "not finite"])
def test_survivors_left_out_island_exits_75(run_ranks, tmp_path: Path, bad: float) -> None:
    """An island that is left out again and again ends with status 75. It comes back as a newcomer;
    the others have taken nothing of it.
    """

    def fn(me: Any) -> Any:
        model, optimizer, exchange = by_sgd(me, tmp_path, preset("demo", clip=None))
        for t in range(8 + LIMIT + 3):
            step(optimizer, loss(model, me.island, t) * (bad if me.island == 1 and t >= 8 else 1.0))
            (tmp_path / f"steps{me.island}").write_text(str(t + 1))
        metrics = exchange.metrics()
        exchange.finish()
        left_out = metrics["far"] + metrics["not_finite"]
        return exchange.digests_equal(), left_out, metrics["participating"]

    one, two, three = run_ranks(fn, 3, 1, env=ENV, check=False)
    assert one.error is None and three.error is None, (one.log, three.log)
    equal, left_out, participating = one.value
    assert one.value == three.value and equal
    assert left_out in (LIMIT - 1, LIMIT) and participating == 2
    assert two.status == 75 and (tmp_path / "status1" / "rank0").read_text() == "75", two.log
    assert (tmp_path / "steps1").read_text() == str(8 + LIMIT - 1)
    assert f"{LIMIT} times in a row" in two.log
