"""Rules of a configuration: settings of one channel, or of two, that contradict each other; and
settings that a method does not use, which are refused where a change sets one. Each finding says
why and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .channel import Channel, matches
from .names import APPLIERS, FORMATS
from .parts import NEVER


def problems(c: Channel) -> list[str]:
    """Contradictions within one channel, each a text with the reason and the cure."""
    found = (*_codec_rules(c), *_applier_rules(c), *_schedule_rules(c))
    return [text for wrong, text in found if wrong]


def _schedule_rules(c: Channel) -> list[tuple[bool, str]]:
    s, checks = c.schedule, not c.schedule.pure
    later = bool(s.offset or s.delay or c.fragments or c.after)
    return [
        (
            checks and not c.applier.acts.whole,
            f"schedule.when={s.when!r} makes rounds of unlike length, which the mean of "
            f"parameters or states bears; found source {c.source!r}, whose rates and memory go by "
            "rounds: use when='every', or the preset sel_sync",
        ),
        (
            checks and later,
            f"schedule.when={s.when!r} is one decision of all islands at a step, found "
            f"offset={s.offset}, delay={s.delay}, after={c.after!r}"
            f"{', fragments' * bool(c.fragments)}: leave these out",
        ),
        (
            checks and s.at_most % s.sync_every != 0,
            f"schedule.at_most={s.at_most} is no multiple of the steps between checks, "
            f"schedule.sync_every={s.sync_every} (check_every of sel_sync): make it one, or 0",
        ),
    ]


def _codec_rules(c: Channel) -> list[tuple[bool, str]]:
    select = c.codec.select
    whole = not c.codec.sparse and c.codec.format.exact and c.accumulator is None
    exact = " or ".join(name for name, form in FORMATS.items() if form.exact)
    return [
        (
            c.applier.acts.whole and not whole,
            f"source {c.source!r} is replaced by the mean, so it travels whole: select='dense', "
            f"value_dtype {exact}, no accumulator",
        ),
        (
            c.feedback != "none" and c.accumulator is None,
            f"feedback={c.feedback!r} needs an accumulator to act on, found none: add "
            "accumulator.beta, or feedback='none'",
        ),
        (
            c.accumulator is not None and c.accumulator.rate and not c.before_step,
            "accumulator.rate=True multiplies gradients by the learning rate, found source "
            f"{c.source!r}: leave it False; a constant is accumulator.gain",
        ),
        (
            c.feedback == "put_back" and not c.codec.sparse,
            "feedback='put_back' on a channel that sends everything (codec.select='dense') would "
            "count the mean twice: use 'none'",
        ),
        (
            c.feedback == "put_back" and c.source != "delta",
            f"feedback='put_back' is defined for source 'delta' (2510.03371), found {c.source!r}: "
            "use 'subtract'",
        ),
        (
            c.reducer.mean_over == "senders" and not c.codec.indexed,
            "reducer.mean_over='senders' needs a selection by the data (codec.select='topk'), "
            f"with select={select!r} everybody sends: use 'replicas'",
        ),
        (
            c.reducer.clip == "median_norm" and not c.codec.indexed,
            "reducer.clip='median_norm' is for what replicas choose to send "
            f"(codec.select='topk'), found select={select!r}: use 'none'",
        ),
        (
            c.before_step and 1 < c.schedule.sync_every < NEVER and c.accumulator is None,
            f"schedule.sync_every={c.schedule.sync_every} on a gradient channel needs an "
            "accumulator, else the gradients between exchanges "
            "are lost: set accumulator.beta, or schedule.sync_every=1",
        ),
    ]


def _applier_rules(c: Channel) -> list[tuple[bool, str]]:
    a, source = c.applier, "state" if c.state_name else c.source
    wanted = " or ".join(repr(name) for name, acts in APPLIERS.items() if source in acts.sources)
    exact = " or ".join(name for name, form in FORMATS.items() if form.exact)
    return [
        (
            source not in a.acts.sources,
            f"applier.acts_as={a.acts_as!r} cannot apply source {c.source!r}: use "
            f"applier.acts_as={wanted}",
        ),
        (
            a.acts.pairs
            and (a.mix > 0 or a.nesterov or c.accumulator is not None)
            or a.acts_as == "replace_sent"
            and not (c.codec.seeded and c.codec.format.exact and c.codec.transform == "none"),
            f"applier.acts_as={a.acts_as!r} takes mix=0, nesterov=False, no accumulator; "
            f"'replace_sent' select 'random' or 'stride', no transform, value_dtype {exact}",
        ),
        (
            a.sign and not c.before_step,
            f"applier.sign=True is for gradient channels, found source {c.source!r}: a sign is no "
            "parameter; leave it False",
        ),
        (
            a.local_delta and c.feedback != "put_back",
            "applier.local_delta=True is the released rule and needs feedback='put_back', found "
            f"{c.feedback!r}",
        ),
        (
            a.mix > 0 and not c.writes_parameters,
            f"applier.mix={a.mix} mixes local parameters in, found source {c.source!r}: use mix=0",
        ),
        (
            a.keep_steps and (source != "delta" or a.mix > 0 or a.local_delta),
            "applier.keep_steps=True is for source 'delta' with applier.mix=0 and "
            f"applier.local_delta=False, found source {c.source!r}, mix={a.mix}, "
            f"local_delta={a.local_delta}: leave it False",
        ),
        (
            a.own_share < 1
            and not (
                source == "delta"
                and c.schedule.sync_every <= c.schedule.delay < 2 * c.schedule.sync_every
                and a.mix == 0
            ),
            f"applier.own_share={a.own_share:g} acts where one delta is in flight when the mean of "
            "another lands: it needs source 'delta', applier.mix=0 and schedule.sync_every <= "
            f"schedule.delay < 2 schedule.sync_every, found {c.source!r}, mix={a.mix:g}, "
            f"sync_every={c.schedule.sync_every}, delay={c.schedule.delay}: use own_share=1",
        ),
        (
            a.own_step and (a.own_share == 1 or a.local_delta or bool(c.later)),
            "applier.own_step=True is about the own delta in flight: it needs applier.own_share "
            "below 1 (1/R of R islands), applier.local_delta=False and no phases (later), found "
            f"own_share={a.own_share:g}, local_delta={a.local_delta}, {len(c.later)} phases: leave "
            "it False",
        ),
        (c.after == c.name, f"after={c.after!r} is the channel itself: name another one, or none"),
    ]


def phase_problems(c: Channel) -> list[str]:
    """Contradictions in the phases of a channel (`Channel.later`), each a text with the cure."""
    found: list[str] = []
    begins = [p.begin for p in c.later]
    for kind in ([b for b in begins if b < 1], [b for b in begins if b >= 1]):
        if kind != sorted(set(kind)):
            found.append(f"later begins at {kind}: give phases in their order, each its own begin")
    before = c
    for p in c.later:
        here = c.under(p)
        wrong = [f": {problem}" for problem in problems(here)]
        wrong += [
            f" {path}={new!r}, before it is {old!r}: it must stay what it is"
            for path, old, new in _kept_in_phases(before, here)
            if old != new
        ]
        if before.accumulator is not None and here.accumulator is None:
            wrong.append(" no accumulator: what is in it would be lost, keep accumulator.beta")
        why = "what a phase leaves out has its default, not the channel's value"
        found += [f"from {p.begin:g} on{text} ({why})" for text in wrong]
        before = here
    return found


def _kept_in_phases(a: Channel, b: Channel) -> list[tuple[str, Any, Any]]:
    """The keys that no phase changes, with their values in two channels: how tensors lie, which of
    them are kept and what a message under way means depends on them.
    """
    # blocks are cut alike for all selections of some of their values
    codec = ("transform",) if a.codec.sparse == b.codec.sparse else ("transform", "select")
    applier = ("acts_as", "local_delta", "mix", "keep_steps", "own_share", "own_step")
    keys = [("codec", k) for k in codec] + [("applier", k) for k in applier]
    keys.append(("reducer", "weight"))
    return [
        (f"{part}.{k}", getattr(getattr(a, part), k), getattr(getattr(b, part), k))
        for part, k in keys
    ]


def order_problems(c: Channel, first: Channel | None) -> list[str]:
    """The reasons why channel `c` cannot come after channel `first`; none where `first` is None."""
    if first is None:
        return []
    found = []
    if first.after:
        found.append(
            f"after={c.after!r}, which itself comes after {first.after!r}: an order has two "
            f"places, let both come after {first.after!r}"
        )
    if c.before_step or first.before_step:
        found.append(
            f"after={c.after!r}: gradient channels act before the base step and need no order, "
            "leave after empty"
        )
    if c.schedule.delay:
        found.append(
            f"after={c.after!r} with schedule.delay={c.schedule.delay}: what it brings would be "
            "older than what came first; use delay=0"
        )
    return found


def overlap(a: Channel, b: Channel) -> str | None:
    """A pattern of parameter names that both channels surely cover; None: patterns do not tell."""
    for p in a.include:
        for q in b.include:
            kept = not matches(p, b.exclude) and not matches(q, a.exclude)
            if kept and (fnmatchcase(p, q) or fnmatchcase(q, p)):
                return p if fnmatchcase(p, q) else q
    return None


def conflict(a: Channel, b: Channel) -> str | None:
    """The reason why two channels that cover a common parameter cannot both act on it, or None if
    they can. Channels that write it on the same step need an order.
    """
    if a.target != b.target:
        return None
    if a.source == b.source:
        return (
            f"channels {a.name!r} and {b.name!r} both exchange {a.source!r} of it: each would undo "
            "the other; use include and exclude"
        )
    apart = math.gcd(a.schedule.sync_every, b.schedule.sync_every)
    for x in (a, b):
        if x.source == "delta" and x.schedule.delay and x.name in (a.after, b.after):
            return (
                f"channel {x.name!r} has a delay, so no anchor can be set after it while it is "
                "in flight: set its schedule.delay=0"
            )
    lands = [x.schedule.offset + x.schedule.delay for x in (a, b)]
    if (lands[0] - lands[1]) % apart == 0 and a.name != b.after and b.name != a.after:
        return (
            f"channels {a.name!r} and {b.name!r} both write it on the same step: say which is "
            f"first (after={a.name!r} in {b.name!r}), or "
            "give one schedule.offset so that they never meet"
        )
    return None


# ---- settings without effect -------------------------------------------------------------------

_OFF = ("none", "replica")
"""Words that switch a setting off, as 0, false and null do: true of a method without it."""

_MOMENTUM = tuple(
    f"applier.{key}" for key in ("momentum", "nesterov", "momentum_warmup", "dampening")
)


def refuse_unused(
    channels: Sequence[Channel], clips_mean: bool, changes: Mapping[str, Any]
) -> None:
    """Refuse changes that change nothing. A path for all channels is one that any of them uses.

    Args:
        channels, clips_mean: those of the configuration with the changes made.
        changes: paths as `ExchangeConfig.changed` takes them, and their values.

    Raises:
        ValueError: a setting without effect; says why.
    """
    names, above = {c.name: c for c in channels}, _unused_above(channels, clips_mean)
    for path, value in changes.items():
        if not value or value in _OFF:
            continue
        head, _, rest = path.partition(".")
        chosen, key = ([names[head]], rest) if head in names and rest else (channels, path)
        if why := above.get(path, "") or no_effect(chosen, key):
            raise ValueError(f"{path}={value!r} has no effect: {why}; leave {path} out")


def no_effect(channels: Sequence[Channel], path: str) -> str:
    """Why a path for all channels has no effect; empty where any channel or phase uses it."""

    def value(part: Any) -> Any:
        for key in path.split("."):
            part = getattr(part, key, None)
        return part

    phases = [p for c in channels for p in map(c.under, c.later) if value(p) == value(c)]
    reasons = [_unused(c).get(path, "") for c in (*channels, *phases)]
    return reasons[0] if all(reasons) else ""


def _unused(c: Channel) -> dict[str, str]:
    """The settings that the channel does not use -> why. `uncompressed` and `no_transform` are not
    among them: what they ask for is so where nothing is compressed or transformed.
    """
    a, name = c.applier, f"channel {c.name!r}"
    whole = f"{name} sends every value (codec.select='dense')"
    found: dict[str, str] = {}
    if c.schedule.pure:
        keys = ("schedule.delta", "schedule.window", "schedule.at_most")
        found |= dict.fromkeys(keys, f"{name} has schedule.when={c.schedule.when!r}")
    if not c.codec.sparse:
        found |= dict.fromkeys(("codec.topk", "applier.dense_lr"), whole)
    if not c.codec.by_tensor and c.codec.threshold_every > 1:
        found["codec.threshold_every"] = (
            f"it is for codec.select='threshold', found {c.codec.select!r}"
        )
    if c.feedback != "subtract":
        found["accumulator.alpha"] = f"it is for feedback='subtract', found {c.feedback!r}"
    if a.momentum == 0:
        without = f"{name} has no momentum (applier.momentum=0)"
        found |= dict.fromkeys(("applier.momentum_warmup", "applier.dampening"), without)
    if a.local_delta:
        local = "whose momentum is the accumulator's (accumulator.beta)"
        found |= dict.fromkeys(_MOMENTUM, f"{name} has applier.local_delta=True, {local}")
    if a.acts_as not in ("outer_step", "pair_step"):
        found |= dict.fromkeys(
            (*_MOMENTUM, "applier.lr", "applier.dense_lr"),
            f"{name} takes no outer step (applier.acts_as={a.acts_as!r}), and its rate is that of "
            "your optimizer",
        )
    return found


def _unused_above(channels: Sequence[Channel], clips_mean: bool) -> dict[str, str]:
    """The keys of the top level without effect -> why."""
    found: dict[str, str] = {}
    if not any(p.codec.seeded or p.applier.acts.pairs for c in channels for p in c.phases):
        found["seed"] = "no channel draws positions (codec.select='random' or 'stride')"
    if not any(c.source == "delta" for c in channels):
        found["offload_outer_state"] = "no channel keeps an anchor (source 'delta')"
    if clips_mean:
        found["clip_scope"] = "the mean gradient is clipped, by the one norm that all islands see"
    return found
