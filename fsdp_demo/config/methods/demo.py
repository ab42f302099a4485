"""DeMo and its relatives: a momentum of gradients, a part of which is exchanged at every step."""

from __future__ import annotations

from ..channel import Channel
from ..parsing import one_of
from ..parts import Accumulator, Applier, Codec, Reducer
from ..schema import ExchangeConfig


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
    signed = False if sign is None and second else sign
    return _gradient_method("demo", kept, codec, signed, inner_optimizer)


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
    0.18 nats per byte in our study, two seeds (benchmarks/results/study.md, "Published forms").
    """
    codec = Codec("dct" if transform else "none", "random", topk, value_dtype)
    return _gradient_method("random", Accumulator(beta=beta), codec, sign, inner_optimizer)


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
    codec = Codec("dct" if transform else "none", "stride", topk, value_dtype)
    return _gradient_method("stride", Accumulator(beta=beta), codec, sign, inner_optimizer)


def _gradient_method(
    name: str, kept: Accumulator, codec: Codec, sign: bool | None, inner_optimizer: str
) -> ExchangeConfig:
    """DeMo and its relatives: a momentum of gradients, a part of which is exchanged at every step
    and leaves it. `sign` None: the sign is taken, but for AdamW.
    """
    one_of("inner_optimizer", inner_optimizer, ("sgd", "adamw", "as_is"))
    signed = inner_optimizer != "adamw" if sign is None else sign
    channel = Channel(
        "momentum",
        "gradient",
        accumulator=kept,
        codec=codec,
        feedback="subtract",
        reducer=Reducer("senders" if codec.indexed else "replicas"),
        applier=Applier("gradient", sign=signed),
    )
    # without a sign SGD's step has the scale of the gradient
    lr = 1e-3 if inner_optimizer == "adamw" else 4e-4 if signed else None
    return ExchangeConfig(name, (channel,), inner_optimizers=(inner_optimizer,), lr=lr, clip=1.0)
