"""Methods, published ones and two of ours, each a short function that returns an `ExchangeConfig`.
A new paper is a new function here.

Keywords of a function are the numbers its paper talks about; everything else is reached by dotted
paths, as in `preset("demo", **{"codec.value_dtype": "bf16"})`, `--set codec.value_dtype=bf16` or a
yaml file with `preset: demo`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from .channel import Accumulator, Applier, Channel, Codec, Fragments, Reducer, SyncSchedule
from .parsing import one_of
from .patterns import EMBEDDINGS
from .schema import ExchangeConfig

RECOMMENDED = ("sign_muloco", "sign_loco", "muloco", "demo", "diloco", "decoupled_momentum")
"""What to start from; the other presets stand for their papers."""

UNPUBLISHED = {"full": "baseline", "sign_loco": "ours", "sign_muloco": "ours"}
"""Presets that stand for no paper, and what they are."""

WARMUP = 20
"""Rounds over which presets with an outer momentum of 0.9 let it rise; 0 is the published constant
momentum. Measured (docs/study.md): constant over 24 rounds ended worse than one replica alone,
a rise over 12 to 24 of them close to the mean gradient at every step. `diloco` was not measured in
longer runs; for `sign_loco` rounds decide, not the share of the run."""

ADAPTIVE = ("adamw", "adam", "muon", "muonadamw")


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
        "local_sgd", (_averaged("parameter", "parameter", period, value_dtype),), clip=1.0
    )


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
) -> ExchangeConfig:
    """DES-LOC (Iacob et al., arXiv 2505.22549): parameters and each optimizer state are averaged,
    every one on a schedule of its own.

    `states`: name of a state of the optimizer -> its period as a multiple of `period`; the default
    {exp_avg: 3, exp_avg_sq: 6} is the published 1 : 3 : 6 for AdamW (change `period`:
    `schedule.sync_every` would set all to one). For another optimizer name its states (SGD with
    momentum and Muon: {momentum_buffer: 3}); `half_life_multiples` derives multiples from decay
    rates. Published: period 256 (170 times fewer bytes than all-reduce), ADOPT or AdamW.

    Ours: the states of embeddings and heads stay local, unless `embeddings`. A row of a token that
    one replica has not seen has no second moment there; a first moment averaged more often than the
    second makes it step by lr * m / eps (entries of 700 after 8 steps, seen).
    """
    chosen = states if states is not None else {"exp_avg": 3, "exp_avg_sq": 6}
    channels = _with_states(period, chosen, value_dtype)
    if not embeddings:
        channels = tuple(replace(c, exclude=EMBEDDINGS) if c.state_name else c for c in channels)
    return ExchangeConfig("desloc", channels, lr=4e-4, clip=1.0)


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
    did harm in runs of few rounds (docs/study.md), perhaps by its gain lr (1 + momentum / (1 -
    momentum)) = 7. To compare with a paper set it to 0: at period 500 the rise takes 10 000 steps.
    """
    outer = Applier(
        "outer_step",
        lr=lr,
        momentum=momentum,
        nesterov=momentum > 0,
        momentum_warmup=momentum_warmup,
    )
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
        applier=Applier(
            "outer_step",
            lr=lr,
            momentum=momentum,
            nesterov=momentum > 0,
            mix=mix,
            momentum_warmup=momentum_warmup,
        ),
        fragments=Fragments(layers, order) if layers else None,
    )
    return ExchangeConfig(
        "streaming_diloco", (channel,), inner_optimizers=ADAPTIVE, lr=4e-4, clip=1.0
    )


