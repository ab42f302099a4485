"""Compute utilisation over the rate of the link, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..comm.link import Link
from ..config.load import preset
from ..config.presets import presets
from ..config.schema import ExchangeConfig
from ..errors import counted
from .rows import HSDP, rate_words, settings, utilisation
from .situation import Situation

POINTS = 60
FLAT = 0.005
"""The picture begins and ends where all curves lie so near to where they begin and end."""


@dataclass(frozen=True)
class Curve:
    """Compute utilisation of one setting at each of the rates; `recommended` stands out."""

    label: str
    values: list[float]
    baseline: bool = False
    recommended: bool = False


def draw(
    path: str,
    situation: Situation,
    exchanges: list[ExchangeConfig | str] | None = None,
    links: Sequence[Link] = (),
    recommended: Sequence[ExchangeConfig] = (),
) -> None:
    """Write the picture; its ending says the format.

    Args:
        exchanges: "hsdp" or configurations; None: HSDP and all presets at their published settings.
        links: whose rates are marked.
        recommended: settings that the planner chose for these links.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib: pip install 'fsdp-demo[report]' ({error})"
        ) from None
    marked = {link.bits_per_second for link in links if link.bits_per_second}
    rates, curves = _curves(situation, exchanges, recommended, marked)
    figure, axes = pyplot.subplots(figsize=(12, 5.5))
    for i, curve in enumerate(curves):
        axes.plot([r / 1e9 for r in rates], curve.values, label=curve.label, **_style(curve, i))
    for rate in marked:
        axes.axvline(rate / 1e9, color="grey", linestyle=":", linewidth=1)
        axes.annotate(
            rate_words(rate / 1e9),
            (rate / 1e9, 0.01),
            xytext=(-3, 0),
            textcoords="offset points",
            fontsize=8,
            rotation=90,
            ha="right",
            va="bottom",
        )
    axes.axhline(situation.target, color="grey", linestyle=":", linewidth=1)
    axes.annotate(
        f"target {situation.target:.0%}",
        (rates[0] / 1e9, situation.target),
        xytext=(2, -3),
        textcoords="offset points",
        fontsize=8,
        va="top",
    )
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1e9, rates[-1] / 1e9)
    axes.set_xlabel(
        "Gbit/s of an island's line"
        if situation.islands_per_uplink == 1
        else f"Gbit/s of an uplink of {situation.islands_per_uplink} islands"
    )
    axes.set_ylabel("compute utilisation")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_title(_title(situation), fontsize=10)
    figure.tight_layout()
    figure.savefig(Path(path), dpi=120)
    pyplot.close(figure)


def _curves(
    situation: Situation,
    exchanges: list[ExchangeConfig | str] | None,
    recommended: Sequence[ExchangeConfig],
    marked: set[float],
) -> tuple[list[float], list[Curve]]:
    """The rates that the picture shows, and a curve for each setting. Rates at both ends where no
    curve moves are left out unless they are marked.
    """
    wanted: list[ExchangeConfig | str] = [HSDP, *map(preset, presets())]
    wanted = wanted if exchanges is None else list(exchanges)
    for better in recommended:
        if better not in wanted:
            wanted.append(better)
    rates = [10 ** (6 + 6 * i / (POINTS - 1)) for i in range(POINTS)]  # 1 Mbit/s to 1 Tbit/s
    curves = []
    for one in wanted:
        config = None if isinstance(one, str) else one
        values = [
            utilisation(replace(situation, link=Link(rate, situation.link.rtt)), config)
            for rate in rates
        ]
        chosen = config is not None and config in recommended
        label = HSDP if config is None else f"{config.preset} ({settings(config)})"
        label = f"recommended: {label}" if chosen else label
        curves.append(Curve(label, values, config is None, chosen))
    shown = [
        i
        for i in range(POINTS)
        for c in curves
        if min(abs(c.values[i] - c.values[0]), abs(c.values[i] - c.values[-1])) > FLAT
    ]
    shown += [i for i in range(POINTS - 1) if any(rates[i] <= m <= rates[i + 1] for m in marked)]
    first, last = max(min(shown, default=0) - 1, 0), max(shown, default=POINTS) + 2
    cut = [replace(curve, values=curve.values[first:last]) for curve in curves]
    return rates[first:last], cut


def _style(curve: Curve, i: int) -> dict[str, Any]:
    """The baseline is black, what is recommended thick; the others change between four forms of
    lines, so that one that lies on another is seen in its gaps.
    """
    if curve.recommended:
        return {"color": "crimson", "linewidth": 3}
    return {
        "color": "black" if curve.baseline else f"C{i % 10}",
        "linestyle": ("-", "--", ":", "-.")[i % 4],
        "linewidth": 1.3,
    }


def _title(s: Situation) -> str:
    return (
        f"{float(f'{s.parameters / 1e6:.3g}'):,g} M parameters, {s.islands} islands of "
        f"{counted(s.shards, 'shard')}, step {s.step_seconds:.3g} s, "
        f"round trip {s.link.rtt * 1e3:g} ms"
    )
