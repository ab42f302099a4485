"""Rows of a plan: the costs of a setting on a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ...config.parts import BLOCK, SyncSchedule
from ...config.schema import ExchangeConfig
from ...exchange.plan import inner_state, plan_memory
from ...net.link import Link
from ...peers.header import ring_all_reduce_bytes
from . import mix
from .counting import Cycle, PlannedMessage, cycle, releases
from .gaps import expected_gap, gap
from .line import BACKWARD, Played, Timed, message_seconds, play
from .situation import Situation

HSDP = "hsdp"
LENGTH = 1000
"""Steps of a run whose length is not known, where phases begin at a share of it."""

LOWEST, HIGHEST = 1e3, 1e15  # bits per second


@dataclass(frozen=True)
class Row:
    """The costs of one setting.

    Attributes:
        name: the preset, or "hsdp": a bf16 ring all-reduce of the gradients at every step, layer by
            layer while backward runs, as torch's HSDP does it.
        settings: period, code, selection and delay in words.
        config: the configuration; None for HSDP.
        chosen: whether the planner has set period, code and delay.
        bytes_per_exchange: bytes that one island sends in the step in which it sends the most.
        bytes_per_step: bytes that one island sends per step on average; where the islands decide
            when to exchange, in each check, as all that follows from it.
        least_bytes_per_step: the same if no gradient changes; `bytes_per_step` elsewhere.
        peak_gbit_s: rate that lets the largest exchange end before training waits for it, where it
            has a delay, and within one step where it has none.
        mean_gbit_s: average rate over the compute alone.
        line_use: share of the time in which the line is busy.
        exposed_seconds_per_step: seconds in which training waits or works for the exchange.
        waiting_seconds_per_step: those of them in which it waits for the line.
        compute_utilisation: seconds of a step's compute over those of the step with its exchange;
            of unlike machines the share of their speed, each for itself, that is used.
        device_bytes, host_bytes: state, parameters, gradients and workspace of one rank.
        expected_gap, no_gap: gap of the loss, or why none is known (`gaps.expected_gap`).
        days, run_bytes: duration and bytes of the whole run; None where its length is not known.
    """

    name: str
    settings: str
    config: ExchangeConfig | None
    chosen: bool
    bytes_per_exchange: float
    bytes_per_step: float
    least_bytes_per_step: float
    peak_gbit_s: float
    mean_gbit_s: float
    line_use: float
    exposed_seconds_per_step: float
    waiting_seconds_per_step: float
    compute_utilisation: float
    device_bytes: float
    host_bytes: float
    expected_gap: dict[str, Any] | None
    no_gap: str
    days: float | None
    run_bytes: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain data, under the keys that docs/plan.md lists."""
        renamed = ("name", "config", "device_bytes", "host_bytes")
        return {
            "preset": self.name,
            **{key: value for key, value in vars(self).items() if key not in renamed},
            "memory_gb": self.device_bytes / 1e9,
            "host_gb": self.host_bytes / 1e9,
        }


def plan_row(situation: Situation, config: ExchangeConfig, chosen: bool = False) -> Row:
    """The row of one configuration; of one that changes in the run see `_row_of_phases`."""
    if any(c.later for c in config.channels):
        return _row_of_phases(situation, config, chosen)
    s, found = situation, _counted(situation, config)
    sent = found.due.values()
    largest = max((sum(m.bytes_out for m in messages) for messages in sent), default=0.0)
    mean = _mean(found)
    ways = [
        8e-9
        * s.crossing
        * max(m.bytes_out, m.bytes_in)
        / (max(m.delay, 1) * s.tick_seconds(config))
        for messages in sent
        for m in messages
    ]
    device, host = _memory(s, config)
    expected, none = expected_gap(config, s.parameters, s.islands)
    return _row(
        s,
        config,
        name=config.preset,
        settings=settings(config) + _shares(s, config),
        chosen=chosen,
        bytes_per_exchange=largest,
        bytes_per_step=mean,
        least_bytes_per_step=_least(s, config) if config.checks else mean,
        peak_gbit_s=max(ways, default=0.0),
        device_bytes=device,
        host_bytes=host,
        expected_gap=expected,
        no_gap=none,
    )


