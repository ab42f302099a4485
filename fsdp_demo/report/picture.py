"""A report as a png: the panels of the page, drawn by matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import timeline
from .axis import Axis, axis, log_axis
from .figures import curve, far_apart, figures, still, still_everywhere
from .load import Run
from .words import times

COLOURS = (
    "#0b6e99",
    "#c2570c",
    "#2a7d3f",
    "#a63d97",
    "#b3261e",
    "#6b6f00",
    "#5151cf",
    "#7a4b2b",
)
MARKS = {"lost": ("v", "#b3261e"), "joined": ("^", "#2a7d3f"), "skipped round": ("D", "#c2570c")}


def available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(runs: Sequence[Run], path: str | Path) -> None:
    """Write the png.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if not available():
        raise ValueError("--png needs matplotlib: pip install 'fsdp_demo[report]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = [(run, name, number, bars) for run in runs for name, number, bars in timeline.rows(run)]
    low = 1.2 + 0.28 * len(lanes)
    figure = Figure(figsize=(12, 6.6 + low), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 3, height_ratios=[3.4, 2.2, low])
    for i, against in enumerate(("tokens", "seconds", "bytes_sent")):
        _losses(figure.add_subplot(grid[0, i]), runs, against)
    _still(figure.add_subplot(grid[1, :]), runs)
    _exchanges(figure.add_subplot(grid[2, :]), runs, lanes)
    figure.suptitle(_title(runs), fontsize=11)
    figure.savefig(path, dpi=110)


def _title(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    found = figures(runs[0])
    saved = f", {times(found.ratio)} fewer bytes than a bf16 all-reduce" if found.ratio else ""
    return f"{found.preset}: {found.shape}{saved}"


def _plain(panel: Any, across: Axis) -> None:
    panel.set_xlim(across.low, max(across.high, across.low + 1e-9))
    panel.set_xticks([v for v, _ in across.ticks], [text for _, text in across.ticks])
    panel.set_xlabel(across.label)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _name(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"


def _losses(panel: Any, runs: Sequence[Run], against: str) -> None:
    values: list[float] = []
    by_ratio = against == "bytes_sent" and far_apart(runs)
    for number, run in enumerate(runs):
        found, colour = curve(run, against), COLOURS[number % 8]
        held, name = bool(found.validation), _name(run.name)
        thin: dict[str, Any] = {"lw": 1.0 if held else 1.6, "alpha": 0.5 if held else 1.0}
        dots: dict[str, Any] = {"lw": 1.6, "marker": "o", "ms": 4}
        for kind, points, style in (
            ("training", found.training, thin),
            ("validation", found.validation, dots),
        ):
            if by_ratio:
                points = [p for p in points if p[0] > 0]
            if points:
                # a run is named once, by its strong line
                label = kind if len(runs) == 1 else name if style is dots or not held else "_"
                panel.plot(*zip(*points, strict=True), color=colour, label=label, **style)
                values += [x for x, _ in points]
    if by_ratio:
        panel.set_xscale("log")
        panel.minorticks_off()
    _plain(
        panel,
        log_axis(against, [v for v in values if v > 0]) if by_ratio else axis(against, values),
    )
    panel.set_ylabel("loss (nats per token)" if against == "tokens" else "")
    if values and against == "tokens":
        panel.figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=4)


def _still(panel: Any, runs: Sequence[Run]) -> None:
    lines = [(_name(run.name), still_everywhere(run)) for run in runs]
    if len(runs) == 1:
        lines = [(island.name, still(island)) for island in runs[0].islands]
    values = [0.0]
    for number, (name, points) in enumerate(lines):
        values += [x for x, _ in points]
        share = [100 * y for _, y in points]
        panel.plot([x for x, _ in points], share, color=COLOURS[number % 8], lw=1.4, label=name)
    _plain(panel, axis("seconds", values, count=9))
    panel.set_ylim(bottom=0)
    panel.set_ylabel("training stood still (%)")
    if len(runs) == 1:
        panel.legend(frameon=False, fontsize=8, ncols=4)


def _exchanges(panel: Any, runs: Sequence[Run], lanes: Sequence[Any]) -> None:
    ends = [bar.end for *_, bars in lanes for bar in bars]
    for row, (_, _, number, bars) in enumerate(lanes):
        wire = [(bar.start, bar.end - bar.start) for bar in bars]
        waits = [(bar.end - bar.waiting, bar.waiting) for bar in bars if bar.waiting > 0]
        panel.broken_barh(wire, (row - 0.4, 0.8), color=COLOURS[number % 8], alpha=0.55, lw=0)
        panel.broken_barh(waits, (row + 0.05, 0.35), color="#1c2733", alpha=0.75, lw=0)
    for run in runs:
        for event in timeline.marks(run):
            shape, colour = MARKS.get(event["kind"], ("s", "#5a6775"))
            panel.plot(event["seconds"], len(lanes), shape, color=colour, ms=5)
            ends.append(event["seconds"])
    _plain(panel, axis("seconds", ends, count=9))
    names = [name if len(runs) == 1 else f"{_name(run.name)}: {name}" for run, name, *_ in lanes]
    panel.set_yticks(range(len(lanes) + 1), [*names, "events"], fontsize=8)
    panel.set_ylim(len(lanes) + 0.6, -0.6)
