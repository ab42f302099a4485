"""Which setting to start with: for each method the one closest to training with an all-reduce that
keeps the wanted share of the time, then the method.

The order is one of evidence (docs/plan.md): an all-reduce; then what was trained with a billion
parameters and more, at the periods of its paper; then longer periods. What was measured on tiny
models only is recommended for such models only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...config.fragments import layer_of
from ...config.load import preset
from ...config.methods import presets
from ...config.schema import ExchangeConfig
from ...errors import counted
from ...net.link import Link, parse_rtt
from ...peers.header import ring_all_reduce_bytes
from .gaps import SMALL
from .mix import with_own_steps
from .rows import HSDP, Row, gbit_s, hsdp_row, plan_row, rate_words
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
"""Method -> settings, from the closest to an all-reduce to the furthest. The order of methods is
that of recommendation.

Periods: 30 is the one of the scaling laws for DiLoCo (arXiv 2503.09799) and of SparseLoCo at 72 B
(2603.08163), 15 to 250 are SparseLoCo's; INTELLECT-1 took 100 with int8 (2412.01152), DiLoCo 500.
Delays up to 5 cost little (2501.18512).
"""

STUDIED: dict[str, _Forms] = {
    "sign_loco": [{"period": 5, "switch": 0.0}],
    "sign_muloco": [{"period": 5, "beta": 0.6}, {"period": 24}, {"period": 48}],
}
"""What ended lowest in our study: of all that have AdamW or SGD inside, and with Muon. For runs of
its kind the first comes right behind the all-reduce, the second before `muloco`. With longer
periods `sign_loco` lost there, and so short a run has no use for its second phase.
"""

VALUES = 360
"""Values of a block that all islands together send under `sign_loco`: its 90 of four. In our study
eight with 45 each and sixteen with 22 did as well as with 90, with fewer bytes.
"""

SHORT_RUN = {"sign_loco": 1000, "sign_muloco": 2560}
"""Steps up to which a run is of that kind: with 480 and 960 `sign_loco` ended as the all-reduce,
with 480 to 2,560 `sign_muloco` below that with AdamW.
"""

SHORTER = (20, 10, 5)
"""Where a run is too short for a ladder's first period, these are tried first: those with `ROUNDS`
rounds, the longest first. In our study DiLoCo with periods 5, 10 and 20 ended within 0.08, on one
seed, so the fewest bytes decide.
"""

ROUNDS = 20
"""Rounds of exchange that a run should have. Momentum of 0.9 takes as many to rise."""

COMPRESSED_GRADIENTS = ("demo", "random")
"""They exchange at every step, which says nothing about how near to an all-reduce they are: in our
study sparse_loco is nearer than demo with period 5 (not with 1, 2, 10 and 20), and the delay and
the smaller k of the ladder were never tried at size."""

MUON = ("muon", "muonadamw")
INNER = {"sgd": "SGD", "muonadamw": "Muon with AdamW"}
TIGHT = 0.8
"""Share of the memory beyond which state leaves little for activations."""

PARITY, LONG = 30, 100
"""Steps up to which periods count as those of parity, and as long ones."""


@dataclass(frozen=True)
class Choice:
    """A setting to start with, and the reason.

    Attributes:
        row: its costs. config: the same as row.config. reason: a sentence. reached: whether it
            keeps the wanted share of the time in the memory that there is.
    """

    row: Row
    config: ExchangeConfig
    reason: str
    reached: bool


def plan_rows(
    situation: Situation,
    exchanges: Iterable[str | ExchangeConfig] | None = None,
    keep_inner: str | None = None,
) -> list[Row]:
    """The costs of several settings, a row each.

    Args:
        exchanges: names of presets ("hsdp" for the baseline) or configurations; None: HSDP, all
            presets at their published settings, and for each method of `ladders` the
            settings that the planner would choose. Fragments are left out for a model whose
            parameter names hold no layer numbers.
        keep_inner: the inner optimizer that those must keep, or None.
    """
    if exchanges is None:
        known = [HSDP, *(name for name in presets() if cuts(preset(name), situation))]
        return plan_rows(situation, known) + chosen_rows(situation, keep_inner)
    return [
        hsdp_row(situation)
        if one == HSDP
        else plan_row(situation, preset(one) if isinstance(one, str) else one)
        for one in exchanges
    ]


def chosen_rows(situation: Situation, keep_inner: str | None = None) -> list[Row]:
    """For each method the first of its settings that reaches the target and fits; else the one that
    keeps the most.

    Args:
        keep_inner: name of an inner optimizer that must stay ("adamw"), or None for any.
    """
    out = []
    for name, ladder in ladders(situation).items():
        rows = _tried(situation, name, ladder, keep_inner)
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


def ladders(situation: Situation) -> dict[str, _Forms]:
    """Method -> its settings to try, the method to be recommended first at the head."""
    steps = situation.length
    if situation.parameters >= SMALL or steps is None:
        return LADDERS
    out = {}
    for name, ladder in LADDERS.items():
        if name == "muloco" and steps <= SHORT_RUN["sign_muloco"]:
            out["sign_muloco"] = STUDIED["sign_muloco"]
        out[name] = ladder
        if name == "full" and steps <= SHORT_RUN["sign_loco"]:
            share = max(1, VALUES // situation.islands)
            fewer = {"topk": share} if share < preset("sign_loco").channels[0].codec.topk else {}
            out["sign_loco"] = [{**form, **fewer} for form in STUDIED["sign_loco"]]
    return out


def _tried(
    situation: Situation, name: str, ladder: _Forms, keep_inner: str | None
) -> Iterator[Row]:
    for changes in _for_length(ladder, situation.length):
        config = preset(name, **changes)
        if name in ("demo", "random") and keep_inner == "adamw":
            config = preset(name, inner_optimizer="adamw", **changes)
        config = with_own_steps(situation.machines, rising(config, situation.length))
        if _allowed(config, keep_inner) and cuts(config, situation):
            yield plan_row(situation, config, chosen=True)


def rising(config: ExchangeConfig, length: float | None) -> ExchangeConfig:
    """For a run of so many steps: what leads our study has outer momentum that rises over half of
    the rounds, or over the preset's number if that is less.
    """
    if length is None or config.preset not in STUDIED:
        return config
    (channel,) = config.channels
    if not channel.applier.momentum_warmup:
        return config
    half = max(1, int(length / channel.schedule.sync_every) // 2)  # 0 would be a constant one
    return config.changed({"applier.momentum_warmup": min(half, channel.applier.momentum_warmup)})


def _for_length(forms: _Forms, length: float | None) -> _Forms:
    """The settings to try of a ladder, for a run of so many steps."""
    first = forms[0].get("period", 1)
    if length is None or length >= ROUNDS * first:
        return forms
    short = [f for f in forms if f.get("period", 1) == first and "delay" not in f]
    periods = [h for h in SHORTER if h < first and ROUNDS * h <= length] or SHORTER[-1:]
    return [{**f, "period": h} for h in periods if h < first for f in short] + forms


def choose(rows: Sequence[Row], situation: Situation, keep_inner: str | None = None) -> Choice:
    """The row to start with.

    Args:
        rows: rows of `plan_rows`; where the planner has chosen settings, only these count.
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
    place = {name: i for i, name in enumerate(_order(keep_inner, situation))}
    fits = [r for r in own if _fits(r, situation)]
    fits = [r for r in fits if not _loses(r, situation)] or fits
    good = [r for r in fits if _reaches(r, situation)]
    if good:
        row = min(
            good,
            key=lambda r: (_rounds_missing(r, situation), _level(r), place.get(r.name, len(place))),
        )
    elif fits:
        row = max(fits, key=lambda r: r.compute_utilisation)
    else:
        row = min(own, key=lambda r: r.device_bytes)
    assert row.config is not None
    return Choice(
        row,
        row.config,
        _reason(row, rows, situation, bool(good), bool(fits)) + ("" if keep_inner else _inner(row)),
        bool(good),
    )


