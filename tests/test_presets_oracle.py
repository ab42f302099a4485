"""The presets on real islands and processes against the oracles: R replicas as lists in one process (`oracles/presets.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from fsdp_demo import ExchangeConfig, preset

from . import probe
from .oracles import presets as oracle

STEPS = 20
ISLANDS = {"2x1": (2, 1, True), "2x2": (2, 2, True), "2x2-unsharded": (2, 2, False), "4x1": (4, 1, True)}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """A configuration, the oracle that must follow it, and how close.

    `tolerance` bounds |real - oracle| per element (parameters are within +-2 or so); `seed` was chosen so that no top-k choice is closer
    than `clear` (relative to the block's largest value), which rounding cannot turn.
    """

    config: ExchangeConfig
    make: Callable[..., oracle.Replicas]
    inner: Callable[[Any], torch.optim.Optimizer] = sgd
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    seed: int = 0
    period: int = 1


def coding(**kw: Any) -> oracle.Coding:
    return oracle.Coding(**{"code": "fp32", **kw})


P = 4  # period of the delta presets here

CASES = {
    "full": Case(preset("full"), oracle.Full, adamw),
    "demo": Case(preset("demo", code="fp32", clip=None), oracle.Demo, options={"coding": coding()}, seed=6),
    "demo-identity": Case(
        preset("demo", code="fp32", sign=False, topk=16, beta=0.9, clip=None).changed({"accumulator.gain": 0.1, "accumulator.alpha": 0.5}),
        oracle.Demo,
        options={"sign": False, "beta": 0.9, "gain": 0.1, "alpha": 0.5, "coding": coding(k=16)},
        seed=11,
    ),
    "demo-no-transform": Case(
        preset("demo", code="fp32", transform=False, clip=None), oracle.Demo, options={"coding": coding(transform=False)}, seed=3
    ),
    "diloco": Case(preset("diloco", period=P, clip=None), oracle.DiLoCo, adamw, {"period": P}, period=P),
    "consensus": Case(
        preset("decoupled_momentum", period=P, code="fp32", clip=None, inner="as_is"),
        oracle.DecoupledMomentum,
        sgd,
        {"period": P, "coding": coding()},
        period=P,
        seed=4,
    ),
    "consensus-replicas-no-transform": Case(
        preset("decoupled_momentum", period=P, code="fp32", transform=False, reducer="replicas", clip=None, inner="as_is"),
        oracle.DecoupledMomentum,
        sgd,
        {"period": P, "coding": coding(transform=False, senders=False)},
        period=P,
        seed=3,
    ),
    "released": Case(
        preset("decoupled_momentum", rule="released", period=P, code="fp32", clip=None, inner="as_is"),
        oracle.DecoupledMomentum,
        sgd,
        {"rule": "released", "period": P, "coding": coding(senders=False)},
        period=P,
        seed=0,
    ),
    "released-senders": Case(
        preset("decoupled_momentum", rule="released", period=P, code="fp32", reducer="senders", clip=None, inner="as_is"),
        oracle.DecoupledMomentum,
        sgd,
        {"rule": "released", "period": P, "coding": coding()},
        tolerance=1e-4,  # the momentum grows at every exchange, and rounding with it
        period=P,
        seed=3,
    ),
}


@dataclass
class Expected:
    """What an oracle says: per step and replica the parameters; which elements are open because a sign hangs on rounding."""

    params: list[list[dict[str, torch.Tensor]]]
    margin: float
    open: dict[str, torch.Tensor]


def start(case_seed: int) -> dict[str, torch.Tensor]:
    """The initial parameters that are not frozen."""
    return {n: p.detach().clone() for n, p in probe.Probe(case_seed).named_parameters() if n != "frozen"}


@cache
def expected(name: str, replicas: int, shards: int) -> Expected:
    case = CASES[name]
    shape = {"shards": shards} if issubclass(case.make, oracle.Sparse) else {}
    method = case.make(start(case.seed), replicas, case.inner, **shape, **case.options)
    history = follow(method, case.seed, STEPS)
    signed = isinstance(method, oracle.Demo) and method.sign
    doubtful = {n: (method.smallest[n] < 1e-4) if signed else torch.zeros(p.shape, dtype=torch.bool) for n, p in method.theta[0].items()}
    return Expected(history, method.margin, doubtful)


def follow(
    method: oracle.Replicas, seed: int, steps: int, names: list[str] | None = None, skips: tuple[tuple[int, int], ...] = ()
) -> list[list[dict[str, torch.Tensor]]]:
    """Run an oracle on the probe's gradients; `skips` are (step, replica) pairs where a replica drops its step. [step][replica]."""
    history, weights = [], list(method.weights)
    for t in range(steps):
        left_out = [r for s, r in skips if s == t]
        if isinstance(method, oracle.Full):
            method.weights = [0.0 if r in left_out else w for r, w in enumerate(weights)]
        method.step([{} if r in left_out else probe.island_gradient(seed, t, r, names) for r in range(method.R)])
        history.append([{n: p.detach().float().clone() for n, p in theta.items()} for theta in method.theta])
    return history


def worst(real: list[dict[str, torch.Tensor]], replica: int, truth: Expected) -> float:
    """Largest deviation over all steps and elements that are not open."""
    return max(
        float(((step[n] - want[replica][n]).abs() * ~truth.open[n]).max())
        for step, want in zip(real, truth.params, strict=True)
        for n in want[replica]
    )


def worst_of(
    real: list[dict[str, torch.Tensor]],
    replica: int,
    truth: list[list[dict[str, torch.Tensor]]],
    smallest: dict[str, torch.Tensor] | None = None,
) -> float:
    """`worst` for a history; elements whose sign hung on less than 1e-4 are left out."""
    doubtful = {n: smallest[n] < 1e-4 if smallest else torch.zeros(p.shape, dtype=torch.bool) for n, p in truth[0][replica].items()}
    return worst(real, replica, Expected(truth, 0.0, doubtful))


PRESETS = ("full", "demo", "diloco", "consensus", "released")
COMBINATIONS = [(n, i) for n in CASES for i in ISLANDS if n in PRESETS or i == "2x2"]


@pytest.mark.parametrize("name, islands", COMBINATIONS, ids=[f"{n}-{i}" for n, i in COMBINATIONS])
def test_follows_the_oracle(run_ranks, name, islands):
    case, (count, procs, sharded) = CASES[name], ISLANDS[islands]

    def run(me):
        out = probe.train(me, case.config, case.inner, STEPS, sharded, case.seed)
        return out["equal"], out["params"] if me.proc == 0 else None

    results = run_ranks(run, count, procs)
    truth = expected(name, count, procs if sharded else 1)
    assert truth.margin > 5e-6, f"choose another seed: a top-k choice is as close as {truth.margin}"
    total = sum(m.numel() for m in truth.open.values())
    assert sum(int(m.sum()) for m in truth.open.values()) < 0.01 * total
    for r, (equal, params) in enumerate(results):
        if params is not None:
            assert worst(params, r // procs, truth) <= case.tolerance
        exchanged = [(t + 1) % case.period == 0 for t in range(STEPS)]
        assert equal == (exchanged if case.config.consensus else [False] * STEPS)


CODED = {
    "diloco-bf16": (preset("diloco", period=P, code="bf16", clip=None), oracle.DiLoCo, {"period": P, "code": "bf16"}),
    "demo-bf16": (
        preset("demo", code="bf16", transform=False, sign=False, clip=None),
        oracle.Demo,
        {"sign": False, "coding": coding(code="bf16", transform=False)},
    ),
    "consensus-int8": (
        preset("decoupled_momentum", period=P, transform=False, clip=None),
        oracle.DecoupledMomentum,
        {"period": P, "coding": coding(code="int8", transform=False)},
    ),
}


@pytest.mark.parametrize("name", CODED)
def test_coded_values_follow_the_oracle(run_ranks, name):
    """Rounding turns a difference of 1e-7 into one of a code now and then: nearly all elements must agree as closely as in fp32."""
    config, make, options = CODED[name]

    def run(me):
        return probe.train(me, config.changed({"inner": ["as_is"]}), sgd, 12, seed=3)["params"]

    truth = follow(make(start(3), 2, sgd, **options), 3, 12)
    for r, params in enumerate(run_ranks(run, 2, 1)):
        difference = torch.cat([(params[-1][n] - want).abs().reshape(-1) for n, want in truth[-1][r].items()])
        assert float((difference > 2e-6).float().mean()) < 0.02
        assert float(difference.max()) < 0.05
