"""Pictures of a table of the study, as svg: loss over bytes with the Pareto line, loss over tokens,
and intervals of the paired differences. matplotlib is the extra `report`.

A method has one colour in all of them. With Muon inside its points are triangles and its lines are
dashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study.stats import Row, pareto

DARK, ACCENT = "#1f2933", "#0b6e99"
COLOURS = {
    "full": DARK,
    "sign_loco": "#d1495b",
    "sign_muloco": "#2ec4b6",
    "muloco": ACCENT,
    "diloco": "#edae49",
    "streaming_diloco": "#b5651d",
    "sparse_loco": "#6a994e",
    "decoupled_momentum": "#274c1e",
    "demo": "#7b2cbf",
    "random": "#c77dff",
    "stride": "#e0aaff",
    "local_sgd": "#8d99ae",
    "local_adam": "#5c677d",
    "desloc": "#4cc9f0",
}
OTHER = "#adb5bd"
MOST = 0.6
"""Nats above the best from which on a row stands at the edge of a picture, with its number."""

PLACES = [(5, 3, "left"), (5, -9, "left"), (-5, 3, "right"), (-5, -9, "right"), (5, 11, "left")]
"""Where the label of a point may stand: points to the right, points up, alignment."""


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


def colour(name: str) -> str:
    """Of a method, by the first word of a cell's name."""
    return COLOURS.get(name.split()[0], OTHER)


def has_muon(name: str) -> bool:
    words = name.split()
    return "muon" in words or (words[0].endswith("muloco") and "AdamW" not in words)


def over_bytes(rows: Sequence[Row], path: Path) -> Path:
    """Loss over the ratio of bytes to a bf16 all-reduce; the line joins what nothing beats. Beside
    tuned rows the others are hollow.
    """
    known = [r for r in rows if r.ratio and not r.failed]
    edge = min((r.loss for r in known), default=0.0) + MOST
    figure, axes = _pyplot().subplots(figsize=(9, 5.5))
    front = pareto(known)
    points = [(float(r.ratio or 1), min(r.loss, edge)) for r in known]
    line = [min(r.loss, edge) for r in front]
    axes.plot([r.ratio for r in front], line, color=ACCENT, lw=1.2, zorder=1)
    some_tuned = any(r.name.endswith(" tuned") for r in known)
    for row, (x, y) in zip(known, points, strict=True):
        shape = "^" if has_muon(row.name) else "o"
        inner = "white" if some_tuned and not row.name.endswith(" tuned") else colour(row.name)
        big = 5 if row in front else 3.5
        axes.plot(x, y, shape, ms=big, color=colour(row.name), mfc=inner, zorder=2)
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than a bf16 all-reduce at every step")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.margins(x=0.08)
    _keys(axes, (r.name for r in known))
    labels = [
        r.name.removesuffix(" tuned") + (f" ({r.loss:.2f})" if r.loss > edge else "") for r in known
    ]
    order = sorted(range(len(known)), key=lambda n: (known[n] not in front, known[n].loss))
    _label(figure, axes, [(labels[n], points[n]) for n in order])
    return _finished(figure, axes, path)


def _keys(axes: Any, names: Iterable[str]) -> None:
    """A legend of the methods' colours."""
    from matplotlib.lines import Line2D

    methods = list(dict.fromkeys(name.split()[0] for name in names))
    marks = [
        Line2D([], [], ls="", marker="^" if has_muon(m) else "o", ms=4, color=colour(m), label=m)
        for m in methods
    ]
    axes.legend(handles=marks, frameon=False, fontsize=6.5, loc="upper left")


def _label(figure: Any, axes: Any, labels: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Texts beside their points, each where it covers nothing; who finds no place gets none."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    dots = [tuple(axes.transData.transform(point)) for _, point in labels]
    legend = axes.get_legend()
    taken = [legend.get_window_extent(renderer)] if legend else []
    for n, (text, point) in enumerate(labels):
        others = dots[:n] + dots[n + 1 :]
        for right, up, side in PLACES:
            made = axes.annotate(
                text,
                point,
                xytext=(right, up),
                textcoords="offset points",
                ha=side,
                fontsize=6.5,
                color=DARK,
            )
            box = made.get_window_extent(renderer)
            free = not any(box.overlaps(b) for b in taken)
            if free and not any(box.contains(*dot) for dot in others):
                taken.append(box)
                break
            made.remove()


def over_tokens(curves: dict[str, dict[str, list[float]]], path: Path) -> Path:
    """Training loss over tokens of one replica, from a tenth of them on; `curves`: name -> columns
    `tokens`, `loss`. Each line ends at its name.
    """
    figure, axes = _pyplot().subplots(figsize=(9, 5.5))
    ends = []
    for name, curve in curves.items():
        points = [
            (t, v)
            for t, v in zip(curve["tokens"], curve["loss"], strict=True)
            if v is not None and t >= 0.1 * curve["tokens"][-1]
        ]
        style = "--" if has_muon(name) else "-"
        axes.plot(*zip(*points, strict=True), style, lw=1.1, color=colour(name))
        # one point of a curve is noisy: its name stands at the mean of the last ones
        last = [v for _, v in points[-4:]]
        ends.append((sum(last) / len(last), name.removesuffix(" tuned")))
    axes.set_xlabel("bytes of text per replica")
    axes.set_ylabel("training loss (nats per byte)")
    low, high = axes.get_ylim()
    gap, before = (high - low) / 38, -math.inf
    for loss, name in sorted(ends):
        before = max(loss, before + gap)
        axes.annotate(
            name,
            (axes.get_xlim()[1], before),
            xytext=(2, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
            color=colour(name),
            annotation_clip=False,
        )
    return _finished(figure, axes, path)


def intervals(rows: Sequence[Row], path: Path) -> Path:
    """Paired differences to the reference with their 90 % intervals, the best on top. A hollow
    point has one seed.
    """
    known = [r for r in rows if not math.isnan(r.difference)]
    known.sort(key=lambda r: -r.difference)
    edge = MOST + min((r.difference for r in known), default=0.0)
    figure, axes = _pyplot().subplots(figsize=(8, 0.8 + 0.26 * len(known)))
    for y, row in enumerate(known):
        alone, far = math.isnan(row.half), row.difference > edge
        axes.errorbar(
            min(row.difference, edge),
            y,
            xerr=0.0 if alone or far else row.half,
            fmt=">" if far else "^" if has_muon(row.name) else "o",
            ms=4.5,
            color=colour(row.name),
            mfc="white" if alone else colour(row.name),
            capsize=2,
        )
        if far:
            axes.annotate(
                f"{row.difference:+.2f}",
                (edge, y),
                xytext=(-6, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=7,
            )
    axes.set_yticks(range(len(known)), [f"{r.group} {r.name}".strip() for r in known], fontsize=7)
    axes.axvline(0.0, color=DARK, lw=0.8)
    axes.set_xlabel("loss minus that of the reference, same seeds (nats per byte)")
    return _finished(figure, axes, path)


def _finished(figure: Any, axes: Any, path: Path) -> Path:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, path)
