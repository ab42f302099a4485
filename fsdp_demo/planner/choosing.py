"""Which setting to start with: for each method the one closest to training with an all-reduce that
keeps the wanted share of the time, then the method.

The order is one of evidence (docs/plan.md): an all-reduce; then what was trained with a billion
parameters and more, at the periods of its paper; then longer periods. What was measured on tiny
models only is never recommended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.meter import ring_all_reduce_bytes
from ..config.load import preset
from ..config.schema import ExchangeConfig
from .rows import Row, named, plan_row, with_delay
from .situation import Situation

_Forms = list[dict[str, Any]]

LADDERS: dict[str, _Forms] = {
    "full": [{"value_dtype": "bf16"}],
    "diloco": [
        {"period": h, "value_dtype": code}
        for h, codes in (
            (30, ("fp32", "bf16", "int8", "int4")),
            (50, ("int8", "int4")),
            (100, ("int8", "int4")),
            (200, ("int4",)),
            (500, ("int4",)),
        )
        for code in codes
    ],
    "sparse_loco": [{"period": h} for h in (15, 30, 60, 120, 250)],
    "muloco": [{"period": 30, "value_dtype": "int4"}, {"period": 30}, {"period": 100}],
    "streaming_diloco": [
        {"period": h, "delay": d} for h, d in ((30, 1), (30, 5), (100, 1), (100, 5))
    ],
    "decoupled_momentum": [{"period": h} for h in (32, 64, 128, 256)],
    "demo": [{"topk": k, "schedule.delay": d} for k, d in ((32, 0), (32, 1), (16, 1), (8, 1))],
    "random": [{}, {"schedule.delay": 1}],
}
"""Method -> settings, from the closest to an all-reduce to the furthest. The order of methods is the
order of recommendation.

Periods: 30 is the one of the scaling laws for DiLoCo (arXiv 2503.09799) and of SparseLoCo at 72 B
(2603.08163), 15 to 250 are SparseLoCo's; INTELLECT-1 took 100 with int8 (2412.01152), DiLoCo 500.
Delays up to 5 cost little (2501.18512).
"""

PARITY, LONG = 30, 100
"""Steps up to which periods count as those of parity, and as long ones."""


@dataclass(frozen=True)
class Choice:
    """What to start with.

    Attributes:
        row: its costs. config: the same as row.config. reason: a sentence. reached: whether it
            keeps the wanted share of the time in the memory that there is.
    """

    row: Row
    config: ExchangeConfig
    reason: str
    reached: bool


def chosen_rows(situation: Situation, keep_inner: str | None = None) -> list[Row]:
    """For each method the first of its settings that reaches the target and fits; else the one that
    keeps the most.

    Args:
        keep_inner: name of an inner optimizer that must stay ("adamw"), or None for any.
    """
    out = []
    for name in LADDERS:
        rows = _tried(situation, name, keep_inner)
        best: Row | None = None
        for row in rows:
            if best is None or row.compute_utilisation > best.compute_utilisation + 1e-9:
                best = row
            if _reaches(row, situation):
                best = row
                break
        if best is not None:
            out.append(best)
    return out


def _tried(situation: Situation, name: str, keep_inner: str | None) -> Iterator[Row]:
    for changes in LADDERS[name]:
        config = preset(name, **changes)
        if name in ("demo", "random") and keep_inner == "adamw":
            config = preset(name, inner_optimizer="adamw", **changes)
        if _allowed(config, keep_inner):
            yield plan_row(situation, config, chosen=True)


def choose(rows: Sequence[Row], situation: Situation, keep_inner: str | None = None) -> Choice:
    """One of the rows.

    Args:
        rows: of `plan_rows`; where the planner has chosen settings, only these count.
        keep_inner: name of an inner optimizer that must stay ("adamw"), or None for any.

    Raises:
        ValueError: no row has a configuration that keeps the inner optimizer.
    """
    own = [r for r in rows if r.config is not None and _allowed(r.config, keep_inner)]
    own = [r for r in own if r.chosen] or own
    if not own:
        raise ValueError(
            f"no setting keeps the inner optimizer {keep_inner!r}: allow another one, or add "
            "presets that are defined for it"
        )
    order = list(LADDERS)
    fits = [r for r in own if _fits(r, situation)]
    good = [r for r in fits if _reaches(r, situation) and not _loses(r, situation)]
    if good:
        row = min(
            good,
            key=lambda r: (_level(r), order.index(r.name) if r.name in order else len(order)),
        )
    else:
        row = max(fits or own, key=lambda r: r.compute_utilisation)
    assert row.config is not None
    return Choice(
        row, row.config, _reason(row, rows, situation, bool(good), bool(fits)), bool(good)
    )


def _allowed(config: ExchangeConfig, keep_inner: str | None) -> bool:
    names = config.inner_optimizers
    return keep_inner is None or keep_inner in names or "any" in names or "as_is" in names


def _fits(row: Row, s: Situation) -> bool:
    return s.memory_bytes is None or row.device_bytes <= s.memory_bytes


def _reaches(row: Row, s: Situation) -> bool:
    return row.compute_utilisation >= s.target and _fits(row, s)


def _loses(row: Row, s: Situation) -> bool:
    """A gather of sparse payloads that sends more than an all-reduce of everything."""
    assert row.config is not None
    gathers = any(c.codec.indexed for c in row.config.channels)
    ring = ring_all_reduce_bytes(s.islands, 2 * s.parameters)
    return gathers and row.bytes_per_exchange >= ring


def _level(row: Row) -> int:
    """0 for periods of parity, 1 for long ones, 2 beyond."""
    assert row.config is not None
    period = max(c.schedule.sync_every for c in row.config.channels)
    return (period > PARITY) + (period > LONG)


def _reason(row: Row, rows: Sequence[Row], s: Situation, good: bool, fits: bool) -> str:
    assert row.config is not None
    what = f"{row.name} ({with_delay(row.config)})"
    keeps = f"{row.compute_utilisation:.1%} of the time for compute"
    hsdp = named(rows, "hsdp")
    beside = f", where HSDP keeps {hsdp.compute_utilisation:.1%}" if hsdp is not None else ""
    link = str(s.link) if s.link else "a link without limit"
    if not fits:
        return (
            f"nothing fits into {s.memory_bytes or 0:.3g} bytes: {what} takes "
            f"{row.device_bytes / 1e9:.1f} GB of a device and keeps {keeps} on {link}{beside}; "
            "take more shards, or offload_outer_state"
        )
    if not good:
        return f"nothing keeps {s.target:.0%} on {link}: {what} keeps the most, {keeps}{beside}"
    if row.name == "full":
        return (
            f"{what} keeps {keeps} on {link}{beside}: nothing is lost to compression, so there is "
            "no need for more"
        )
    return (
        f"{what} keeps {keeps} on {link}{beside}, and is the setting nearest to an all-reduce that "
        f"keeps {s.target:.0%}"
    )
