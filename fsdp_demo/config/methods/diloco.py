"""DiLoCo and its relatives: an outer step on the mean of whole pseudo-gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..channel import Channel
from ..parts import Accumulator, Applier, Codec, Fragments, SyncSchedule
from ..schema import ExchangeConfig

WARMUP = 20
"""Rounds over which presets with an outer momentum of 0.9 let it rise; 0 is the published constant
momentum. Measured (benchmarks/results/study.md): constant over 24 rounds ended worse than one
replica alone, a rise over half of them 6 % above the all-reduce. Whether rounds or their share of
the run decide is not known."""

ADAPTIVE = ("adamw", "adam", "muon", "muonadamw")
"""Inner optimizers of methods with an outer step."""


def outer_step(lr: float, momentum: float, momentum_warmup: int, **others: Any) -> Applier:
    """An outer step of rate `lr`, with Nesterov momentum if any (`momentum_warmup`: in rounds)."""
    return Applier(
        "outer_step",
        lr=lr,
        momentum=momentum,
        nesterov=momentum > 0,
        momentum_warmup=momentum_warmup,
        **others,
    )


def diloco(
    period: int = 500,
    lr: float = 0.7,
    momentum: float = 0.9,
    value_dtype: str = "fp32",
    momentum_warmup: int = WARMUP,
    eager: int = 0,
) -> ExchangeConfig:
    """DiLoCo (Douillard et al., arXiv 2311.08105): every `period` steps a Nesterov step on the mean
    pseudo-gradient.

    Published: inner AdamW 4e-4, weight decay 0.1; outer 0.7 / 0.9; period 500; payload fp32, and
    fp16 or int8 without loss in later work (OpenDiLoCo, INTELLECT-1). Ours: the outer momentum
    rises over the first `momentum_warmup` rounds (0: constant), since a constant one did harm in
    runs of few rounds (benchmarks/results/study.md). To compare with a paper set it to 0: at period
    500 the rise takes 10 000 steps.

    `eager` R: eager updates (Kale et al., arXiv 2502.12996) of R replicas. The mean acts one period
    late, and the own part of the next one, 1/R of the own delta, takes its outer step at once.
    """
    share = {"own_share": 1 / eager, "own_step": True} if eager else {}
    outer = outer_step(lr, momentum, momentum_warmup, **share)
    schedule = SyncSchedule(period, delay=period if eager else 0)
    channel = Channel(
        "delta", "delta", schedule, codec=Codec(value_dtype=value_dtype), applier=outer
    )
    return ExchangeConfig("diloco", (channel,), inner_optimizers=ADAPTIVE, lr=4e-4, clip=1.0)


def streaming_diloco(
    period: int = 100,
    lr: float = 0.4,
    momentum: float = 0.9,
    layers: int = 3,
    order: str = "strided",
    delay: int = 5,
    mix: float = 0.5,
    value_dtype: str = "fp4_e3m0",
    momentum_warmup: int = WARMUP,
) -> ExchangeConfig:
    """Streaming DiLoCo (Douillard et al., arXiv 2501.18512): DiLoCo by fragments of layers, in 4
    bits, while training goes on.

    Every fragment of `layers` layers has its own offset within the period, so the peak is one
    fragment; its mean is applied `delay` steps later and mixed with the local parameters (`mix` of
    those is kept). Published: inner AdamW 4e-4, outer 0.4 / 0.9, fragments of 3 layers, strided,
    period 30 for parity and 100 for few bytes, delay up to 5 steps, mix 0.5, E3M0 values. Ours:
    `momentum_warmup`, as in `diloco`. `layers` 0: no fragments.

    A fragment with offset t is first exchanged after `period` + t steps, as in the paper's example
    (torchft: after t). So a first round lasts up to two periods, and a run shorter than that
    exchanges some fragments in `finish()` only.
    """
    channel = Channel(
        "delta",
        "delta",
        SyncSchedule(period, delay=delay),
        codec=Codec(value_dtype=value_dtype),
        applier=outer_step(lr, momentum, momentum_warmup, mix=mix),
        fragments=Fragments(layers, order) if layers else None,
    )
    return ExchangeConfig(
        "streaming_diloco", (channel,), inner_optimizers=ADAPTIVE, lr=4e-4, clip=1.0
    )


# ---- Pseudo-gradients of Muon, whole, in few bits ------------------------------------------------


def muloco(
    period: int = 30,
    lr: float = 0.8,
    momentum: float = 0.9,
    beta: float = 0.9,
    value_dtype: str = "2bit",
    momentum_warmup: int | None = None,
    released: bool = False,
) -> ExchangeConfig:
    """MuLoCo (Therien et al., arXiv 2505.23725): DiLoCo with Muon inside, whose pseudo-gradients
    bear 2 or 4 bits with error feedback.

    Inner Muon for matrices, AdamW for embeddings, heads and vectors: `base_optimizer(config,
    model.named_parameters())` makes one combined optimizer, `attach([muon, adamw], ...)` takes two.
    Published numbers: Muon lr 0.0224, momentum 0.9, weight decay 1e-4; outer Nesterov 0.8 / 0.9,
    period 30, feedback decay `beta` 0.9; 2 or 4 bits, or no feedback in full precision
    (`value_dtype` "fp32").

    released True is what the authors' code does with these numbers: its feedback sums `lr` times
    the pseudo-gradient and the outer step multiplies by `lr` again, so that 0.8 steps by 0.64
    (without feedback by 0.8); and the outer momentum is constant. Its inner optimizer is
    `base_optimizer(config, named, **fsdp_demo.hosts.muon.RELEASED)`. Ours, False: the outer step is
    0.8, with Muon's Nesterov, torch's rate factor, betas of AdamW 0.9 / 0.95, and an outer momentum
    that rises over `momentum_warmup` rounds (20, as in `diloco`). Which of the two the paper's
    equations mean is not known here.

    In both "2bit" is a code of ours: a sign and two levels for each 256 values. The released one
    has four bins over mean +- 3 sigma of a tensor or row, with a table of the bins' means. What
    either loses stays in the feedback.
    """
    codec = Codec(value_dtype=value_dtype)
    feedback = not codec.format.exact
    warmup = momentum_warmup if momentum_warmup is not None else 0 if released else WARMUP
    channel = Channel(
        "delta",
        "delta",
        SyncSchedule(period),
        Accumulator(beta=beta, gain=lr if released else 1.0) if feedback else None,
        codec,
        feedback="subtract" if feedback else "none",
        applier=outer_step(lr, momentum, warmup),
    )
    return ExchangeConfig(
        "muloco", (channel,), inner_optimizers=("muonadamw", "muon", "adamw"), lr=0.0224, clip=1.0
    )


def sign_muloco(
    period: int = 24,
    lr: float = 0.8,
    momentum: float = 0.5,
    beta: float = 0.9,
    value_dtype: str = "1bit",
    momentum_warmup: int = 0,
) -> ExchangeConfig:
    """Ours, the rule of `muloco`: pseudo-gradients of Muon in one bit.

    A replica sends its whole delta as signs, with one scale for each 4096 values, every `period`
    steps. What that leaves stays in its feedback, which decays by `beta`. The anchor takes a
    Nesterov step with the mean, of rate `lr` and a constant `momentum`. The inner optimizer is
    Muon, with AdamW for embeddings, heads and vectors; AdamW alone is refused, and fits badly.

    Where the numbers come from: benchmarks/results/study-muon.md, on 0.49 M parameters with an
    inner Muon at 3.2e-2. Runs of a few hundred steps end lower in short rounds with a short memory:
    `period=5, beta=0.6`, and Muon at 4.5e-2. Nobody has trained a large model with it.
    """
    made = muloco(period, lr, momentum, beta, value_dtype, momentum_warmup)
    return replace(made, preset="sign_muloco", lr=0.032)
