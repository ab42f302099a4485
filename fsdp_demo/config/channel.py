"""One thing that is exchanged: when, what, how compressed and how applied. Plain data; nothing here touches tensors.

A wrong value is refused when it is read, with the field, the value found and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .names import APPLIERS, FORMATS, SELECTIONS, TRANSFORMS, Acts, Format, Selection
from .parsing import in_range, one_of

BLOCK = 4096  # elements of one block: 64 x 64, or 4096 consecutive elements of a flat fragment

CODES = tuple(FORMATS)
PRODUCTS = ("fp32", "bf16")
RESIDUALS = ("keep", "subtract", "put_back")
REDUCERS = ("replicas", "senders")
WEIGHTS = ("equal", "tokens")
REDUCER_CLIPS = ("none", "median_norm")
PHIS = ("identity", "sign")
SOURCES = ("gradient", "delta", "parameter")
ORDERS = ("strided", "sequential")


@dataclass(frozen=True)
class Clock:
    """When a channel acts, in optimizer steps; a pure function of the job's step t = 0, 1, 2, ...

    Example:
        >>> from fsdp_demo import Clock
        >>> [t for t in range(10) if Clock(period=4).due(t)]
        [3, 7]
    """

    period: int = 1
    offset: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        in_range("clock.period", self.period, 1)
        in_range("clock.offset", self.offset, 0, self.period - 1)
        in_range("clock.delay", self.delay, 0)

    def due(self, step: int) -> bool:
        """Whether an exchange starts at `step`; it is applied at `step + delay`."""
        return step + 1 > self.offset and (step + 1 - self.offset) % self.period == 0

    def round(self, step: int) -> int:
        """Number, from 1, of the exchange that starts at `step` (0 before the first)."""
        return max(step + 1 - self.offset, 0) // self.period

    @property
    def in_flight(self) -> int:
        """The largest number of payloads that are under way at once."""
        return self.delay // self.period + 1


@dataclass(frozen=True)
class Accumulator:
    """What a channel keeps between exchanges: a = beta * a + gain * T(source); `alpha` of what was sent is subtracted.

    rate: of a gradient, the gain is multiplied by the learning rate that its parameter has at that step.

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
    """How the source becomes bytes: transform, selection of `topk` coefficients of each block of 4096, code of the values.

    select "topk" takes the largest, whose positions travel with them; "random" and "stride" (FlexDeMo) take `topk` of each block at
    positions that all replicas compute from the step (`compression/seeded.py`), so only values travel and they can be summed on the way.
    products "bf16" lets the transform multiply in bf16 (CUDA: TF32): faster, nearly the same choice, and what is sent is exactly what is
    subtracted.

    Example:
        >>> from fsdp_demo import Codec
        >>> Codec(transform="dct", select="topk", topk=16, code="int8").sparse
        True
    """

    transform: str = "none"
    select: str = "all"
    topk: int = 32
    code: str = "fp32"
    products: str = "fp32"

    def __post_init__(self) -> None:
        one_of("codec.transform", self.transform, TRANSFORMS)
        one_of("codec.select", self.select, tuple(SELECTIONS))
        one_of("codec.code", self.code, tuple(FORMATS))
        one_of("codec.products", self.products, PRODUCTS)
        if self.products != "fp32" and self.transform == "none":
            raise ValueError(f"codec.products={self.products!r} is about the transform, which is 'none': leave it 'fp32'")
        if not 1 <= self.topk <= BLOCK:
            raise ValueError(f"codec.topk={self.topk} is out of range: a block has {BLOCK} elements, allowed is 1 <= topk <= {BLOCK}")
        if self.transform != "none" and self.select == "all":
            raise ValueError(
                f"codec.transform={self.transform!r} with codec.select='all' has no effect, since nothing is dropped: "
                "use transform='none', or select='topk'"
            )

    @property
    def format(self) -> Format:
        """Bits, groups and scales of the values."""
        return FORMATS[self.code]

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
        """True if positions are chosen by the data, so that indices travel and payloads cannot be summed on the way."""
        return self.selection.by == "data"

    @property
    def seeded(self) -> bool:
        """True if positions follow from the step alone."""
        return self.selection.by == "step"


@dataclass(frozen=True)
class Reducer:
    """How R decoded payloads become one: the mean over all replicas, or over those that sent a position.

    weight "tokens" weighs each island by the tokens it saw since the last exchange (`Exchange.note(tokens=...)`). clip "median_norm"
    scales what a replica sent for a block down to the median over the replicas of the norms of that block (SparseLoCo's code).

    Example:
        >>> from fsdp_demo import preset
        >>> preset("diloco", **{"reducer.weight": "tokens"}).channels[0].reducer.weight
        'tokens'
    """

    kind: str = "replicas"
    weight: str = "equal"
    clip: str = "none"

    def __post_init__(self) -> None:
        one_of("reducer.kind", self.kind, REDUCERS)
        one_of("reducer.weight", self.weight, WEIGHTS)
        one_of("reducer.clip", self.clip, REDUCER_CLIPS)


