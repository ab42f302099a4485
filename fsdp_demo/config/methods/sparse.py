"""Sparse pseudo-gradients: of each block only the largest values are sent."""

from __future__ import annotations

from dataclasses import replace

from ..channel import EMBEDDINGS, Channel, Phase
from ..parsing import one_of
from ..parts import Accumulator, Applier, Codec, Reducer, SyncSchedule
from ..schema import ExchangeConfig
from .averages import averaged
from .diloco import ADAPTIVE, outer_step


def decoupled_momentum(
    rule: str = "consensus",
    period: int = 128,
    topk: int = 32,
    beta: float = 0.95,
    lr: float | None = None,
    reducer: str | None = None,
    value_dtype: str = "int8",
    transform: bool = False,
    average_every: int = 0,
) -> ExchangeConfig:
    """Decoupled momentum (Nedelkoski et al., arXiv 2510.03371): the outer momentum travels as its
    largest coefficients.

    rule "consensus" (default): what is sent is averaged (over senders) and applied to the anchor
    with lr 1, what is not sent stays in the local momentum; replicas are equal after every
    exchange. rule "released", as in the authors' code: each replica applies its own delta plus beta
    times the momentum, into which the mean went back, with lr 0.7; replicas drift. Its reducer
    "replicas" (default) conserves the sum of the momenta, "senders" (as released) inflates it by up
    to R / |senders| at each exchange; `average_every` = J averages the parameters after every J-th
    exchange and logs the drift. `lr` is the outer rate of all tensors, also of those that are sent
    whole (`applier.dense_lr` changes theirs alone). Published: inner AdamW 4e-4, betas 0.9 / 0.95,
    period 128, k = 32 of 4096, beta 0.95, and the DCT: `transform` True. It is off by default,
    since on deltas it was worth nothing and cost much on attention matrices
    (benchmarks/results/study.md).
    """
    one_of("rule", rule, ("consensus", "released"))
    released = rule == "released"
    if average_every and not released:
        raise ValueError(
            f"average_every={average_every} is for rule='released': under rule={rule!r} replicas "
            "are equal after every exchange"
        )
    rate = lr if lr is not None else (0.7 if released else 1.0)
    channel = Channel(
        "delta",
        "delta",
        SyncSchedule(period),
        Accumulator(beta=beta),
        Codec("dct" if transform else "none", "topk", topk, value_dtype),
        feedback="put_back" if released else "subtract",
        reducer=Reducer(reducer or ("replicas" if released else "senders")),
        applier=Applier("outer_step", lr=rate, dense_lr=rate, local_delta=released),
        no_transform=EMBEDDINGS,
    )
    average = (
        (averaged("average", "parameter", period * average_every, "fp32", after="delta"),)
        if average_every
        else ()
    )
    return ExchangeConfig(
        "decoupled_momentum", (channel, *average), inner_optimizers=ADAPTIVE, lr=4e-4, clip=1.0
    )


def sparse_loco(
    period: int = 30,
    topk: int = 64,
    beta: float = 0.95,
    lr: float = 1.0,
    value_dtype: str = "2bit",
    median_clip: bool = True,
) -> ExchangeConfig:
    """SparseLoCo (Sarfi et al., arXiv 2508.15706): error feedback on the pseudo-gradient, its
    largest values in 2 bits.

    No transform and no outer momentum: the decayed feedback is the momentum. Published: inner
    AdamW, period 15 to 250 (30), k = 64 of 4096, beta 0.95, outer lr 1.0 (0.65 late in
    Covenant-72B's run). Tensors that are sent whole step with `applier.dense_lr`, 1.0.

    `median_clip` guards against outliers: it scales down what a replica sent to the median norm of
    all. Ours does so per block of 4096, with the mean of the middle two norms of an even number;
    the released code per tensor, with the lower of the two (of two replicas it cuts the larger to
    the smaller). The mean divides by the replicas that sent a value, as the released code;
    Covenant's text divides by all: `reducer.mean_over="replicas"`. Ours, too: blocks of 4096 values
    in a row (released: 64 x 64), the 2-bit code (`muloco`), the outer rate outside the feedback.
    """
    channel = Channel(
        "delta",
        "delta",
        SyncSchedule(period),
        Accumulator(beta=beta),
        Codec("none", "topk", topk, value_dtype),
        feedback="subtract",
        reducer=Reducer("senders", clip="median_norm" if median_clip else "none"),
        applier=Applier("outer_step", lr=lr),
    )
    return ExchangeConfig("sparse_loco", (channel,), inner_optimizers=ADAPTIVE, lr=4e-4, clip=1.0)


def sign_loco(
    period: int = 5,
    topk: int = 90,
    beta: float = 0.0,
    lr: float = 0.7,
    momentum: float = 0.6,
    momentum_warmup: int = 48,
    value_dtype: str = "1bit",
    switch: float = 0.25,
    late_lr: float = 1.5,
    late_topk: int | None = None,
) -> ExchangeConfig:
    """Ours, from no paper: the largest values of the pseudo-gradient in one bit, and an outer
    momentum over the mean of what was sent.

    Of each 4096 values of its delta a replica sends the `topk` largest as signs with one scale, the
    mean of their magnitudes, every `period` steps. The mean goes over the replicas that sent a
    value. The anchor takes a Nesterov step with it, of rate `lr`. So the momentum is shared and
    costs no byte. What is not sent is dropped. With `beta` a replica keeps it: it adds its delta to
    `beta` times what earlier exchanges left over, and subtracts what it sends. Tensors that are
    sent whole step with `lr` too. With more than four replicas set `topk` to 360 over their number.

    The outer momentum rises from 0 over the first `momentum_warmup` rounds. The rule says the first
    half of the rounds: set it to steps / (2 period). 48 is that of the 480 steps it was tried on.

    After `switch` (a share of the run, or a number of steps; 0: never) comes a second phase: from
    there on nothing that is not sent is forgotten (`beta` 1), the mean goes over all replicas, and
    the anchor takes plain steps of rate `late_lr`, without momentum. It sends `late_topk` values
    (default `topk`). A share needs the number of steps at `attach` (`must_match={"steps": N}`; the
    Trainer and the recipes give it), else the first phase stays for the whole run, and a warning
    says so.

    Where the numbers come from: benchmarks/results/study.md and study-robust.md, four replicas with
    an inner AdamW. In runs of 1920 steps of 0.49 M parameters it ended 0.5 % above the all-reduce
    (eight seeds), and without a second phase 3.4 % above (four).
    """
    channel = Channel(
        "delta",
        "delta",
        SyncSchedule(period),
        Accumulator(beta=beta) if beta else None,
        Codec("none", "topk", topk, value_dtype),
        feedback="subtract" if beta else "none",
        reducer=Reducer("senders"),
        applier=outer_step(lr, momentum, momentum_warmup, dense_lr=lr),
    )
    if switch:
        late = Phase(
            switch,
            Accumulator(beta=1.0),
            replace(channel.codec, topk=topk if late_topk is None else late_topk),
            feedback="subtract",
            applier=outer_step(late_lr, 0.0, 0, dense_lr=late_lr),
        )
        channel = replace(channel, later=(late,))
    return ExchangeConfig("sign_loco", (channel,), inner_optimizers=ADAPTIVE, lr=8e-3, clip=1.0)
