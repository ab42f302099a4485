"""A channel: one thing that is exchanged, with the parts (`parts.py`) that say when and how. Plain
data; nothing here touches tensors.

A wrong value is refused when it is read, with the field, the value found and what is allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from .parsing import one_of
from .parts import Accumulator, Applier, Codec, Fragments, Reducer, SyncSchedule

CHANGING = ("accumulator", "codec", "feedback", "reducer", "applier")
"""The parts of a channel that a `Phase` has."""

FEEDBACKS = ("none", "subtract", "put_back")
SOURCES = ("gradient", "delta", "parameter")


@dataclass(frozen=True)
class Phase:
    """The parts of a channel that change in the course of a run, as they are from `begin` on.

    What is left out has its default, not the channel's value. A message is decoded and applied by
    the parts that held when it was sent. What is accumulated stays; the outer momentum begins at
    zero with the first message of the phase.

    Attributes:
        begin: the steps before it: a number (1, 2, ...), or a share of the run (between 0 and 1).
            A share becomes a number when the run starts for the first time, if its steps are known
            (`must_match={"steps": N}`); else the phase does not begin.
        accumulator: from then on; one that is there stays.
        codec: from then on; `transform` stays, and so does whether `select` takes all values.
        feedback: from then on.
        reducer: from then on; `weight` stays.
        applier: from then on; rates, momentum and `sign` may change.

    Example:
        >>> from fsdp_demo import preset
        >>> channel = preset("sign_loco", switch=0.25).fixed(steps=1000).channels[0]
        >>> channel.at(249).applier.lr, channel.at(250).applier.lr
        (0.7, 1.5)
    """

    begin: float
    accumulator: Accumulator | None = None
    codec: Codec = field(default_factory=Codec)
    feedback: str = "none"
    reducer: Reducer = field(default_factory=Reducer)
    applier: Applier = field(default_factory=Applier)

    def __post_init__(self) -> None:
        if not (0 < self.begin < 1 or (self.begin >= 1 and self.begin % 1 == 0)):
            raise ValueError(
                f"later.begin={self.begin} is out of range (`switch` of sign_loco): allowed is a "
                "number of steps (1, 2, ...) or a share of the run (0 < begin < 1); for no phase "
                "leave it out (switch=0)"
            )
        one_of("later.feedback", self.feedback, FEEDBACKS)


@dataclass(frozen=True)
class Channel:
    """One thing that is exchanged, on its own schedule, with its own codec and its own way of being
    applied.

    Patterns are shell patterns over parameter names. Here each field is checked for itself; what
    has no meaning together is refused when the channel enters an `ExchangeConfig`.

    Attributes:
        name: name of the channel; begins dotted paths such as `NAME.codec.topk`.
        source: what is sent: the gradient, the delta (anchor minus parameters), the parameters, or
            a state of the optimizer.
        schedule: when it acts.
        accumulator: what it keeps between exchanges; null: nothing.
        codec: how the source becomes bytes.
        feedback: what leaves the accumulator: `none`: nothing; `subtract`: what was sent (error
            feedback); `put_back`: what was sent, and the mean is added.
        reducer: how the messages of all islands become one mean.
        applier: how the mean acts.
        include: shell patterns over parameter names: what the channel covers.
        exclude: patterns: what is never exchanged.
        uncompressed: patterns: what a sparse channel sends whole, beside what always goes whole.
        no_transform: patterns: what it sends without the transform (embeddings, heads).
        fragments: cuts the channel into fragments of layers; null: one piece.
        after: name of a channel that is applied first on the steps where both act.
        later: parts that change in the course of the run, in their order.

    Example: plain averaging of the parameters every 10 steps, as `local_sgd` does.
        >>> from fsdp_demo import Applier, Channel, SyncSchedule, ExchangeConfig
        >>> average = Channel("average", "parameter", SyncSchedule(sync_every=10), applier=Applier("replace"))
        >>> ExchangeConfig("local_sgd", (average,)).equal_after_exchange
        True
    """  # noqa: E501

    name: str
    source: str
    schedule: SyncSchedule = field(default_factory=SyncSchedule)
    accumulator: Accumulator | None = None
    codec: Codec = field(default_factory=Codec)
    feedback: str = "none"
    reducer: Reducer = field(default_factory=Reducer)
    applier: Applier = field(default_factory=Applier)
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    uncompressed: tuple[str, ...] = ()
    no_transform: tuple[str, ...] = ()
    fragments: Fragments | None = None
    after: str = ""
    later: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        if not self.state_name:
            one_of(f"channel {self.name!r}: source", self.source, (*SOURCES, "state:NAME"))
        one_of(f"channel {self.name!r}: feedback", self.feedback, FEEDBACKS)

    # ---- what changes in the run ---------------------------------------------------------------

    def stages(self) -> list[tuple[int, Channel]]:
        """(first step, channel as it is from there on) of the channel and of each of its phases; a
        phase that begins at a share of the run, not at a step, is left out.
        """
        first = [(0, replace(self, later=()) if self.later else self)]
        return first + [(int(p.begin), self.under(p)) for p in self.later if p.begin >= 1]

    @property
    def phases(self) -> tuple[Channel | Phase, ...]:
        """What holds the `CHANGING` parts in the course of the run: the channel, and its phases."""
        return self, *self.later

    def under(self, phase: Phase) -> Channel:
        """The channel as it is in one of its phases."""
        return replace(self, later=(), **{name: getattr(phase, name) for name in CHANGING})

    def at(self, step: int) -> Channel:
        """The channel as it is for a message that is sent at `step`."""
        return [c for begin, c in self.stages() if begin <= step][-1]

    # ---- what follows from the fields: derived here and nowhere else, never set ----------------

    @property
    def before_step(self) -> bool:
        """Whether the channel acts before the base optimizer's step, as gradients do, or after."""
        return self.source == "gradient"

    @property
    def state_name(self) -> str:
        """Name of the optimizer state that it averages ("exp_avg"); empty for other sources."""
        return self.source.removeprefix("state:") if self.source.startswith("state:") else ""

    @property
    def target(self) -> str:
        """The tensors that the channel reads and writes, as a host's `tensors` calls them: a delta
        is read from the parameters.
        """
        return "parameter" if self.source == "delta" else self.source

    @property
    def writes_parameters(self) -> bool:
        """Whether the channel sets parameters itself. Gradients act by the base optimizer."""
        return self.target == "parameter"

    @property
    def sums_steps(self) -> bool:
        """Whether a message sums the steps of a round: a delta, or accumulated gradients."""
        return self.source in ("delta", "gradient") and self.schedule.sync_every > 1

    @property
    def whole_every_step(self) -> bool:
        """Whether all values travel as they are (fp32) in every step, and their mean acts in it."""
        codec, schedule = self.codec, self.schedule
        whole = codec.value_dtype == "fp32" and not codec.sparse and self.accumulator is None
        at_once = schedule.sync_every == 1 and schedule.delay == 0
        return whole and at_once and not self.needs_own

    @property
    def queues(self) -> bool:
        """Whether deltas are sent while earlier ones are under way, and stay in the parameters."""
        return self.source == "delta" and self.schedule.delay >= self.schedule.sync_every

    @property
    def corrects(self) -> bool:
        """Whether mean - sent is added to parameters, so that steps taken meanwhile are kept."""
        return self.source == "parameter" and self.schedule.delay > 0

    @property
    def keeps_steps(self) -> bool:
        """Whether steps taken since a delta was sent stay when its mean arrives."""
        return self.source == "delta" and self.schedule.delay > 0 and self.applier.keep_steps

    @property
    def needs_own(self) -> bool:
        """Whether a replica needs its own contribution again when the mean of it arrives."""
        return self.corrects or self.queues or self.keeps_steps or self.applier.local_delta

    @property
    def taken(self) -> float:
        """The share of the values sent that leaves the accumulator; 0 where nothing does."""
        if self.accumulator is None or self.feedback == "none":
            return 0.0
        return 1.0 if self.feedback == "put_back" else self.accumulator.alpha

    @property
    def equal_after_exchange(self) -> bool:
        """Whether the parameters that the channel covers are equal on all replicas right after one
        of its exchanges; those of fragments never are, all at once.
        """
        return (
            self.equal_at_end
            and self.fragments is None
            and not (self.applier.mix > 0.0 or self.corrects or self.queues or self.keeps_steps)
        )

    @property
    def equal_at_end(self) -> bool:
        """Whether a last exchange leaves the parameters that the channel covers equal on all
        replicas; not if each applies its own delta, nor if islands exchange in pairs.
        """
        return not (self.state_name or self.applier.local_delta or self.applier.acts.pairs)