@dataclass(frozen=True)
class Applier:
    """How the decoded mean acts.

    gradient: becomes the gradient of the base optimizer, through `phi` (identity or sign).
    outer: a step of SGD (momentum, nesterov) with rate `lr` on the anchor; whole (dense) tensors of a sparse channel use
        `dense_lr`; `local_delta` applies the replica's own delta and only `beta` times the accumulator of the exchange
        (the released rule of 2510.03371); `mix` keeps that share of the local parameters (Streaming DiLoCo's alpha);
        `momentum_warmup` lets the momentum rise linearly from 0 over that many rounds.
    replace: the source becomes the mean.

    Example:
        >>> from fsdp_demo import Applier
        >>> Applier("outer", lr=0.7, momentum=0.9, nesterov=True).kind
        'outer'
    """

    kind: str = "gradient"
    lr: float = 1.0
    dense_lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    local_delta: bool = False
    mix: float = 0.0
    phi: str = "identity"
    momentum_warmup: int = 0

    def __post_init__(self) -> None:
        one_of("applier.kind", self.kind, tuple(APPLIERS))
        one_of("applier.phi", self.phi, PHIS)
        in_range("applier.lr", self.lr, 0.0)
        in_range("applier.dense_lr", self.dense_lr, 0.0)
        in_range("applier.mix", self.mix, 0.0, 1.0)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"applier.momentum={self.momentum} is out of range: allowed is 0 <= momentum < 1")
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("applier.nesterov=True needs applier.momentum > 0, found 0.0: set a momentum or drop nesterov")
        in_range("applier.momentum_warmup", self.momentum_warmup, 0)

    @property
    def acts(self) -> Acts:
        """What the kind is for."""
        return APPLIERS[self.kind]

    def momentum_in(self, round: int) -> float:
        """The momentum of round 1, 2, ...: the first of a warm-up has none."""
        return self.momentum * min(1.0, max(round - 1, 0) / self.momentum_warmup) if self.momentum_warmup else self.momentum


@dataclass(frozen=True)
class Fragments:
    """Cuts a channel into fragments of `layers` layers, exchanged one after the other within a period (Streaming DiLoCo, 2501.18512).

    Layers are found by the first number in the dotted parameter names. "strided": with P fragments, fragment p holds layers p, p + P,
    p + 2 P, ...; "sequential": consecutive ones. What is in no layer (embedding, head, last norm) is the last fragment.

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
class Channel:
    """One thing that is exchanged, on its own clock, with its own codec and its own way of being applied.

    `include`, `exclude`, `dense` and `plain` are shell patterns over parameter names: what the channel covers, what is
    never exchanged, what a sparse channel sends whole, and what it sends without the transform (embeddings, heads).
    `after` names a channel that is applied first on the steps where both act. Here each field is checked for itself; what has no meaning
    together is refused when the channel enters an `ExchangeConfig`.

    Example: plain averaging of the parameters every 10 steps, as `local_sgd` does.
        >>> from fsdp_demo import Applier, Channel, Clock, ExchangeConfig
        >>> average = Channel("average", "parameter", Clock(period=10), applier=Applier("replace"))
        >>> ExchangeConfig("local_sgd", (average,)).consensus
        True
    """

    name: str
    source: str
    clock: Clock = field(default_factory=Clock)
    accumulator: Accumulator | None = None
    codec: Codec = field(default_factory=Codec)
    residual: str = "keep"
    reducer: Reducer = field(default_factory=Reducer)
    applier: Applier = field(default_factory=Applier)
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    fragments: Fragments | None = None
    after: str = ""

    def __post_init__(self) -> None:
        if not self.state_name:
            one_of(f"channel {self.name!r}: source", self.source, (*SOURCES, "state:NAME"))
        one_of(f"channel {self.name!r}: residual", self.residual, RESIDUALS)

    # ---- what follows from the fields: derived here and nowhere else, never set ------------------------------------------------------

    @property
    def before_step(self) -> bool:
        """Gradient channels act before the base optimizer's step, all others after it."""
        return self.source == "gradient"

    @property
    def state_name(self) -> str:
        """The state of the optimizer that it averages ("exp_avg"); empty for gradients, deltas and parameters."""
        return self.source.removeprefix("state:") if self.source.startswith("state:") else ""

    @property
    def target(self) -> str:
        """The tensors that it reads and writes, as a host's `read` calls them: a delta is read from the parameters."""
        return "parameter" if self.source == "delta" else self.source

    @property
    def writes_parameters(self) -> bool:
        """Whether what comes back sets parameters. Gradients act through the base optimizer instead."""
        return self.target == "parameter"

    @property
    def sums_steps(self) -> bool:
        """Whether what is sent is the sum of the steps of a round: of a delta, or of gradients that are accumulated."""
        return self.source in ("delta", "gradient") and self.clock.period > 1

    @property
    def queues(self) -> bool:
        """Whether a delta is sent while earlier ones are under way: those stay in the parameters until they arrive."""
        return self.source == "delta" and self.clock.delay >= self.clock.period

    @property
    def corrects(self) -> bool:
        """Whether a mean of parameters corrects what was sent, so that steps taken while it was under way are kept."""
        return self.source == "parameter" and self.clock.delay > 0

    @property
    def needs_own(self) -> bool:
        """Whether a replica needs what it has sent itself when the mean of it arrives."""
        return self.corrects or self.queues or self.applier.local_delta

    @property
    def taken(self) -> float:
        """The share of what is sent that leaves the accumulator; 0 where nothing leaves it, or there is none."""
        if self.accumulator is None or self.residual == "keep":
            return 0.0
        return 1.0 if self.residual == "put_back" else self.accumulator.alpha

    @property
    def consensus(self) -> bool:
        """Whether the parameters it covers are equal on all replicas after an exchange of this channel; fragments are not, all at once."""
        return self.shared and self.fragments is None and not (self.applier.mix > 0.0 or self.corrects or self.queues)

    @property
    def shared(self) -> bool:
        """Whether a last exchange leaves all replicas equal: not if each applies its own delta."""
        return not self.state_name and not self.applier.local_delta
