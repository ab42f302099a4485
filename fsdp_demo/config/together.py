"""Rules about a whole configuration: which of its settings and channels do not go together. What
contradicts itself within a channel, or between two, is in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import rules
from .parsing import nearest

Config = Any  # `ExchangeConfig`, whose constructor asks here


def problems(c: Config) -> Iterator[str]:
    """Contradictions, each a text with the reason and the cure; behind the first one others may
    follow from it.
    """
    yield from _channels(c, [channel.name for channel in c.channels])
    if c.drop is not None and c.drop.divisor == "published":
        if any(channel.reducer.weight == "tokens" for channel in c.channels):
            yield (
                "drop.divisor='published' with reducer.weight='tokens' counts what an island drops "
                "twice, in its gradient and in its weight: take drop.divisor=exact, or weight=equal"
            )
    yield from _low_rank(c)
    yield from _pairs(c)
    if c.by_speed:
        yield from _by_speed(c)
    if c.backup_islands:
        yield from (f"backup_islands={c.backup_islands}{text}" for text in _backup(c))
    found = {channel.schedule: channel.name for channel in c.channels if not channel.schedule.pure}
    if len(found) > 1:
        names = ", ".join(map(repr, found.values()))
        yield f"channels {names} have unlike schedules when='on_change': give all the same one"
    if found and c.by_speed:
        yield (
            "local_steps='by_speed' goes by rounds of one length, found when='on_change': use "
            "local_steps='equal', or a preset with a period, such as diloco"
        )


def _channels(config: Config, names: list[str]) -> Iterator[str]:
    if any("." in name for name in names):
        yield (
            f"channel names are {names}: a name may hold no dot, which would end it in "
            "NAME.codec.value_dtype"
        )
    if not names or len(set(names)) != len(names):
        yield f"channels must be at least one, with distinct names; found {names}"
    for i, c in enumerate(config.channels):
        if c.after and c.after not in names:
            known = f"{nearest(c.after, names)} (channels: {', '.join(names)})"
            yield f"channel {c.name!r}: after={c.after!r} is no channel{known}"
        first = next((o for o in config.channels if o.name == c.after), None)
        yield from (f"channel {c.name!r}: {text}" for text in rules.order_problems(c, first))
        for other in config.channels[:i]:
            pattern, reason = rules.overlap(other, c), rules.conflict(other, c)
            if pattern and reason:
                yield f"parameters like {pattern!r}: {reason}"
        if c.schedule.in_flight > config.max_in_flight:
            yield (
                f"channel {c.name!r}: schedule.delay={c.schedule.delay} with "
                f"schedule.sync_every={c.schedule.sync_every} keeps {c.schedule.in_flight} "
                f"payloads in flight, allowed are max_in_flight={config.max_in_flight}: shorten "
                "the delay or exchange less often"
            )


def _low_rank(c: Config) -> Iterator[str]:
    inner, rank = c.inner_optimizers, c.inner_rank
    if ("lowrankadamw" in inner) != bool(rank) and not (rank and "as_is" in inner):
        yield (
            f"inner_rank={rank} with inner_optimizers={inner}: 'lowrankadamw' needs "
            "inner_rank > 0 (a quarter of the model's width, say), and no other takes one"
        )
    if rank and not any(channel.source == "delta" for channel in c.channels):
        yield (
            f"inner_rank={rank} without a channel of deltas, from whose anchor projections are "
            "remade: take diloco or another one with an outer step, or desloc(rank=...)"
        )
    late = [channel.name for channel in c.channels if channel.state_name and channel.schedule.delay]
    if rank and late:
        yield (
            f"channels {late} of moments have a delay, and would land in another basis than they "
            "were sent in (inner_rank): set their schedule.delay to 0"
        )


def _pairs(c: Config) -> Iterator[str]:
    """Why islands cannot exchange in pairs, or not with all."""
    for x in c.channels:
        s = x.schedule
        if x.applier.acts.pairs != (c.pairs is not None):
            yield (
                f"pairs={c.pairs} with applier.acts_as={x.applier.acts_as!r} ({x.name}): only "
                "'pair_step' and 'replace_sent' act on the mean of a pair, and on no other. Take "
                "preset noloco or saps, or leave pairs out"
            )
        elif c.pairs and (s != c.channels[0].schedule or s.delay or not s.pure or x.fragments):
            yield "pairs ask nobody else: use one schedule, delay=0, when='every', no fragments"
    asks = c.by_speed or c.clips_together or c.norm_limit or (c.drop and c.drop.limit == "auto")
    if c.pairs and asks:
        yield (
            "pairs with local_steps='by_speed', clip_scope='islands', drop='auto' or a norm_limit, "
            "which all islands settle: use 'equal', 'replica', seconds, null"
        )


def _by_speed(c: Config) -> Iterator[str]:
    often = next((x for x in c.channels if x.before_step or x.schedule.sync_every < 2), None)
    if often is not None or c.clips_together:
        what = f"channel {often.name!r} exchanges" if often else "clip_scope='islands' asks for"
        yield (
            f"local_steps='by_speed' lets islands take unlike steps between two exchanges, and "
            f"{what} {'them' if often is None else often.source} in every step: take a preset with "
            "a period, such as diloco, or leave out what is late of a step (DropCompute: "
            "exchange.time_is_up())"
        )
    if equal := [channel.name for channel in c.channels if channel.reducer.weight != "tokens"]:
        yield (
            "local_steps='by_speed' weighs each island by what it has trained, found "
            f"reducer.weight='equal' in channel {equal[0]!r}: set reducer.weight=tokens"
        )
    if c.drop is not None and c.drop.limit == "auto":
        yield (
            "drop.limit='auto' compares islands at steps that all take, and under "
            "local_steps='by_speed' they do not: give it in seconds, or use one of the two"
        )


def _backup(c: Config) -> Iterator[str]:
    """Why no exchange can go on without a late island."""
    if c.by_speed:
        yield (
            " beside local_steps='by_speed': no island is late there, and who leaves out steps "
            "does not come to each; use one of the two"
        )
    for channel in c.channels:
        a, when = channel.applier, channel.schedule
        keeps = a.acts_as == "outer_step" and not a.mix and channel.feedback != "put_back"
        if not keeps or when.sync_every == 1 or when.delay:
            yield (
                ": it is for deltas that act by an outer step on an anchor, every few steps and "
                "without a delay: elsewhere a late island's work would be lost or count twice, or "
                f"nobody waits. Channel {channel.name!r} has source {channel.source!r}, "
                f"applier.acts_as={a.acts_as!r}, mix={a.mix:g}, feedback={channel.feedback!r}, "
                f"sync_every={when.sync_every}, delay={when.delay}: use a preset such as diloco, "
                "or backup_islands=0"
            )
    if c.clips_together:
        yield ": clip_scope='islands' asks all islands in every step: use clip_scope='replica'"
    least = 2 * (1 + c.late_rounds)
    if c.norm_limit is not None and c.norm_limit < least:
        yield (
            f": norm_limit={c.norm_limit:g} might leave out the work of {1 + c.late_rounds} "
            f"rounds: use norm_limit >= {least}, or null"
        )
