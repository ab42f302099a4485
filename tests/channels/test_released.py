"""Settings that do what the authors' released code does, against it written out; and what stands
beside them by default.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import (
    Accumulator,
    Channel,
    ExchangeConfig,
    MuonAdamW,
    SyncSchedule,
    base_optimizer,
    preset,
)
from fsdp_demo.compression.windows import Window
from fsdp_demo.hosts.muon import RELEASED

from ..oracles import presets as oracle
from ..support.layered import LAYERED
from ..support.two_layers import train
from .test_delays_oracle import trained
from .test_presets_oracle import (
    CASES,
    Case,
    coded,
    coding,
    decayed,
    demo,
    expected,
    sgd,
    trainer,
    worst,
)

# -- demo: the learning rate inside the momentum -------------------------------------------------


def warm_up(t: int) -> float:
    """A factor of the learning rate: a warm-up that begins at nothing, then a fall."""
    return t / 8 if t < 8 else 0.9 ** (t - 8)


INSIDE = replace(
    CASES["demo"],
    config=demo(lr_inside=True, inner_optimizers="as_is", sign=True),
    inner=decayed,
    options={**CASES["demo"].options, "lr_inside": True, "schedule": warm_up},
    seeds={},
)


@pytest.mark.parametrize("procs", [1, 2])
def test_released_demo_lr_inside(run_ranks, procs):
    """DeMo with `lr_inside` follows the authors' released code."""
    case, islands = replace(INSIDE, seed=6 if procs == 1 else 1), 2
    results = run_ranks(trainer(case, case.seed, 16, schedule=warm_up), islands, procs)
    truth = expected(case, islands, procs, case.seed, 16)
    assert truth.margin > 5e-6, f"choose another seed: a top-k choice is as close as {truth.margin}"
    outside = replace(case, options={**case.options, "lr_inside": False})
    plain = expected(outside, islands, procs, case.seed, 16)
    parted = [p != plain.params[-1][0][n] for n, p in truth.params[-1][0].items()]
    # a schedule tells them apart
    assert sum(int(x.sum()) for x in parted) > 0.2 * sum(x.numel() for x in parted)
    for island, (_, params) in enumerate(results[::procs]):
        assert worst(params, island, truth) <= case.tolerance


def test_released_demo_lr_of_each_group(run_ranks):
    """Each parameter has the learning rate of its group. Two groups, in the same workspace: whole
    tensors, blocks and edges of blocks.
    """

    def two(params: Any) -> torch.optim.Optimizer:
        every = list(params)
        parts = [[p for p in every if (sum(p.shape) % 3 == 0) == some] for some in (False, True)]
        rates = zip(parts, (0.01, 0.04), strict=True)
        return torch.optim.SGD([{"params": part, "lr": rate} for part, rate in rates])

    config = demo(lr_inside=True, sign=False, topk=4096, beta=0.9)
    options = {"coding": coding(k=4096), "sign": False, "beta": 0.9, "lr_inside": True}
    case = Case(config, oracle.Demo, two, options)
    results, truth = run_ranks(trainer(case, 0, 5), 2, 1), expected(case, 2, 1, 0, 5)
    for island, (_, params) in enumerate(results):
        assert worst(params, island, truth) < 1e-5


def test_released_demo_constant_rate_same_signs() -> None:
    """At a constant rate the signs with `lr_inside` are those without."""
    ends = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        config = preset("demo", lr_inside=inside, value_dtype="fp32")
        optimizer = base_optimizer(config, model.parameters(), lr=2.0**-9)
        exchange = fsdp_demo.attach(optimizer, config, model=model)
        rows = [torch.randn(4, 64, generator=torch.Generator().manual_seed(t)) for t in range(6)]
        train(optimizer, lambda t: model(rows[t]).square().sum(), 6)  # noqa: B023
        exchange.finish()
        ends.append(model.weight.detach())
    assert torch.equal(*ends)


def test_released_rate_for_gradients_only() -> None:
    """`accumulator.rate` is refused for a channel of deltas."""
    outer = preset("diloco").channels[0].applier
    channel = Channel("delta", "delta", SyncSchedule(2), Accumulator(rate=True), applier=outer)
    with pytest.raises(ValueError, match="accumulator.rate=True multiplies gradients"):
        ExchangeConfig("own", (channel,))
    (channel,) = preset("random", **{"accumulator.rate": True}).channels
    assert channel.accumulator == Accumulator(beta=0.95, rate=True)
    window = Window(None, 0, 4, rows=((1, 0, 2, 0), (0, 3, 5, 2)))
    assert window.scale(torch.ones(4), [2.0, 3.0]).tolist() == [3, 3, 2, 2]


# -- muloco --------------------------------------------------------------------------------------


class QuantizedOuterSGD(oracle.Streaming):
    """The released outer step: e = beta e + lr delta; the code of e is sent and leaves it; SGD
    steps by lr times the mean.
    """

    def __init__(self, *args: Any, **kw: Any):
        super().__init__(*args, gain=kw.get("lr", 0.8), **kw)