def _order(keep_inner: str | None, situation: Situation) -> list[str]:
    """Methods, best first; where Muon must stay, those made for it come behind the all-reduce."""
    order = list(ladders(situation))
    if keep_inner not in MUON:
        return order
    made = [name for name in order if preset(name).inner_optimizers[0] in MUON]
    first, *rest = (name for name in order if name not in made)
    return [first, *made, *rest]


def cuts(config: ExchangeConfig, s: Situation) -> bool:
    """Whether the model has the layers that fragments are cut between, if there are fragments."""
    layered = any(layer_of(n) is not None for n, _ in s.tensors)
    return layered or all(c.fragments is None for c in config.channels)


def _allowed(config: ExchangeConfig, keep_inner: str | None) -> bool:
    names = config.inner_optimizers
    if keep_inner is not None and names[0] in MUON:  # AdamW is there for what is no matrix
        return keep_inner in MUON
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
    """0 for parity, 1 for long periods and what is far behind in our study, 2 beyond."""
    assert row.config is not None
    if row.name in COMPRESSED_GRADIENTS:
        return 1
    period = max(c.schedule.sync_every for c in row.config.channels)
    return (period > PARITY) + (period > LONG)


def _rounds_missing(row: Row, s: Situation) -> float:
    """Rounds that a run of known length lacks of `ROUNDS`."""
    assert row.config is not None
    period = max(c.schedule.sync_every for c in row.config.channels)
    return 0.0 if s.length is None else max(0.0, ROUNDS - s.length / period)