def _row_of_phases(s: Situation, config: ExchangeConfig, chosen: bool) -> Row:
    """The row of a configuration that changes in the run: bytes and times of the phase that sends
    most, the memory of the whole run, and its days and bytes where its length is known.
    """
    phases, length = config.fixed(max(1, round(s.length or LENGTH))), s.length
    begins = [b for b in phases.begins if length is None or b < length]
    rows = [plan_row(s, phases.at(begin), chosen) for begin in begins]
    most = max(rows, key=lambda row: row.bytes_per_step)
    device, host = _memory(s, phases)
    known: dict[str, Any] = {"config": config, "device_bytes": device, "host_bytes": host}
    known["expected_gap"], known["no_gap"] = expected_gap(config, s.parameters, s.islands)
    if length is not None:
        shares = [(b - a) / length for a, b in pairwise([*begins, length])]
        for name in ("days", "run_bytes"):
            known[name] = sum(getattr(r, name) * n for r, n in zip(rows, shares, strict=True))
    return replace(most, **known)


def _memory(s: Situation, config: ExchangeConfig) -> tuple[float, float]:
    """Bytes of one rank on its device, and on its host."""
    memory = _plan_memory(config, _key(s), s.islands, s.shards, staged=s.device != "cpu")
    own = inner_state(config, s.tensors, s.shards)
    device = 8 * memory.parameters + own  # parameters and gradients in fp32
    device += memory.device_state + memory.device_flight + memory.device_workspace
    return device, memory.host_state + memory.host_flight + memory.host_workspace


def hsdp_row(situation: Situation) -> Row:
    """The baseline: FSDP inside an island, an all-reduce between islands."""
    s = situation
    size = ring_all_reduce_bytes(s.islands, 2 * s.parameters)
    share = (s.parameters * 4 + 3 * 4 * s.parameters) / s.shards  # parameters, gradient, AdamW
    return _row(
        s,
        None,
        name=HSDP,
        settings="every 1, bf16, all-reduce during backward",
        chosen=False,
        bytes_per_exchange=size,
        bytes_per_step=size,
        least_bytes_per_step=size,
        peak_gbit_s=8e-9 * size / s.tick_seconds(None),
        device_bytes=share,
        host_bytes=0.0,
        expected_gap=gap(0.0, "itself"),
        no_gap="",
    )


def utilisation(situation: Situation, config: ExchangeConfig | None) -> float:
    """Compute utilisation alone; None is HSDP."""
    played = _played(situation, config)
    t = situation.tick_seconds(config)
    used = mix.speed_used(situation.machines, config) if situation.machines else 1.0
    return used * t / (t + played.waiting + played.working)


def gbit_s(situation: Situation, config: ExchangeConfig | None, target: float) -> float | None:
    """The lowest rate, in Gbit/s, at which the compute utilisation is `target`; to 0.1 %.

    Args:
        config: None is HSDP. The link's rate does not matter, its round trip does.

    Returns:
        None where no rate does: round trips and the work of compression alone take more.
    """
    rtt = situation.link.rtt

    def reached(rate: float | None) -> bool:
        return utilisation(replace(situation, link=Link(rate, rtt)), config) >= target

    if not reached(HIGHEST):
        return None
    low, high = LOWEST, HIGHEST
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high / 1e9


def _row(s: Situation, config: ExchangeConfig | None, bytes_per_step: float, **known: Any) -> Row:
    """A row of which all is known but the times."""
    played, tick, steps, used = _played(s, config), s.tick_seconds(config), s.length, 1.0
    exposed = played.waiting + played.working
    whole = tick + exposed
    if s.machines:
        used = mix.speed_used(s.machines, config)
        steps = steps and steps / mix.tokens_taken(s.machines, config)
    crossing = 1.0 if config is None else s.crossing
    return Row(
        config=config,
        bytes_per_step=bytes_per_step,
        mean_gbit_s=8e-9 * crossing * bytes_per_step / tick,
        line_use=played.line / whole,
        exposed_seconds_per_step=exposed,
        waiting_seconds_per_step=played.waiting,
        compute_utilisation=used * tick / whole,
        days=None if steps is None else steps * whole / 86400,
        run_bytes=None if steps is None else steps * bytes_per_step,
        **known,
    )


# ---- times -------------------------------------------------------------------------------------


def _played(s: Situation, config: ExchangeConfig | None) -> Played:
    tick, each = s.tick_seconds(config), s.each(config)
    if config is None:
        return play(1, {0: [_slowest([_ring(one) for one in each])]}, tick)
    found, n = _counted(s, config), 1 if config.pairs else s.islands - 1
    steps = sorted(found.due)
    gaps = {
        b: (b - a) % found.steps or found.steps
        for a, b in zip(steps[-1:] + steps[:-1], steps, strict=True)
    }
    due = {
        step: [_slowest([_timed(one, m, gaps[step] * tick, n) for one in each]) for m in messages]
        for step, messages in found.due.items()
    }
    return play(found.steps, due, tick)


