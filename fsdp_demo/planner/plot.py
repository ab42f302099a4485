"""Compute utilisation over the rate of the link, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..comm.link import Link
from ..config.load import preset
from ..config.presets import presets
from ..config.schema import ExchangeConfig
from ..errors import counted
from .bandwidth import words
from .rows import HSDP, settings, utilisation
from .situation import Situation

POINTS = 60


def draw(
    path: str,
    situation: Situation,
    exchanges: list[ExchangeConfig | str] | None = None,
    links: Sequence[Link] = (),
) -> None:
    """Write the picture; its ending says the format.

    Args:
        links: whose rates are marked.

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
    wanted: list[ExchangeConfig | str] = [HSDP, *map(preset, presets())]
    wanted = wanted if exchanges is None else exchanges
    rates = [10 ** (6 + 6 * i / (POINTS - 1)) for i in range(POINTS)]  # 1 Mbit/s to 1 Tbit/s
    figure, axes = pyplot.subplots(figsize=(12, 5.5))
    for i, one in enumerate(wanted):
        config = None if isinstance(one, str) else one
        label = HSDP if config is None else f"{config.preset} ({settings(config)})"
        values = [
            utilisation(replace(situation, link=Link(rate, situation.link.rtt)), config)
            for rate in rates
        ]
        axes.plot(
            [r / 1e9 for r in rates],
            values,
            label=label,
            color="black" if config is None else None,
            linestyle=("-", "--", ":")[i // 10 % 3],
        )
    for rate in {link.bits_per_second for link in links if link.bits_per_second}:
        axes.axvline(rate / 1e9, color="grey", linestyle=":", linewidth=1)
        axes.annotate(
            words(rate / 1e9),
            (rate / 1e9, 0.01),
            xytext=(-3, 0),
            textcoords="offset points",
            fontsize=8,
            rotation=90,
            ha="right",
            va="bottom",
        )
    axes.set_xscale("log")
    axes.set_xlabel(
        "Gbit/s of an island's line"
        if situation.islands_per_uplink == 1
        else f"Gbit/s of an uplink of {situation.islands_per_uplink} islands"
    )
    axes.set_ylabel("compute utilisation")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    s = situation
    axes.set_title(
        f"{s.parameters / 1e6:,.3g} M parameters, {s.islands} islands of "
        f"{counted(s.shards, 'shard')}, step {s.step_seconds:.3g} s, "
        f"round trip {s.link.rtt * 1e3:g} ms",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(Path(path), dpi=120)
    pyplot.close(figure)
