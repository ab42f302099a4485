"""The pictures of a report, drawn by matplotlib (extra `report`) as SVG for the page, whose style
sheet says how colours look in light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from ...errors import size
from ...runlog.files import Run
from .figures import COLOURS, MARKS, TEXT, Points, curve, far_apart, marks, timeline_rows

GRID, STILL = "#e3e8ee", "#1c2733"
BY_NAME = {
    **{colour: f"var(--c{n})" for n, colour in enumerate(COLOURS)},
    TEXT: "var(--soft)",
    GRID: "var(--grid)",
    STILL: "var(--still)",
}
"""What the page calls a colour: it is another one in the dark."""
UNITS: dict[str, tuple[tuple[float, float, str], ...]] = {
    "step": (),
    "tokens": ((1e9, 1e9, "tokens (G)"), (1e6, 1e6, "tokens (M)"), (1e3, 1e3, "tokens (k)")),
    "seconds": ((3600, 3600, "hours"), (120, 60, "minutes")),
    "bytes_sent": tuple(
        (f, f, f"{name} sent by each island")
        for f, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    ),
}
"""From which value on an axis is in which unit: (least, divisor, label)."""
PLAIN = {
    "step": "optimizer steps",
    "tokens": "tokens",
    "seconds": "seconds",
    "bytes_sent": "bytes sent by each island",
}
MANY = 150
"""Exchanges of a row from which on its bars are points of one image."""


def available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def _panel(width: float, height: float) -> Any:
    """Empty axes of a figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def _svg(panel: Any, name: str, kind: str) -> str:
    """The figure of a panel as the text of an svg element, without a background; text stays text.

    Args:
        name: keeps references within it apart from those of other pictures of the page.
        kind: class of the element in the page's style sheet.
    """
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        panel.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", out.getvalue(), flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nobody refers to these
    text = text[text.index("<svg") :].replace("<svg ", f'<svg class="{kind}" role="img" ', 1)
    text = re.sub(r'(<svg [^>]*?)width="[^"]*" ', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*" ', r"\1", text, count=1)
    for colour, variable in BY_NAME.items():
        text = text.replace(colour, variable)
    return text


def _plain(panel: Any, what: str, values: Sequence[float]) -> None:
    """An x axis from 0 in the unit that fits `values`, and no frame."""
    from matplotlib.ticker import FuncFormatter

    top = max(values, default=0.0)
    _, factor, label = next((u for u in UNITS[what] if top >= u[0]), (0.0, 1.0, PLAIN[what]))
    panel.set_xlim(0, 1.02 * top or 1)  # the last point is whole
    panel.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / factor:g}"))
    if factor == 60:  # 300 seconds are 5 minutes; 250 are nothing that people read
        panel.xaxis.get_major_locator().set_params(steps=[1.2, 3, 6])
    _bare(panel, label)


def _by_ratio(panel: Any, what: str) -> None:
    """An x axis by powers of ten."""
    from matplotlib.ticker import FuncFormatter

    panel.set_xscale("log")
    panel.minorticks_off()
    panel.xaxis.set_major_formatter(FuncFormatter(lambda v, _: size(v)))
    _bare(panel, f"{PLAIN[what]}, by powers of ten")


def _bare(panel: Any, label: str) -> None:
    panel.set_xlabel(label)
    panel.grid(color=GRID)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[:].set_color(TEXT)
    panel.tick_params(color=TEXT, labelcolor=TEXT, labelsize=9)
    for text in (panel.xaxis.label, panel.yaxis.label):
        text.set(color=TEXT, fontsize=9)


def losses(runs: Sequence[Run], against: str) -> str:
    """Loss of runs against "tokens", "seconds" or "bytes_sent", as SVG."""
    panel, values = _panel(3.9, 2.9), list[float]()
    by_ratio = against == "bytes_sent" and far_apart(runs)
    for number, run in enumerate(runs):
        found, colour = curve(run, against), COLOURS[number % 8]
        held = bool(found.validation)
        thin: dict[str, Any] = {"lw": 1.0 if held else 1.6, "alpha": 0.5 if held else 1.0}
        dots: dict[str, Any] = {"lw": 1.6, "marker": "o", "ms": 4}
        for points, style in ((found.training, thin), (found.validation, dots)):
            if by_ratio:
                points = [p for p in points if p[0] > 0]
            if points:
                panel.plot(*zip(*points, strict=True), color=colour, **style)
                values += [x for x, _ in points]
    panel.set_ylabel("loss (nats per token)")
    if by_ratio:
        _by_ratio(panel, against)
    else:
        _plain(panel, against, values)
    return _svg(panel, against, "chart")


def lines(each: Sequence[Points], against: str, label: str, kind: str = "chart") -> str:
    """One line for each island or run, against "step" or "seconds", as SVG.

    Args:
        label: of the y axis, and the name of the picture. kind: "chart" or "wide".
    """
    panel = _panel(11.5, 2.6) if kind == "wide" else _panel(3.9, 2.9)
    for number, points in enumerate(each):
        x, y = [x for x, _ in points], [y for _, y in points]
        panel.plot(x, y, color=COLOURS[number % 8], lw=1.4)
    panel.set_ylim(bottom=0)
    panel.set_ylabel(label)
    _plain(panel, against, [x for points in each for x, _ in points])
    return _svg(panel, re.sub(r"\W+", "-", label), kind)


def exchanges(run: Run) -> str:
    """The messages and events of a run over time, as SVG."""
    rows = timeline_rows(run)
    panel = _panel(11.5, 1.2 + 0.3 * len(rows))
    ends = [bar.end for _, _, bars in rows for bar in bars]
    for row, (_, number, bars) in enumerate(rows):
        wire = [(bar.start, bar.end - bar.start) for bar in bars]
        waits = [(bar.end - bar.waiting, bar.waiting) for bar in bars if bar.waiting > 0]
        style = {"lw": 0, "rasterized": len(bars) > MANY}
        panel.broken_barh(wire, (row - 0.4, 0.8), color=COLOURS[number % 8], alpha=0.55, **style)
        panel.broken_barh(waits, (row + 0.05, 0.35), color=STILL, alpha=0.75, **style)
    for event in marks(run):
        mark = MARKS[event["kind"]]
        panel.plot(event["seconds"], len(rows), mark.marker, color=mark.colour, ms=5)
        ends.append(event["seconds"])
    ends += [line["seconds"] for island in run.islands for line in island.lines[-1:]]
    panel.set_yticks(range(len(rows) + 1), [*(name for name, _, _ in rows), "events"])
    panel.set_ylim(len(rows) + 0.6, -0.6)
    _plain(panel, "seconds", ends)
    return _svg(panel, run.name, "wide")