def demo(
    topk: int = 32,
    beta: float = 0.999,
    value_dtype: str = "int8",
    sign: bool | None = None,
    transform: bool = True,
    version: int = 1,
    alpha: float | None = None,
    inner_optimizer: str = "sgd",
    lr_inside: bool = False,
) -> ExchangeConfig:
    """DeMo, "Decoupled Momentum Optimization" (Peng, Quesnelle, Kingma; arXiv 2411.19870), with
    FlexDeMo's sharding.

    Every step the gradient joins a momentum of decay `beta`; the `topk` largest DCT coefficients of
    each 64 x 64 block are sent and leave the momentum; the sign of the decoded mean is the gradient
    of plain SGD. Published: lr 4e-4 at 300M to 1B, beta 0.999, k = 32, no weight decay, warm-up and
    cosine, and the transform on all tensors.

    lr_inside True is the released form: the momentum sums the learning rate (of that step, of the
    parameter's group) times the gradient. Ours, False, sums the gradient. With sign and a constant
    rate both are the same. Under a schedule they part: in the released form gradients of a warm-up
    weigh little, and those of a falling rate ever less. Without sign the rate would act twice.

    version 2 (the paper's second version): momentum normalised by 1 - beta, only `alpha` = 0.2 of
    what was sent leaves it, no sign; the learning rate is then one of SGD with momentum, for which
    none is published. inner_optimizer "adamw" is FlexDeMo's AdamW form (arXiv 2502.06728): the
    decoded mean, without sign unless asked for, is AdamW's gradient.
    """
    if version not in (1, 2):
        raise ValueError(
            f"version={version} is not known: allowed are 1 (sign, as released) and 2 (normalised, "
            "alpha, no sign)"
        )
    second = version == 2
    kept = Accumulator(
        beta=beta,
        gain=1.0 - beta if second and beta < 1 else 1.0,
        alpha=alpha if alpha is not None else 0.2 if second else 1.0,
        rate=lr_inside,
    )
    codec = Codec("dct" if transform else "none", "topk", topk, value_dtype)
    signed = sign if sign is not None else inner_optimizer != "adamw" and not second
    return _gradient_method("demo", kept, codec, "senders", signed, inner_optimizer)


def random(
    topk: int = 128,
    beta: float = 0.95,
    value_dtype: str = "fp32",
    sign: bool | None = None,
    transform: bool = False,
    inner_optimizer: str = "sgd",
) -> ExchangeConfig:
    """FlexDeMo's Random replicator (From et al., arXiv 2502.06728): as DeMo, but `topk` of 4096 at
    positions drawn from a shared seed.

    No indices travel, and the values are reduced: bytes do not grow with the number of islands.
    Every coefficient is sent once in a pass of 4096 / topk steps. Published: rates 1/2 to 1/32
    (`topk` 128 is 1/32), beta 0.999, sign, fp32 values. Ours: beta 0.95. The published one lost
    0.16 nats per byte in our study, two seeds (docs/study.md, "Published forms").
    """
    return _seeded("random", topk, beta, value_dtype, sign, transform, inner_optimizer)