MULOCO = {
    "period": 4, "lr": 0.8, "momentum": 0.9, "beta": 0.9, "code": "int4", "dtype": torch.float32,
}  # fmt: skip
RELEASED_MULOCO = Case(coded("muloco", period=4, value_dtype="int4", released=True),
    QuantizedOuterSGD, sgd, MULOCO, model=LAYERED)  # fmt: skip


@pytest.mark.parametrize("steps", [12, 14])
def test_released_muloco_squared_rate(run_ranks, steps):
    """The released MuLoCo steps by the square of its rate. The twin, step for step, then the end,
    inside a round too, where the mean is plain whatever the gain is.
    """
    case = RELEASED_MULOCO
    method, truth = case.follow(2, steps)
    method.finish()
    for params, final, equal in run_ranks(trained(case, "finish", steps), 2, 1):
        assert equal
        want = {n: p.detach() for n, p in method.theta[0].items()}
        pairs = [(final, want), *([(params[-1], truth[-1][0])] if steps % 4 == 0 else [])]
        for n in want:
            for got, there in pairs:
                # a value may be rounded another way
                assert float(((got[n] - there[n]).abs() > 1e-5).float().mean()) < 0.02, n


def test_released_muloco_defaults() -> None:
    """The preset `muloco` has our values by default and the authors' with `released=True`."""
    ours, released = preset("muloco").channels[0], preset("muloco", released=True).channels[0]
    assert (ours.accumulator.gain, ours.applier.momentum_warmup) == (1.0, 20)
    outer = released.applier
    assert (released.accumulator.gain, outer.lr, outer.momentum_warmup) == (0.8, 0.8, 0)
    warm = preset("muloco", released=True, momentum_warmup=5).channels[0]
    assert warm.applier.momentum_warmup == 5
    assert preset("muloco", released=True, value_dtype="fp32").channels[0].accumulator is None


def muon_released(p: torch.Tensor, grads: list[torch.Tensor], lr, decay: float) -> torch.Tensor:
    """Muon as MuLoCo's code has it: no Nesterov, the rate times sqrt(out / in), decay by the rate
    itself.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    buffer = torch.zeros_like(p)
    for g in grads:
        buffer = 0.9 * buffer + 0.1 * g
        x = buffer.bfloat16()
        x = x.T if p.shape[0] > p.shape[1] else x
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if p.shape[0] > p.shape[1] else x
        p = p * (1 - lr * decay) - lr * math.sqrt(p.shape[0] / p.shape[1]) * x.float()
    return p


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (32, 32)])
def test_released_muon_by_options(shape) -> None:
    """Options of MuonAdamW give the authors' released Muon."""
    torch.manual_seed(0)
    start, grads = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    w, v = torch.nn.Parameter(start.clone()), torch.nn.Parameter(torch.ones(5))
    optimizer = base_optimizer(
        preset("muloco", released=True), [("w", w), ("v", v)], weight_decay=0.1, **RELEASED
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    for g in grads:
        w.grad, v.grad = g.clone(), torch.ones(5)
        optimizer.step()
    want = muon_released(start, grads, 0.0224, 0.1)
    # products in bf16
    assert float((w.detach() - want).norm()) < 0.03 * float((start - want).norm())
    assert optimizer.param_groups[-1]["lr"] == 0.0224
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.99)
    assert optimizer.param_groups[0]["nesterov"] is False


def test_released_muon_factor_choices() -> None:
    """The factor of Muon is one of three."""
    shapes = {"w": (4, 16), "u": (16, 4)}
    named = [(n, torch.nn.Parameter(torch.ones(s))) for n, s in shapes.items()]
    for adjust, groups in (("original", 1), ("match_rms_adamw", 1), ("sqrt_out_in", 2)):
        made = MuonAdamW(named, adjust=adjust)
        assert len(made.param_groups) == groups
    decays = [g["lr"] * g["weight_decay"] for g in made.param_groups]
    assert decays == pytest.approx([0.0224e-4] * 2)
    assert [g["lr"] for g in made.param_groups] == [0.0112, 0.0224]
    with pytest.raises(ValueError, match="adjust='sqrt_in_out'.*did you mean 'sqrt_out_in'"):
        MuonAdamW(named, adjust="sqrt_in_out")


# -- decoupled momentum --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["consensus", "released"])
def test_released_outer_rate_of_dense_tensors(rule) -> None:
    """The outer rate is also that of whole tensors, unless `dense_lr` is set."""
    applier = preset("decoupled_momentum", rule=rule, lr=0.3).channels[0].applier
    assert (applier.lr, applier.dense_lr) == (0.3, 0.3)
    both = preset("decoupled_momentum", rule=rule, lr=0.3, **{"applier.dense_lr": 0.5})
    assert both.channels[0].applier.dense_lr == 0.5
    usual = preset("decoupled_momentum", rule=rule).channels[0].applier
    assert usual.lr == usual.dense_lr == (0.7 if rule == "released" else 1.0)
