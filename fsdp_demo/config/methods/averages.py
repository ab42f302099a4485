"""Gradients, parameters or optimizer states are averaged, whole: the baselines, and DES-LOC."""

from __future__ import annotations

from dataclasses import replace

from ..channel import EMBEDDINGS, Channel
from ..parts import Applier, Codec, SyncSchedule
from ..schema import ExchangeConfig


def full(value_dtype: str = "fp32") -> ExchangeConfig:
    """Mean gradient of all replicas at every step (what HSDP does): the baseline, and the oracle of
    the rest.

    Any inner optimizer; its learning rate is the one of the global batch. `value_dtype` "bf16"
    sends what HSDP does with a bf16 reduce dtype (the sum is in fp32 here).
    """
    return ExchangeConfig(
        "full", (Channel("gradient", "gradient", codec=Codec(value_dtype=value_dtype)),)
    )


def local_sgd(period: int = 16, value_dtype: str = "fp32") -> ExchangeConfig:
    """Local SGD, FedAvg (Stich, arXiv 1805.09767; McMahan et al., arXiv 1602.05629): parameters are
    averaged every `period` steps.

    Any inner optimizer; its state stays local. Published: periods of 2 to 64 steps with SGD, and
    the learning rate of a single worker; Post-local SGD (1808.07217) uses 16. In bf16 the mean
    itself is rounded: keep fp32 for parameters.
    """
    return ExchangeConfig(
        "local_sgd", (averaged("parameter", "parameter", period, value_dtype),), clip=1.0
    )


def sel_sync(
    check_every: int = 8,
    delta: float = 0.3,
    window: int = 25,
    at_most: int = 256,
    value_dtype: str = "fp32",
) -> ExchangeConfig:
    """SelSync (Tyagi, Swany, arXiv 2307.07950): parameters are averaged where the gradient of any
    island has changed: the sum of the norms of its tensors, smoothed over `window` steps, by
    `delta`, smoothed likewise; and as long as that is not known.

    Any inner optimizer; its state stays local. Published: a check in every step, delta 0.3, window
    25, no bound. Ours: a check costs a round trip, so it comes every `check_every` steps, for the
    largest change since the last; after `at_most` steps it averages in any case; the mean is taken
    after the step, and norms before clipping.
    """
    schedule = SyncSchedule(
        check_every, when="on_change", delta=delta, window=window, at_most=at_most
    )
    channel = averaged("parameter", "parameter", check_every, value_dtype)
    return ExchangeConfig("sel_sync", (replace(channel, schedule=schedule),), clip=1.0)


def local_adam(period: int = 256, value_dtype: str = "fp32") -> ExchangeConfig:
    """Local Adam (the baseline of DES-LOC, arXiv 2505.22549): parameters and both moments are
    averaged every `period` steps.

    Inner AdamW (or Adam), 4e-4 in this family. Three times the bytes of averaging parameters alone,
    for moments that fit them.
    """
    states = {"exp_avg": 1, "exp_avg_sq": 1}
    return ExchangeConfig(
        "local_adam",
        _with_states(period, states, value_dtype),
        inner_optimizers=("adamw", "adam"),
        lr=4e-4,
        clip=1.0,
    )


def desloc(
    period: int = 256,
    states: dict[str, int] | None = None,
    value_dtype: str = "fp32",
    embeddings: bool = False,
    rank: int = 0,
) -> ExchangeConfig:
    """DES-LOC (Iacob et al., arXiv 2505.22549): parameters and each optimizer state are averaged,
    every one on a schedule of its own.

    `states`: name of a state of the optimizer -> its period as a multiple of `period`; the default
    {exp_avg: 3, exp_avg_sq: 6} is the published 1 : 3 : 6 for AdamW (change `period`:
    `schedule.sync_every` would set all to one). For another optimizer name its states (SGD with
    momentum and Muon: {momentum_buffer: 3}), with multiples in proportion to their half-lives
    ln 0.5 / ln beta. Published: period 256 (170 times fewer bytes than all-reduce), ADOPT or AdamW.

    Ours: the states of embeddings and heads stay local, unless `embeddings`. A row of a token that
    one replica has not seen has no second moment there; a first moment averaged more often than the
    second makes it step by lr * m / eps (entries of 700 after 8 steps, seen).

    `rank`: LoRDO (Jovanović et al., arXiv 2602.04396): `LowRankAdamW` inside, whose moments of
    matrices have so many columns. Parameters are averaged as deltas, for the anchor (4 bytes per
    parameter) of which projections are remade.
    """
    chosen = states if states is not None else {"exp_avg": 3, "exp_avg_sq": 6}
    channels = _with_states(period, chosen, value_dtype)
    if not embeddings:
        channels = tuple(replace(c, exclude=EMBEDDINGS) if c.state_name else c for c in channels)
    inner: tuple[str, ...] = ("any",)
    if rank:
        mean = Applier("outer_step", lr=1.0)
        channels = (replace(channels[0], name="delta", source="delta", applier=mean), *channels[1:])
        inner = ("lowrankadamw",)
    return ExchangeConfig("desloc", channels, inner, lr=4e-4, clip=1.0, inner_rank=rank)


def averaged(name: str, source: str, period: int, value_dtype: str, after: str = "") -> Channel:
    """A channel that replaces tensors by their mean, sent whole every `period` steps."""
    return Channel(
        name,
        source,
        SyncSchedule(period),
        codec=Codec(value_dtype=value_dtype),
        applier=Applier("replace"),
        after=after,
    )


def _with_states(period: int, states: dict[str, int], value_dtype: str) -> tuple[Channel, ...]:
    for name, multiple in states.items():
        if multiple < 1:
            raise ValueError(
                f"states[{name!r}]={multiple}: a state's period is a multiple, 1 or more, of "
                f"period={period}"
            )
    moments = [
        averaged(name, f"state:{name}", multiple * period, value_dtype)
        for name, multiple in states.items()
    ]
    return (averaged("parameter", "parameter", period, value_dtype), *moments)