def _slowest(times: Sequence[Timed]) -> Timed:
    """The times of a message of which all islands wait for the slowest."""
    slowest = max(times, key=lambda t: t.seconds)
    before, after = (max(getattr(t, name) for t in times) for name in ("before", "after"))
    return replace(slowest, before=before, after=after)


def _timed(s: Situation, message: PlannedMessage, pause: float, others: int) -> Timed:
    peers = s.shards * others
    seconds = message_seconds(message.legs, s.line, s.system, peers, pause, others)
    before = after = 0.0
    if s.system.compression:
        p = s.processor
        plain = message.sparse - message.transformed
        work = p.transformed * message.transformed + p.sparse * plain
        work += p.dense * (message.values - message.sparse)
        if s.compression is not None:
            work = s.compression * message.values
        before = after = work / 2
        moved = max(message.bytes_out, message.bytes_in) / s.shards
        seconds += p.message + p.per_byte * moved
    early: tuple[tuple[float, float], ...] = ()
    if s.system.overlap_backward:
        backward = BACKWARD * s.step_seconds
        early = tuple((share, left * backward) for share, left in message.releases)
    return Timed(seconds, message.delay, before, after, early)


def _ring(s: Situation) -> Timed:
    """A ring all-reduce of bf16 gradients in 2 (R - 1) legs. Of a site one island sends to the next
    site, so an uplink carries what one island sends.
    """
    times, per = 2 * (s.islands - 1), s.system.bytes_per_parameter or 2.0
    legs = ((per * s.parameters / s.islands,) * 2,) * times
    seconds = message_seconds(legs, s.link, s.system, s.shards, s.step_seconds)
    backward = BACKWARD * s.step_seconds
    early = tuple((share, left * backward) for share, left in releases(s.tensors, s.tensors))
    return Timed(seconds, releases=early)


def _mean(found: Cycle) -> float:
    """Bytes out of an island per step."""
    return sum(m.bytes_out for sent in found.due.values() for m in sent) / found.steps


def _least(s: Situation, config: ExchangeConfig) -> float:
    """Bytes out of an island per step if no gradient ever changes: checks, and what is sure."""
    found = _counted(s, config)
    checks = sum(m.bytes_out for sent in found.due.values() for m in sent if not m.values)
    sure = [
        c if c.schedule.pure else replace(c, schedule=SyncSchedule(c.schedule.at_most))
        for c in config.channels
        if c.schedule.pure or c.schedule.at_most
    ]
    rest = _mean(_counted(s, replace(config, channels=tuple(sure)))) if sure else 0.0
    return checks / found.steps + rest


def _counted(s: Situation, config: ExchangeConfig) -> Cycle:
    return _cycle(config, _key(s), s.islands, s.shards, s.system.bytes_per_parameter)


def _key(s: Situation) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The tensors as a key of a cache, which a list is none."""
    return tuple((n, tuple(shape)) for n, shape in s.tensors)


_cycle, _plan_memory = lru_cache(maxsize=256)(cycle), lru_cache(maxsize=256)(plan_memory)


# ---- words -------------------------------------------------------------------------------------


def rate_words(rate: float) -> str:
    """Gbit/s as a person says them: `48 Mbit/s`."""
    return f"{rate:.3g} Gbit/s" if rate >= 1 else f"{1e3 * rate:.3g} Mbit/s"


def _shares(s: Situation, config: ExchangeConfig) -> str:
    """The steps of each island in a round in words, where they are unlike."""
    if not (s.machines and config.by_speed):
        return ""
    return f", steps {'/'.join(map(str, mix.own_steps(s.machines, config)[0]))}"


def settings(config: ExchangeConfig) -> str:
    """Period, code, selection and delay of a preset's channels in a few words."""
    first, delay = config.channels[0], max(c.schedule.delay for c in config.channels)
    periods = {c.schedule.sync_every: c.schedule.words for c in config.channels}
    words = [f"every {'/'.join(periods[n] for n in sorted(periods))}", first.codec.value_dtype]
    words += [f"{first.codec.topk} of {BLOCK}"] if first.codec.sparse else []
    words += ["fragments"] if first.fragments is not None else []
    words += [f"delay {delay}"] if delay else []
    return ", ".join(words)
