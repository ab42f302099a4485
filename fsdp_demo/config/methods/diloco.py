"""DiLoCo and its relatives: an outer step on the mean of whole pseudo-gradients."""

from __future__ import annotations

from typing import Any

from ..channel import Applier, Channel, Codec, Fragments, SyncSchedule
from ..schema import ExchangeConfig

WARMUP = 20
"""Rounds over which presets with an outer momentum of 0.9 let it rise; 0 is the published constant
momentum. Measured (docs/measured/study.md): constant over 24 rounds ended worse than one replica
alone, a rise over half of them 6 % above the all-reduce. Whether rounds or their share of the run
decide is not known."""

ADAPTIVE = ("adamw", "adam", "muon", "muonadamw")
"""Inner optimizers of methods with an outer step."""


def outer_step(lr: float, momentum: float, momentum_warmup: int, **others: Any) -> Applier:
    """An outer step of rate `lr`, with Nesterov momentum where it has any (DiLoCo, arXiv
    2311.08105); `momentum_warmup` in rounds.
    """
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
) -> ExchangeConfig:
    """DiLoCo (Douillard et al., arXiv 2311.08105): every `period` steps a Nesterov step on the mean
    pseudo-gradient.

    Published: inner AdamW 4e-4, weight decay 0.1; outer 0.7 / 0.9; period 500; payload fp32, and
    fp16 or int8 without loss in later work (OpenDiLoCo, INTELLECT-1). Not published, ours: the
    outer momentum rises over the first `momentum_warmup` rounds (0: constant), since a constant one
    did harm in runs of few rounds (docs/measured/study.md), perhaps by its gain
    lr (1 + momentum / (1 - momentum)) = 7. To compare with a paper set it to 0: at period 500 the
    rise takes 10 000 steps.
    """
    outer = outer_step(lr, momentum, momentum_warmup)
    channel = Channel(
        "delta", "delta", SyncSchedule(period), codec=Codec(value_dtype=value_dtype), applier=outer
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
