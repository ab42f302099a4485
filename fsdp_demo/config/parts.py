"""The parts of a channel: when it acts, what it keeps, how its source becomes bytes, how the bytes
of all replicas become one mean, and how that is applied. Plain data; nothing here touches tensors.

A wrong value is refused when it is read, with the field, the value found and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .names import APPLIERS, FORMATS, SELECTIONS, TRANSFORMS, Acts, Format, Selection
from .parsing import in_range, one_of

NEVER = 1 << 30
"""A period that no run reaches: of a channel that keeps what it covers as it is (`auto.py`)."""

BLOCK = 4096  # elements of one block: 64 x 64, or 4096 consecutive elements of a flat fragment

CODES = tuple(FORMATS)
PRECISIONS = ("fp32", "bf16")
MEANS_OVER = ("replicas", "senders")
WEIGHTS = ("equal", "tokens")
REDUCER_CLIPS = ("none", "median_norm")
ORDERS = ("strided", "sequential")


def about(text: str) -> dict[str, str]:
    """What a key does, as metadata of its field: `reference.py` puts it into the page of all keys,
    markdown.
    """
    return {"about": text}


@dataclass(frozen=True)
class SyncSchedule:
    """When a channel acts: a pure function of the job's step t = 0, 1, 2, ...

    Attributes:
        sync_every: optimizer steps from one exchange to the next (DiLoCo's H, torchft's
            sync_every).
        offset: steps by which the first exchange is late (torchft's fragment_sync_offset).
        delay: steps between the start of an exchange and its effect (torchft's
            fragment_sync_delay).

    Example:
        >>> from fsdp_demo import SyncSchedule
        >>> [t for t in range(10) if SyncSchedule(sync_every=4).due(t)]
        [3, 7]
    """

    sync_every: int = 1
    offset: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        in_range("schedule.sync_every", self.sync_every, 1)
        in_range("schedule.offset", self.offset, 0, self.sync_every - 1)
        in_range("schedule.delay", self.delay, 0)

    def due(self, step: int) -> bool:
        """Whether an exchange starts at `step`; it is applied at `step + delay`."""
        return step + 1 > self.offset and (step + 1 - self.offset) % self.sync_every == 0

    def round(self, step: int) -> int:
        """Number, from 1, of the exchange that starts at `step` (0 before the first)."""
        return max(step + 1 - self.offset, 0) // self.sync_every

    @property
    def in_flight(self) -> int:
        """The largest number of payloads that are under way at once."""
        return self.delay // self.sync_every + 1


@dataclass(frozen=True)
class Accumulator:
    """What a channel keeps between exchanges: a = beta * a + gain * T(source); `alpha` of what was
    sent is subtracted.

    rate: of a gradient, the gain is multiplied by the learning rate that its parameter has at that
    step.

    Example:
        >>> from fsdp_demo import Accumulator, preset
        >>> preset("demo").channels[0].accumulator == Accumulator(beta=0.999)
        True
    """

    beta: float = field(
        default=0.0, metadata=about("decay of what is kept, at every step of the source")
    )
    gain: float = field(default=1.0, metadata=about("factor of the source when it is added"))
    alpha: float = field(
        default=1.0, metadata=about("share of what was sent that leaves the accumulator")
    )
    rate: bool = field(
        default=False,
        metadata=about(
            "the gain is multiplied by the learning rate that the parameter has at that step; "
            "gradients only"
        ),
    )

    def __post_init__(self) -> None:
        in_range("accumulator.beta", self.beta, 0.0, 1.0)
        in_range("accumulator.alpha", self.alpha, 0.0, 1.0)
        if not self.gain > 0:
            raise ValueError(f"accumulator.gain={self.gain} is out of range: allowed is gain > 0")


@dataclass(frozen=True)
class Codec:
    """How the source becomes bytes: transform, selection of `topk` coefficients of each block of
    4096, number format of the values (`value_dtype`).

    select "topk" takes the largest, whose positions travel with them; "random" and "stride"
    (FlexDeMo) take `topk` of each block at positions that all replicas compute from the step
    (`compression/selection.py`), so only values travel and they can be summed on the way. select
    "dense" sends everything. transform_precision "bf16" lets the transform multiply in bf16 (CUDA:
    TF32): faster, nearly the same choice. What is sent is still exactly what is subtracted.

    Example:
        >>> from fsdp_demo import Codec
        >>> Codec(transform="dct", select="topk", topk=16, value_dtype="int8").sparse
        True
    """

    transform: str = field(default="none", metadata=about("orthonormal transform of each block"))
    select: str = field(
        default="dense",
        metadata=about(
            "`dense`: everything; `topk`: the largest of each block, whose positions travel "
            "along; `random`, `stride`: positions that all islands compute from the step"
        ),
    )
    topk: int = field(
        default=32,
        metadata=about(
            "values of each block of 4096 that are sent; refused where everything is. Small "
            "tensors [go whole](#what-goes-whole)"
        ),
    )
    value_dtype: str = field(
        default="fp32", metadata=about("[number format](wire-format.md#formats) of the values")
    )
    transform_precision: str = field(
        default="fp32",
        metadata=about(
            "bf16: the transform multiplies in bf16 (CUDA: TF32): faster, nearly the same choice"
        ),
    )

    def __post_init__(self) -> None:
        one_of("codec.transform", self.transform, TRANSFORMS)
        one_of("codec.select", self.select, tuple(SELECTIONS))
        one_of("codec.value_dtype", self.value_dtype, tuple(FORMATS))
        one_of("codec.transform_precision", self.transform_precision, PRECISIONS)
        if self.transform_precision != "fp32" and self.transform == "none":
            raise ValueError(
                f"codec.transform_precision={self.transform_precision!r} is about the transform, "
                "which is 'none': leave it 'fp32'"
            )
        if not 1 <= self.topk <= BLOCK:
            raise ValueError(
                f"codec.topk={self.topk} is out of range: a block has {BLOCK} elements, allowed is "
                f"1 <= topk <= {BLOCK}"
            )
        if self.transform != "none" and self.select == "dense":
            raise ValueError(
                f"codec.transform={self.transform!r} with codec.select='dense' has no effect, "
                "since nothing is dropped: "
                "use transform='none', or select='topk'"
            )

    @property
    def format(self) -> Format:
        """Bits, groups and scales of the values."""
        return FORMATS[self.value_dtype]

    @property
    def selection(self) -> Selection:
        """Who chooses what is sent."""
        return SELECTIONS[self.select]

    @property
    def sparse(self) -> bool:
        """True if only a part of each block is sent."""
        return self.selection.by != "nobody"

    @property
    def indexed(self) -> bool:
        """True if positions are chosen by the data, so that indices travel and payloads cannot be
        summed on the way.
        """
        return self.selection.by == "data"

    @property
    def seeded(self) -> bool:
        """True if positions follow from the step alone."""
        return self.selection.by == "step"


@dataclass(frozen=True)
class Reducer:
    """How R decoded payloads become one: the mean over all replicas, or over those that sent a
    position.

    weight "tokens" weighs each island by the tokens it saw since the last exchange
    (`Exchange.report(tokens=...)`). A message has one weight: with several channels in it, the
    tokens since the oldest of their last exchanges. clip "median_norm" scales what a replica sent
    for a block down to the median over the replicas of the norms of that block (SparseLoCo's code).

    Example:
        >>> from fsdp_demo import preset
        >>> preset("diloco", **{"reducer.weight": "tokens"}).channels[0].reducer.weight
        'tokens'
    """

    mean_over: str = field(
        default="replicas",
        metadata=about(
            "the mean goes over all islands, or over those that sent a value at that position"
        ),
    )
    weight: str = field(
        default="equal",
        metadata=about(
            "`equal`, or by the tokens that an island saw since its last exchange "
            "(`exchange.report(tokens=...)`). A message has one weight, for all its channels: "
            "since the oldest of their last exchanges"
        ),
    )
    clip: str = field(
        default="none",
        metadata=about(
            "`median_norm`: what an island sent for a block is scaled down to the median of "
            "the islands' norms"
        ),
    )

    def __post_init__(self) -> None:
        one_of("reducer.mean_over", self.mean_over, MEANS_OVER)
        one_of("reducer.weight", self.weight, WEIGHTS)
        one_of("reducer.clip", self.clip, REDUCER_CLIPS)


@dataclass(frozen=True)
class Applier:
    """How the decoded mean acts.

    * gradient: the mean becomes the gradient of the base optimizer; with `sign` its sign does.
    * outer_step: a step of SGD (momentum, nesterov) with rate `lr` on the anchor. Whole (dense)
      tensors of a sparse channel use `dense_lr`. `local_delta` applies the replica's own delta and
      only `beta` times the accumulator of the exchange (the released rule of 2510.03371). `mix`
      keeps that share of the local parameters (alpha of Streaming DiLoCo, torchft's
      fragment_update_alpha). `keep_steps` keeps the steps taken since the last send, where a delay
      would undo them. `own_share` is the share of an own delta in flight that the parameters keep
      when the mean before it lands: 1/R makes the eager updates of 2502.12996 where the outer step
      has rate 1 and no momentum (the paper's own share takes the outer step, too).
      `momentum_warmup` lets the momentum rise linearly from 0 over that many rounds.
    * replace: the source becomes the mean.

    Example:
        >>> from fsdp_demo import Applier
        >>> Applier("outer_step", lr=0.7, momentum=0.9, nesterov=True).acts_as
        'outer_step'
    """

    acts_as: str = field(
        default="gradient",
        metadata=about(
            "`gradient`: the mean becomes the gradient of your optimizer; `outer_step`: a "
            "step of SGD on the anchor; `replace`: parameters or state become the mean"
        ),
    )
    lr: float = field(default=1.0, metadata=about("rate of the outer step"))
    dense_lr: float = field(
        default=1.0, metadata=about("the same for tensors that a sparse channel sends whole")
    )
    momentum: float = field(default=0.0, metadata=about("momentum of the outer step"))
    nesterov: bool = field(default=False, metadata=about("the momentum is Nesterov's"))
    local_delta: bool = field(
        default=False,
        metadata=about(
            "each island applies its own delta in full, and the mean through the momentum "
            "(released rule of 2510.03371)"
        ),
    )
    mix: float = field(
        default=0.0,
        metadata=about(
            "share of the local parameters that stays (alpha of Streaming DiLoCo, torchft's "
            "`fragment_update_alpha`)"
        ),
    )
    sign: bool = field(default=False, metadata=about("the sign of the mean is the gradient"))
    momentum_warmup: int = field(
        default=0, metadata=about("rounds over which the momentum rises from 0; 0: constant")
    )
    keep_steps: bool = field(
        default=False,
        metadata=about(
            "after a delay the local steps since the last send stay; false: they are undone"
        ),
    )
    own_share: float = field(
        default=1.0,
        metadata=about(
            "share of an own delta in flight that the parameters keep when an earlier mean "
            "lands, with a delay of one period up to two; 1/R: eager updates (arXiv "
            "2502.12996) with `lr` 1 and no momentum"
        ),
    )

    def __post_init__(self) -> None:
        one_of("applier.acts_as", self.acts_as, tuple(APPLIERS))
        in_range("applier.lr", self.lr, 0.0)
        in_range("applier.dense_lr", self.dense_lr, 0.0)
        in_range("applier.mix", self.mix, 0.0, 1.0)
        in_range("applier.own_share", self.own_share, 0.0, 1.0)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(
                f"applier.momentum={self.momentum} is out of range: allowed is 0 <= momentum < 1"
            )
        if self.nesterov and self.momentum == 0.0:
            raise ValueError(
                "applier.nesterov=True needs applier.momentum > 0, found 0.0: set a momentum or "
                "drop nesterov"
            )
        in_range("applier.momentum_warmup", self.momentum_warmup, 0)

    @property
    def acts(self) -> Acts:
        """What `acts_as` is for."""
        return APPLIERS[self.acts_as]

    def momentum_in(self, round: int) -> float:
        """The momentum of round 1, 2, ...: the first of a warm-up has none."""
        return (
            self.momentum * min(1.0, max(round - 1, 0) / self.momentum_warmup)
            if self.momentum_warmup
            else self.momentum
        )


@dataclass(frozen=True)
class Fragments:
    """Cuts a channel into fragments of `layers` layers, exchanged one after the other within a
    period (Streaming DiLoCo, 2501.18512).

    Layers are found by the first number in the dotted parameter names. "strided": with P fragments,
    fragment p holds layers p, p + P, p + 2 P, ...; "sequential": consecutive ones. What is in no
    layer (embedding, head, last norm) is the last fragment.

    Example:
        >>> from fsdp_demo import Fragments
        >>> Fragments(layers=3).order
        'strided'
    """

    layers: int = field(
        default=3,
        metadata=about("layers of a fragment, found by the first number in a parameter's name"),
    )
    order: str = field(
        default="strided",
        metadata=about(
            "with P fragments, `strided`: fragment p has the layers p, p + P, p + 2 P, ...; "
            "`sequential`: consecutive ones"
        ),
    )

    def __post_init__(self) -> None:
        in_range("fragments.layers", self.layers, 1)
        one_of("fragments.order", self.order, ORDERS)
