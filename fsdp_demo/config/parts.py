"""The parts of a channel: when it acts, what it keeps, how its source becomes bytes, how the bytes
of all replicas become one mean, and how that is applied. Plain data; nothing here touches tensors.

A wrong value is refused when it is read, with the field, the value found and what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .names import APPLIERS, FORMATS, SCHEDULES, SELECTIONS, TRANSFORMS, Acts, Format, Selection
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
DIVISORS = ("published", "exact")


@dataclass(frozen=True)
class SyncSchedule:
    """When a channel acts: a pure function of the job's step t = 0, 1, 2, ..., but under
    `on_change`, which says when it may act.

    Attributes:
        sync_every: optimizer steps from one exchange to the next (DiLoCo's H, torchft's
            sync_every).
        offset: steps by which the first exchange is late (torchft's fragment_sync_offset).
        delay: steps between the start of an exchange and its effect (torchft's
            fragment_sync_delay).
        when: `every`: in each step that is due; `on_change`: every `sync_every` steps the islands
            ask each other, and exchange if the gradient of any has changed (SelSync).
        delta: of `on_change`: the smoothed relative change of the gradient norm, from 0, that
            counts as one.
        window: steps over which norms and their changes are smoothed.
        at_most: steps after which a check exchanges in any case; 0: no number of them.

    Example:
        >>> from fsdp_demo import SyncSchedule
        >>> [t for t in range(10) if SyncSchedule(sync_every=4).due(t)]
        [3, 7]
    """

    sync_every: int = 1
    offset: int = 0
    delay: int = 0
    when: str = "every"
    delta: float = 0.3
    window: int = 25
    at_most: int = 256

    def __post_init__(self) -> None:
        one_of("schedule.when", self.when, tuple(SCHEDULES))
        in_range("schedule.delta", self.delta, 0.0)
        in_range("schedule.window", self.window, 1)
        in_range("schedule.at_most", self.at_most, 0)
        in_range("schedule.sync_every", self.sync_every, 1)
        in_range("schedule.offset", self.offset, 0, self.sync_every - 1)
        in_range("schedule.delay", self.delay, 0)

    def due(self, step: int) -> bool:
        """Whether an exchange starts at `step`, or may (not `pure`); applied at `step + delay`."""
        return step + 1 > self.offset and (step + 1 - self.offset) % self.sync_every == 0

    @property
    def pure(self) -> bool:
        """Whether each step that is due has an exchange."""
        return SCHEDULES[self.when]

    def round(self, step: int) -> int:
        """Number, from 1, of the exchange that starts at `step` (0 before the first)."""
        return max(step + 1 - self.offset, 0) // self.sync_every

    @property
    def words(self) -> str:
        """The steps from one exchange to the next: `8`; `8 to 256` where the islands decide."""
        if self.pure:
            return str(self.sync_every)
        return f"{self.sync_every} {f'to {self.at_most}' if self.at_most else 'or more'}"

    @property
    def in_flight(self) -> int:
        """The largest number of messages that are under way at once."""
        return self.delay // self.sync_every + 1


@dataclass(frozen=True)
class Accumulator:
    """The memory of a channel between exchanges: a = beta * a + gain * T(source), where T is the
    transform of the codec.

    Attributes:
        beta: decay of what is kept, at every step of the source.
        gain: factor of the source when it is added.
        alpha: share of what was sent that leaves the accumulator.
        rate: the gain is multiplied by the learning rate that the parameter has at that step;
            gradients only.

    Example:
        >>> from fsdp_demo import Accumulator, preset
        >>> preset("demo").channels[0].accumulator == Accumulator(beta=0.999)
        True
    """

    beta: float = 0.0
    gain: float = 1.0
    alpha: float = 1.0
    rate: bool = False

    def __post_init__(self) -> None:
        in_range("accumulator.beta", self.beta, 0.0, 1.0)
        in_range("accumulator.alpha", self.alpha, 0.0, 1.0)
        if not self.gain > 0:
            raise ValueError(f"accumulator.gain={self.gain} is out of range: allowed is gain > 0")


@dataclass(frozen=True)
class Codec:
    """The way from the source to bytes: a transform, a selection among the coefficients of each
    block of 4096, and a number format.

    Attributes:
        transform: orthonormal transform of each block.
        select: `dense`: everything; `topk`: the largest of each block, whose positions travel
            along; `threshold` (arXiv 2010.08899): as many, the largest of a whole tensor, or of the
            part of it that a rank holds; `random`, `stride` (FlexDeMo): positions that all islands
            compute from the step, so that only values travel, which can be summed on the way.
        topk: values of each block of 4096 that are sent; refused where everything is. Small tensors
            go whole.
        threshold_every: exchanges from one estimate of a threshold to the next. Between them fewer
            values may be sent, and never more.
        value_dtype: number format of the values.
        transform_precision: `bf16`: the transform multiplies in bf16 (CUDA: TF32): faster, nearly
            the same choice. What is sent is still exactly what is subtracted.

    Example:
        >>> from fsdp_demo import Codec
        >>> Codec(transform="dct", select="topk", topk=16, value_dtype="int8").sparse
        True
    """

    transform: str = "none"
    select: str = "dense"
    topk: int = 32
    value_dtype: str = "fp32"
    transform_precision: str = "fp32"
    threshold_every: int = 1

    def __post_init__(self) -> None:
        one_of("codec.transform", self.transform, TRANSFORMS)
        one_of("codec.select", self.select, tuple(SELECTIONS))
        one_of("codec.value_dtype", self.value_dtype, tuple(FORMATS))
        one_of("codec.transform_precision", self.transform_precision, PRECISIONS)
        in_range("codec.threshold_every", self.threshold_every, 1)
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
                "since nothing is dropped: use transform='none', or select='topk'"
            )

    @property
    def format(self) -> Format:
        """The number format of the values."""
        return FORMATS[self.value_dtype]

    @property
    def selection(self) -> Selection:
        """The way in which the values that are sent are chosen."""
        return SELECTIONS[self.select]

    @property
    def sparse(self) -> bool:
        """Whether only a part of each block is sent."""
        return self.selection.by != "nobody"

    @property
    def indexed(self) -> bool:
        """Whether positions are chosen by the data, so that they travel with the values and
        messages cannot be summed on the way.
        """
        return self.selection.by in ("data", "tensor")

    @property
    def by_tensor(self) -> bool:
        """Whether one choice goes over all blocks of a tensor."""
        return self.selection.by == "tensor"

    @property
    def seeded(self) -> bool:
        """Whether positions follow from the step alone."""
        return self.selection.by == "step"


@dataclass(frozen=True)
class Reducer:
    """The rule by which the decoded messages of all islands become one mean.

    Attributes:
        mean_over: the mean goes over all islands (`replicas`), or over those that sent a value at
            that position (`senders`).
        weight: `equal`, or by the `tokens` that an island saw since its last exchange
            (`exchange.report(tokens=...)`). A message has one weight, for all its channels: since
            the oldest of their last exchanges.
        clip: `median_norm`: what an island sent for a block is scaled down to the median of the
            islands' norms (SparseLoCo's code).

    Example:
        >>> from fsdp_demo import preset
        >>> preset("diloco", **{"reducer.weight": "tokens"}).channels[0].reducer.weight
        'tokens'
    """

    mean_over: str = "replicas"
    weight: str = "equal"
    clip: str = "none"

    def __post_init__(self) -> None:
        one_of("reducer.mean_over", self.mean_over, MEANS_OVER)
        one_of("reducer.weight", self.weight, WEIGHTS)
        one_of("reducer.clip", self.clip, REDUCER_CLIPS)


@dataclass(frozen=True)
class Applier:
    """The rule by which the mean acts on the model.

    Attributes:
        acts_as: `gradient`: the mean becomes the gradient of your optimizer; `outer_step`: a step
            of SGD on the anchor; `replace`: parameters or state become the mean; of two islands
            `pair_step` (NoLoCo): each steps an anchor of its own towards the mean, and
            `replace_sent` (SAPS): parameters that were sent become the mean.
        lr: rate of the outer step.
        dense_lr: the same for tensors that a sparse channel sends whole.
        momentum: momentum of the outer step.
        nesterov: the momentum is Nesterov's.
        dampening: the mean joins the momentum by 1 - dampening, as in torch.optim.SGD, but from the
            first round on. As large as `momentum` it makes a mean of the past; with `nesterov` the
            step is QHM's (arXiv 1810.06801) and GPA's (arXiv 2512.17131).
        local_delta: each island applies its own delta in full, and of the mean only `beta` times
            the accumulator of the exchange (released rule of 2510.03371).
        mix: share of the local parameters that stays (alpha of Streaming DiLoCo, torchft's
            `fragment_update_alpha`).
        sign: the sign of the mean is the gradient.
        momentum_warmup: rounds over which the momentum rises linearly from 0; 0: constant.
        keep_steps: after a delay the local steps since the last send stay; false: they are undone.
        own_share: share of an own delta in flight that the parameters keep when an earlier mean
            lands, with a delay of one period up to two; 1/R in eager updates (arXiv 2502.12996).
        own_step: the own share takes the outer step, too, with a momentum that each island keeps
            for itself, as in that paper.

    Example:
        >>> from fsdp_demo import Applier
        >>> Applier("outer_step", lr=0.7, momentum=0.9, nesterov=True).acts_as
        'outer_step'
    """

    acts_as: str = "gradient"
    lr: float = 1.0
    dense_lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    local_delta: bool = False
    mix: float = 0.0
    sign: bool = False
    momentum_warmup: int = 0
    keep_steps: bool = False
    own_share: float = 1.0
    own_step: bool = False
    dampening: float = 0.0

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
        if not 0.0 <= self.dampening < 1.0:
            raise ValueError(
                f"applier.dampening={self.dampening} is out of range: allowed is 0 <= dampening < 1"
            )
        in_range("applier.momentum_warmup", self.momentum_warmup, 0)

    @property
    def acts(self) -> Acts:
        """The channels that `acts_as` is for."""
        return APPLIERS[self.acts_as]

    def momentum_in(self, round: int) -> float:
        """The momentum in a round, counted from 1: the first of a warm-up has none."""
        return (
            self.momentum * min(1.0, max(round - 1, 0) / self.momentum_warmup)
            if self.momentum_warmup
            else self.momentum
        )


@dataclass(frozen=True)
class Fragments:
    """The cut of a channel into fragments of layers, which are exchanged one after the other within
    a period (Streaming DiLoCo, arXiv 2501.18512).

    What is in no layer (embedding, head, last norm) is the last fragment.

    Attributes:
        layers: layers of a fragment, found by the first number in a parameter's name.
        order: with P fragments, `strided`: fragment p has the layers p, p + P, p + 2 P, ...;
            `sequential`: consecutive ones.

    Example:
        >>> from fsdp_demo import Fragments
        >>> Fragments(layers=3).order
        'strided'
    """

    layers: int = 3
    order: str = "strided"

    def __post_init__(self) -> None:
        in_range("fragments.layers", self.layers, 1)
        one_of("fragments.order", self.order, ORDERS)


@dataclass(frozen=True)
class Drop:
    """DropCompute (arXiv 2306.10598): a time limit for the micro-batches of a step. Past it the
    rest is dropped, but for the last one (`exchange/drop.py`).

    Attributes:
        limit: seconds from the begin of a step's first micro-batch; "auto": chosen from recorded
            times of all islands, by the rule of the authors' released code.
        divisor: "published": the loss keeps its divisor, so a step with dropped micro-batches has a
            smaller gradient; "exact": the gradient is the mean over what was taken.

    Example:
        >>> from fsdp_demo import preset
        >>> preset("demo", drop={"limit": 2.5}).drop.divisor
        'published'
    """

    limit: float | Literal["auto"] = "auto"
    divisor: str = "published"

    def __post_init__(self) -> None:
        if self.limit != "auto" and not 0 < self.limit < math.inf:
            raise ValueError(
                f"drop.limit={self.limit} is out of range: allowed is limit > 0, or auto"
            )
        one_of("drop.divisor", self.divisor, DIVISORS)


@dataclass(frozen=True)
class Pairs:
    """The choice of the two islands that exchange with each other (`pairs.py`).

    Attributes:
        by: `random`: any two; `bandwidth`: two with a fast link, and now and then two others, so
            that all islands stay connected (SAPS-PSGD, arXiv 2002.09692).
        bandwidth: Mbit/s from each island (row) to each, as `fsdp-demo doctor` measures them.
        fast: Mbit/s above which a link is fast, in both directions; 0: the median of all links.
        rounds: the pairs of so many rounds must connect all islands.
    """

    by: str = "random"
    bandwidth: tuple[tuple[float, ...], ...] = ()
    fast: float = 0.0
    rounds: int = 10

    def __post_init__(self) -> None:
        one_of("pairs.by", self.by, ("random", "bandwidth"))
        in_range("pairs.fast", self.fast, 0.0)
        in_range("pairs.rounds", self.rounds, 1)
        rows = len(self.bandwidth)
        if (rows > 1) != (self.by == "bandwidth") or any(len(r) != rows for r in self.bandwidth):
            what = f"pairs.by={self.by!r} with {rows} rows of pairs.bandwidth"
            raise ValueError(f"{what}: 'bandwidth' needs a row and a column for each island")