def _reason(row: Row, rows: Sequence[Row], s: Situation, good: bool, fits: bool) -> str:
    assert row.config is not None
    what = f"{row.name} ({row.settings})"
    keeps = f"{row.compute_utilisation:.1%} of the time for compute"
    hsdp = next((r for r in rows if r.name == HSDP), None)
    beside = f", where HSDP keeps {hsdp.compute_utilisation:.1%}" if hsdp is not None else ""
    link = said(s)
    if not fits:
        return (
            f"nothing fits into {(s.memory_bytes or 0) / 1e9:.3g} GB: {what} takes the least, "
            f"{row.device_bytes / 1e9:.1f} GB of a device without activations, and keeps {keeps} "
            f"on {link}{beside}; take more shards, or a device with more memory"
        )
    if not good:
        return (
            f"nothing keeps {s.target:.0%} on {link}: {what} keeps the most, {keeps}{beside}"
            f"{_needs(row, s)}{_more_than_all(row, s)}{_few_rounds(row, s)}"
        )
    tight = _tight(row, s) + _more_than_all(row, s) + _few_rounds(row, s)
    if hsdp is not None and hsdp.compute_utilisation >= s.target and _fits(hsdp, s):
        return (
            f"HSDP itself keeps {hsdp.compute_utilisation:.1%} on {link}: train one world over all "
            f"islands, without an exchange; else {what} keeps {keeps}{tight}"
        )
    if row.name == "full":
        return (
            f"{what} keeps {keeps} on {link}{beside}: nothing is lost to compression, so there is "
            f"no need for more{tight}"
        )
    among = "" if row.chosen else " of these"
    if row.name in STUDIED:
        tight = f"; it is ours, from no paper, for small models and short runs{tight}"
    room = "" if s.memory_bytes is None else f" and fits into {s.memory_bytes / 1e9:.3g} GB"
    return (
        f"{what} keeps {keeps} on {link}{beside}. It is the first{among} that keeps {s.target:.0%}"
        f"{room} in the order of evidence: an all-reduce, methods at periods up to {PARITY}, up to "
        f"{LONG}, then longer ones; gaps in brackets do not count (docs/plan.md){tight}"
    )


def said(s: Situation) -> str:
    """The link in words."""
    if s.link.bits_per_second is None:
        trip = f" and {s.link.rtt * 1e3:g} ms" if s.link.rtt else ""
        return f"a link without limit{trip}"
    shared = f" shared by {s.islands_per_uplink} islands" if s.islands_per_uplink > 1 else ""
    # a measured one has digits that say nothing
    rate = float(f"{s.link.bits_per_second:.3g}")
    shown = Link(rate, parse_rtt(f"{s.link.rtt * 1e3:.3g}ms"))
    return f"a link of {shown}{shared}"


def _needs(row: Row, s: Situation) -> str:
    """The rate with which a row would reach the target."""
    rate = gbit_s(s, row.config, s.target)
    if rate is None:
        slow = "the round trip and compression take" if s.link.rtt else "compression takes"
        return f"; no rate is enough for it: {slow} too long"
    return f"; it would keep {s.target:.0%} on {rate_words(rate)}"


def _tight(row: Row, s: Situation) -> str:
    """A warning where hardly anything is left for activations."""
    if s.memory_bytes is None or row.device_bytes <= TIGHT * s.memory_bytes:
        return ""
    left = (s.memory_bytes - row.device_bytes) / 1e9
    return f"; only {left:.1f} GB are left for activations"


def _more_than_all(row: Row, s: Situation) -> str:
    """A warning where the gather sends more than an all-reduce, since all rows do."""
    if not _loses(row, s):
        return ""
    return "; its gather sends more than an all-reduce of every value: send fewer (topk), or all"


def _few_rounds(row: Row, s: Situation) -> str:
    """A warning where the run has few rounds of this row."""
    missing = _rounds_missing(row, s)
    if not missing or s.length is None:
        return ""
    run, rounds = counted(round(s.length), "step"), counted(round(ROUNDS - missing), "round")
    return f"; a run of {run} has {rounds} of it, which is few"


def _inner(row: Row) -> str:
    """The inner optimizer, where the method does not train with AdamW."""
    assert row.config is not None
    names = row.config.inner_optimizers
    if {"any", "as_is", "adamw"} & set(names) and names[0] != "muonadamw":
        return ""
    return f"; its inner optimizer is {INNER.get(names[0], names[0])} (fsdp_demo.base_optimizer)"