# ---- shell patterns over parameter names: which parameters a channel covers ----------------------

EMBEDDINGS = (
    *("*embed*", "*wte*", "*wpe*", "*lm_head*"),
    # torchtitan's Llama, ViT: the module that holds the weight
    *("output.weight", "*.output.weight", "head.weight", "*.head.weight"),
    # models that classify
    *("score.weight", "*.score.weight", "classifier.*", "*.classifier.weight"),
)
"""Embeddings and heads: rows of unseen tokens are zero and a transform over them spreads what top-k
wants concentrated. A head is told by the last module of its name, so that BERT's
`attention.output.dense.weight` is none."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter name fits one of the shell patterns."""
    return _matches(name, tuple(patterns))


@functools.lru_cache(2**16)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    # the planner asks for the same names hundreds of times
    return any(fnmatchcase(name, p) for p in patterns)


def covers(channel: Channel, name: str) -> bool:
    """Whether a channel exchanges the parameter of this name."""
    return matches(name, channel.include) and not matches(name, channel.exclude)


def tensor_layout_kind(channel: Channel, name: str) -> str:
    """The `Layout` kind: "dense" (sent whole), "plain" or "transform" (blocks, transformed)."""
    if not channel.codec.sparse or matches(name, channel.uncompressed):
        return "dense"
    plain = channel.codec.transform == "none" or matches(name, channel.no_transform)
    return "plain" if plain else "transform"


def literal(name: str) -> str:
    """The shell pattern that fits this parameter name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
