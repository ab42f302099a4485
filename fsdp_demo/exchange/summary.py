"""The lines of the log when an exchange starts and ends: the method, rows, ranks and bytes, and
warnings about settings.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..config.auto import undecided
from ..config.parts import BLOCK
from ..config.schema import ExchangeConfig
from ..errors import counted, first_few
from ..hosts.base import TrainingHost
from ..rendezvous.topology import Topology
from .plan import Plan
from .runtime import StepRuntime

log = logging.getLogger("fsdp_demo")


class Voice(logging.StreamHandler):
    """The log on stderr of a script that has set up no logging. It removes itself as soon as there
    is another handler.

    Args:
        name: of the island, which stands before each record.
        given: the level that the logger gets; None: it has one.
    """

    def __init__(self, name: str, given: int | None):
        super().__init__()
        self._island, self.given = name, given
        if given is not None:
            log.setLevel(given)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless logging was set up since."""
        if len(log.handlers) > 1 or logging.getLogger().handlers:
            hush()
        else:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """`[island0] text`, and the level where it is no information."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"[{self._island}] {level}{super().format(record).removeprefix(f'{self._island}: ')}"


def speak(topology: Topology) -> None:
    """Let the package's logger write to stderr, if neither it nor the root logger has a handler:
    information on the first rank of an island, warnings on all. A level that was set stays."""
    if log.hasHandlers():
        return
    level = logging.WARNING if topology.rank else logging.INFO
    log.addHandler(Voice(topology.name, level if log.level == logging.NOTSET else None))


def hush() -> None:
    """Undo `speak`."""
    voices = [h for h in log.handlers if isinstance(h, Voice)]
    # a new list: a record that is on its way along the old one reaches the others, too
    log.handlers = [h for h in log.handlers if h not in voices]
    for voice in voices:
        if voice.given == log.level:
            log.setLevel(logging.NOTSET)


LOW_RATE = 0.05
"""An outer rate below it is rather an inner one in the wrong place: published are 0.4 to 1."""


def announce(runtime: StepRuntime, batch: Sequence[int], steps: int | None = None) -> None:
    """Log what runs (one record of a few lines), and warnings, on the first rank of each island. A
    collective inside the island: all its ranks call it.

    Args:
        batch: rows of a micro-batch per rank and micro-batches per step; empty where not told.
        steps: of the whole job, if known.
    """
    bytes_sent, whole = _bytes_of_island(runtime)
    if runtime.topology.rank:
        return
    config, name = runtime.config, runtime.topology.name
    if undecided(config):
        log.info("%s: %s", name, config.describe())
        return
    log.info("%s: %s", name, "\n    ".join(_what_runs(runtime, batch, bytes_sent, whole)))
    for b in runtime.buffers:
        n = sum(s.numel() for s in b.tensors("parameter") if s is not None)
        every = b.channel.schedule.words
        log.info(
            "%s: averaged every %s and at the end: %s (%s)",
            name,
            "step" if every == "1" else f"{every} steps",
            counted(len(b.covered), "buffer"),
            counted(n, "number"),
        )
    ends = [] if steps is None else odd_ends(config, steps)
    for text in [*_odd_settings(runtime, batch), *ends]:
        log.warning("%s: %s", name, text)


def _odd_settings(runtime: StepRuntime, batch: Sequence[int]) -> Iterator[str]:
    """A sentence for each setting that is allowed, and rarely meant."""
    config = runtime.config
    for c in [c.channel for c in runtime.channels]:
        dropped = c.schedule.delay % c.schedule.sync_every
        if c.source == "delta" and dropped and not (c.applier.mix or c.applier.keep_steps):
            yield (
                f"channel {c.name!r}: at each exchange what the last {counted(dropped, 'step')} "
                "did locally is dropped: set applier.keep_steps=true, or applier.mix"
            )
    for c in config.channels:
        lowest = min(p.applier.lr for p in c.phases)
        if c.applier.acts_as == "outer_step" and lowest < LOW_RATE:
            yield (
                f"channel {c.name!r}: the outer rate (applier.lr) is {lowest:g}, so that the "
                "islands' steps hardly move the model that they share. The rate of training is the "
                "inner one: that of your optimizer (recipes: --lr), not lr of preset "
                f"{config.preset}"
            )
    if runtime.rows_differ and any(c.reducer.weight == "equal" for c in config.channels):
        here = math.prod(batch) * runtime.topology.world if batch else 0
        yield (
            f"this island trains {here} of {runtime.rows} rows of a step, other islands more or "
            "fewer, and each island counts the same: set reducer.weight=tokens, and report tokens "
            "(Exchange.report), to count each row the same"
        )
    low = [s.name for s in runtime.host.params if s.dtype != torch.float32 and not s.frozen]
    if low:
        yield (
            f"{counted(len(low), 'parameter')} not in fp32 ({low[0]} ...): small updates are lost "
            "in rounding; load the model with dtype=torch.float32 and compute in bf16 "
            "(MixedPrecisionPolicy, mixed_precision='bf16')"
        )


def _what_runs(
    runtime: StepRuntime, batch: Sequence[int], sent: Sequence[float], whole: Sequence[float]
) -> list[str]:
    """The lines of the record that `announce` logs.

    Args:
        sent: most bytes of one exchange of this island, and its mean per step.
        whole: values that sparse channels send whole, and all their values.
    """
    config, topology, place = runtime.config, runtime.topology, runtime.island.position
    islands = f"island {topology.island} of {topology.islands}"
    if topology.islands == 1:
        islands = "one replica, nothing is sent"
    if topology.count < topology.islands:
        islands += f" ({topology.count} expected at the start)"
    shape = place.form
    if (active := runtime.parameters.active_copies) != place.num_copies:
        shape += f" ({active} active)"
    inner = ", ".join(type(o).__name__ for o in runtime.host.optimizers)
    lines = [
        f"preset {config.preset}, {islands}, from step {runtime.step}",
        *config.parts(),
        f"inner {inner}; {clips(config, runtime.host)}",
        f"{_batch(runtime, batch)}{shape}",
        f"{sent[0]:.0f} B per exchange and island at most, {sent[1]:.0f} B per step "
        f"{'if each check exchanges' if config.checks else 'on average'}"
        f"{' of the phase that sends most' if len(config.begins) > 1 else ''}",
    ]
    if whole[0]:
        lines.append(
            f"{whole[0]:.0f} of {whole[1]:.0f} values of sparse channels go whole: tensors of "
            f"fewer than {BLOCK} values in a rank, and those that `uncompressed` names"
        )
    return lines


def ended(
    runtime: StepRuntime, found: Mapping[str, float], equal: bool | None, unlike: Sequence[str]
) -> None:
    """Log one line about what the exchange has done, on the first rank of each island.

    Args:
        found: `Exchange.totals()`.
        equal: whether all replicas hold the same bits; None where the preset does not promise that.
        unlike: names of buffers that were registered since attach and differ.
    """
    topology = runtime.topology
    if topology.rank:
        return
    # the islands that took part in the last exchange
    known = runtime.peers is not None and topology.elastic
    slots = runtime.queue.history.slots if known else ()
    fewer = bool(slots) and slots != tuple(range(topology.count))
    if topology.islands == 1:
        agree = "one replica"
    elif len(slots) == 1:
        agree = "there is no other to agree with"
    elif equal is None:
        off = f"this one was off it by {runtime.drift or 0.0:.3g} of its norm"
        agree = f"{'these' if fewer else 'all islands'} hold their mean, {off}"
    else:
        found_equal = "agree, bit for bit" if equal else "differ"
        agree = f"{'these' if fewer else 'islands'} {found_equal}, in all trained parameters"
    if unlike:
        agree += f", and differ in {first_few(unlike, 3)}, registered since attach"
    if fewer:
        which = ("island " if len(slots) == 1 else "islands ") + ", ".join(map(str, slots))
        began = f"{counted(topology.count, 'island')} began"
        agree = f"{began}, {len(slots)} at the end: {which}; {agree}"
    did = (
        f"{counted(int(found['exchanges']), 'exchange')}, {found['bytes_sent']} B sent, "
        f"{found['seconds_waiting']:.1f} s waiting for the link"
    )
    log.info("%s: finished at step %d: %s; %s", topology.name, runtime.step, did, agree)


def total_steps(facts: Mapping[str, Any]) -> int | None:
    """The job's steps, if the facts say them (`must_match={"steps": N}`; `max_steps`)."""
    for name in ("steps", "max_steps"):
        value = facts.get(f"must_match.{name}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return int(value) if value > 0 and value % 1 == 0 else None
    return None


def odd_ends(config: ExchangeConfig, steps: int) -> list[str]:
    """A sentence for each phase that begins behind the last of `steps` steps, and for each
    outer-step channel in the middle of whose round they end. Fragments always do, one or the other.
    """
    found = []
    for c in config.channels:
        found += [
            f"channel {c.name!r}: a run of {counted(steps, 'step')} has no phase that begins after "
            f"{counted(int(p.begin), 'step')} (later.begin, switch): let it begin earlier, or "
            "leave it out"
            for p in c.later
            if p.begin >= steps
        ]
        stepping = c.applier.acts_as == "outer_step" and c.equal_at_end and c.fragments is None
        if not stepping or c.schedule.due(steps - 1):
            continue
        period, first = c.schedule.sync_every, c.schedule.offset
        below = first + max(steps - first, 0) // period * period
        fits = " or ".join(str(n) for n in (below, below + period) if n > first)
        found.append(
            f"channel {c.name!r}: a run of {counted(steps, 'step')} ends inside a round of period "
            f"{period}: finish() takes the plain mean of that part, without an "
            f"outer step; steps that end with a round: {fits}"
        )
    return found


def clips(config: ExchangeConfig, host: TrainingHost) -> str:
    """A sentence about the gradient clipping in force."""
    if config.clip is None:
        return host.clips or "the exchange clips no gradients"
    where = "each replica's own gradient before the step"
    if config.clips_mean:
        where = "the mean gradient over the islands"
    elif config.clip_scope == "islands":
        where = "the gradients by one norm over the islands (one round trip per step)"
    return f"norm {config.clip:g} clips {where}"


def _batch(runtime: StepRuntime, batch: Sequence[int]) -> str:
    """The beginning of a line; empty where no batch was told."""
    if len(batch) != 2:
        return ""
    world, peers = runtime.topology.world, runtime.peers
    islands = runtime.topology.count if peers is None else len(peers.alive)
    here = batch[0] * batch[1] * world
    factors = f"{batch[0]} x {batch[1]} accumulation x {counted(world, 'rank')}"
    if runtime.rows_differ:
        return f"effective batch {runtime.rows} rows, {here} of them here = {factors}; "
    return f"effective batch {here * islands} rows = {factors} x {counted(islands, 'island')}; "


def _bytes_of_island(runtime: StepRuntime) -> tuple[list[float], list[float]]:
    """(most bytes of one exchange, mean per step) of this island in the phase that sends most, and
    (values that sparse channels send whole, all their values). A collective inside the island.
    """
    active = [c for c in (*runtime.channels, *runtime.buffers) if c.section is not None]
    topology, plans = runtime.topology, []
    for step in runtime.config.begins:
        sections = [s for c in active if (s := c.of(step).section) is not None]
        plans.append(Plan(sections, topology.islands, topology.island))
    sparse = [s.layout for s in sections if s.codec.sparse]
    most, mean, whole, of = runtime.island.sum(
        max(plan.most().bytes_sent for plan in plans),
        max(plan.average()[0] for plan in plans),
        sum(layout.num_dense for layout in sparse),
        sum(
            layout.num_dense + sum(g.r * g.s * g.count for g in layout.groups) for layout in sparse
        ),
    )
    return [most, mean], [whole, of]
