"""Pictures of a table of the study, as svg: loss over bytes with the Pareto line, loss over tokens,
and intervals of the paired differences. matplotlib is the extra `report`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_stats import Row, pareto

DARK, LIGHT, ACCENT = "#1f2933", "#9aa5b1", "#0b6e99"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "study"  # the same picture from the same numbers
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    _pyplot().close(figure)
    return path


def over_bytes(rows: Sequence[Row], path: Path) -> Path:
    """Loss over the ratio of bytes to a bf16 all-reduce; the line joins what nothing beats."""
    known = [r for r in rows if r.ratio and not r.failed]
    figure, axes = _pyplot().subplots(figsize=(8, 5))
    front = pareto(known)
    axes.plot([r.ratio for r in front], [r.loss for r in front], color=ACCENT, lw=1.5)
    for row in known:
        axes.plot(row.ratio, row.loss, "o", ms=4, color=ACCENT if row in front else LIGHT)
        axes.annotate(
            row.name,
            (row.ratio, row.loss),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=6,
            color=DARK,
        )
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than a bf16 all-reduce at every step")
    axes.set_ylabel("validation loss (nats per byte)")
    return _finished(figure, axes, path)


def over_tokens(curves: dict[str, dict[str, list[float]]], path: Path) -> Path:
    """Training loss over tokens of one replica; `curves`: name -> columns `tokens`, `loss`."""
    figure, axes = _pyplot().subplots(figsize=(8, 5))
    for name, curve in curves.items():
        axes.plot(curve["tokens"], curve["loss"], lw=1.2, label=name)
    axes.set_xlabel("bytes of text per replica")
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend(frameon=False, fontsize=6)
    return _finished(figure, axes, path)


def intervals(rows: Sequence[Row], path: Path) -> Path:
    """Paired differences to the reference with their 90 % intervals, the best on top."""
    known = [r for r in rows if not math.isnan(r.difference)]
    known.sort(key=lambda r: -r.difference)
    figure, axes = _pyplot().subplots(figsize=(8, 0.8 + 0.26 * len(known)))
    for y, row in enumerate(known):
        half = 0.0 if math.isnan(row.half) else row.half
        axes.errorbar(row.difference, y, xerr=half, fmt="o", ms=4, color=ACCENT, capsize=2)
    axes.set_yticks(range(len(known)), [f"{r.group} {r.name}".strip() for r in known], fontsize=7)
    axes.axvline(0.0, color=DARK, lw=0.8)
    axes.set_xlabel("loss minus that of the reference, same seeds (nats per byte)")
    return _finished(figure, axes, path)


def _finished(figure: Any, axes: Any, path: Path) -> Path:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, path)