def stride(
    topk: int = 128,
    beta: float = 0.95,
    value_dtype: str = "fp32",
    sign: bool | None = None,
    transform: bool = False,
    inner_optimizer: str = "sgd",
) -> ExchangeConfig:
    """FlexDeMo's Striding replicator (arXiv 2502.06728): as `random`, at every (4096 / topk)-th
    position, moving on by one each step.

    The released code never moves on where the stride divides the size and so sends the same
    coefficients for ever; here a pass visits all. Ours: beta 0.95, as in `random`.
    """
    return _seeded("stride", topk, beta, value_dtype, sign, transform, inner_optimizer)


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
    since on deltas it was worth nothing and cost much on attention matrices (docs/study.md).
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
        (_averaged("average", "parameter", period * average_every, "fp32", after="delta"),)
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
    Covenant's text divides by all: `reducer.mean_over="replicas"`. Further apart from it: blocks
    are 4096 values in a row (released: 64 x 64), the 2-bit code is ours (`muloco` says how), and
    the outer rate is not inside the feedback (released: lr times lr, the same at 1.0).
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
) -> ExchangeConfig:
    """Ours, from no paper: the largest values of the pseudo-gradient in one bit, and an outer
    momentum over the mean of what was sent.

    Of each 4096 values of its delta a replica sends the `topk` largest as signs with one scale, the
    mean of their magnitudes, every `period` steps. The mean goes over the replicas that sent a
    value. The anchor takes a Nesterov step with it, of rate `lr`. So the momentum is shared and
    costs no byte. What is not sent is dropped. With `beta` a replica keeps it: it adds its delta to
    `beta` times what earlier exchanges left over, and subtracts what it sends. Tensors that are
    sent whole step with `lr` too.

    With more than four replicas set `topk` to 360 over their number: eight and sixteen did as well
    so as with 90 each, with fewer bytes.

    The outer momentum rises from 0 over the first `momentum_warmup` rounds. The rule says the first
    half of the rounds: set it to steps / (2 period). 48 is that of the 480 steps it was tried on.

    Where the numbers come from: docs/study.md, on 0.49 M parameters with an inner
    AdamW at 8e-3, eight seeds. It is for short runs of small models: beside the all-reduce it ended
    level there, 3 % above at 0.92 M parameters, 8 % above at 3.3 M. The other setting that did well
    is `beta` 0.6, `momentum` 0.5 and an inner AdamW at 4e-3.
    """
    channel = Channel(
        "delta",
        "delta",
        SyncSchedule(period),
        Accumulator(beta=beta) if beta else None,
        Codec("none", "topk", topk, value_dtype),
        feedback="subtract" if beta else "none",
        reducer=Reducer("senders"),
        applier=Applier(
            "outer_step",
            lr=lr,
            dense_lr=lr,
            momentum=momentum,
            nesterov=momentum > 0,
            momentum_warmup=momentum_warmup,
        ),
    )
    return ExchangeConfig("sign_loco", (channel,), inner_optimizers=ADAPTIVE, lr=8e-3, clip=1.0)


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

    `sign_muloco` has the settings that did best in our study (docs/study.md).
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
        applier=Applier(
            "outer_step", lr=lr, momentum=momentum, nesterov=momentum > 0, momentum_warmup=warmup
        ),
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

    Where the numbers come from: docs/study.md, on 0.49 M parameters with an inner Muon at 4.5e-2,
    eight seeds. It ended below the all-reduce with AdamW there, a little above the one with Muon,
    with 40 times fewer bytes. Nobody has trained a large model with it.
    """
    made = muloco(period, lr, momentum, beta, value_dtype, momentum_warmup)
    return replace(made, preset="sign_muloco", lr=0.045)


def half_life_multiples(betas: dict[str, float], fastest: int = 3) -> dict[str, int]:
    """Multiples for `desloc` in proportion to the half-lives ln 0.5 / ln beta of the states; the
    fastest one gets `fastest`.

    Raises:
        ValueError: a decay rate that is not between 0 and 1.

    Example:
        >>> from fsdp_demo import half_life_multiples
        >>> half_life_multiples({"exp_avg": 0.9, "exp_avg_sq": 0.95})
        {'exp_avg': 3, 'exp_avg_sq': 6}
    """
    for name, beta in betas.items():
        if not 0 < beta < 1:
            raise ValueError(f"decay rate of {name!r} is {beta}: allowed is 0 < beta < 1")
    lives = {name: math.log(0.5) / math.log(beta) for name, beta in betas.items()}
    shortest = min(lives.values(), default=1.0)
    return {name: max(1, round(fastest * life / shortest)) for name, life in lives.items()}


def _averaged(name: str, source: str, period: int, value_dtype: str, after: str = "") -> Channel:
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
        _averaged(name, f"state:{name}", multiple * period, value_dtype)
        for name, multiple in states.items()
    ]
    return (_averaged("parameter", "parameter", period, value_dtype), *moments)


def _seeded(
    select: str,
    topk: int,
    beta: float,
    value_dtype: str,
    sign: bool | None,
    transform: bool,
    inner_optimizer: str,
) -> ExchangeConfig:
    codec = Codec("dct" if transform else "none", select, topk, value_dtype)
    return _gradient_method(
        select,
        Accumulator(beta=beta),
        codec,
        "replicas",
        sign if sign is not None else inner_optimizer != "adamw",
        inner_optimizer,
    )


def _gradient_method(
    name: str, kept: Accumulator, codec: Codec, reducer: str, sign: bool, inner_optimizer: str
) -> ExchangeConfig:
    """DeMo and its relatives: a momentum of gradients, a part of which is exchanged at every step
    and leaves it.
    """
    one_of("inner_optimizer", inner_optimizer, ("sgd", "adamw", "as_is"))
    channel = Channel(
        "momentum",
        "gradient",
        accumulator=kept,
        codec=codec,
        feedback="subtract",
        reducer=Reducer(reducer),
        applier=Applier("gradient", sign=sign),
    )
    # without a sign SGD's step has the scale of the gradient
    lr = 1e-3 if inner_optimizer == "adamw" else 4e-4 if sign else None
    return ExchangeConfig(name, (channel,), inner_optimizers=(inner_optimizer,), lr=lr, clip=1.0)


_PRESETS: tuple[Callable[..., ExchangeConfig], ...] = (
    full,
    local_sgd,
    local_adam,
    desloc,
    diloco,
    streaming_diloco,
    demo,
    random,
    stride,
    decoupled_momentum,
    sparse_loco,
    sign_loco,
    muloco,
    sign_muloco,
)


def presets() -> dict[str, Callable[..., ExchangeConfig]]:
    """Name -> function of every preset; the first line of its docstring says what it is.

    Example:
        >>> from fsdp_demo import presets
        >>> "demo" in presets()
        True
    """
    return {f.__name__: f for f in _PRESETS}
