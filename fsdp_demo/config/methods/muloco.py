"""Pseudo-gradients of Muon, whole, in few bits."""

from __future__ import annotations

from dataclasses import replace

from ..channel import Accumulator, Channel, Codec, SyncSchedule
from ..schema import ExchangeConfig
from .diloco import WARMUP, outer_step


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
    0.8, with Muon's Nesterov, torch's rate factor, AdamW at 4e-4, and an outer momentum that rises
    over `momentum_warmup` rounds (20, as in `diloco`). Which of the two the paper's equations mean
    is not known here.

    In both "2bit" is a code of ours: a sign and two levels for each 256 values. The released one
    has four bins over mean +- 3 sigma of a tensor or row, with a table of the bins' means. What
    either loses stays in the feedback.

    `sign_muloco` has the settings that did best in our study (docs/measured/study.md).
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
    period: int = 5,
    lr: float = 0.8,
    momentum: float = 0.5,
    beta: float = 0.6,
    value_dtype: str = "1bit",
    momentum_warmup: int = 0,
) -> ExchangeConfig:
    """Ours, the rule of `muloco`: pseudo-gradients of Muon in one bit, in short rounds with short
    memory.

    A replica sends its whole delta as signs, with one scale for each 4096 values, every `period`
    steps. What that leaves stays in its feedback, which decays by `beta`. The anchor takes a
    Nesterov step with the mean, of rate `lr` and a constant `momentum`. The inner optimizer is
    Muon, with AdamW for embeddings, heads and vectors; AdamW alone is refused, and fits badly.

    Where the numbers come from: docs/measured/study.md, on 0.49 M parameters with an inner Muon at
    4.5e-2, eight seeds. It ended below the all-reduce with AdamW there, a little above the one with
    Muon, with 40 times fewer bytes. Nobody has trained a large model with it.
    """
    made = muloco(period, lr, momentum, beta, value_dtype, momentum_warmup)
    return replace(made, preset="sign_muloco", lr=0.045)
