"""A chart of lines as SVG text. Colours are classes: the page says what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .axis import Axis, axis
from .figures import Points

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 46
MOST = 240  # points of a line; more are thinned out


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: for the text over a point. colour: its number. faint: drawn thin; dots: with a dot
            at each point.
    """

    name: str
    points: Points
    colour: int
    faint: bool = False
    dots: bool = False


def chart(lines: Sequence[Line], x: str, y: str, zero: bool = False) -> str:
    """Lines over one another, with axes (`axis.UNITS`).

    Args:
        zero: the y axis begins at 0.
    """
    xs = [p[0] for line in lines for p in line.points]
    ys = [p[1] for line in lines for p in line.points]
    if not xs:
        return empty("nothing was written yet")
    across, up = axis(x, xs, count=5), axis(y, ys, zero=zero, count=5)
    parts = [_frame(across, up)]
    for line in sorted(lines, key=lambda one: not one.faint):
        parts.append(_drawn(line, across, up))
    title = f"{up.label} against {across.label}"
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def empty(text: str) -> str:
    """In the place of a chart that has nothing to show."""
    return f'<p class="empty">{escape(text)}</p>'


def _x(across: Axis, value: float) -> float:
    return LEFT + across.place(value) * (WIDTH - LEFT - RIGHT)


def _y(up: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - up.place(value) * (HEIGHT - TOP - BOTTOM)


def _frame(across: Axis, up: Axis) -> str:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, text in up.ticks:
        at = _y(up, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in across.ticks:
        at = _x(across, value)
        parts.append(
            f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 4}"/>'
        )
        parts.append(f'<text x="{at:.1f}" y="{floor + 17}" text-anchor="middle">{text}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    middle = (LEFT + right) / 2
    parts.append(
        f'<text class="label" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(across.label)}</text>"
    )
    return "".join(parts)


def _drawn(line: Line, across: Axis, up: Axis) -> str:
    points = thinned(line.points)
    if not points:
        return ""
    colour = f"c{line.colour % 8}" + (" dashed" if line.colour >= 8 else "")
    where = [(_x(across, x), _y(up, y)) for x, y in points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in where)
    kind = "faint" if line.faint else "strong"
    parts = [f'<polyline class="line {kind} {colour}" points="{path}"/>'] if len(points) > 1 else []
    for (a, b), (x, y) in zip(where, points, strict=True):
        text = f"{line.name}: {y:.4g} at {x:.6g}"
        radius, seen = (3, "dot") if line.dots or len(points) == 1 else (6, "hover")
        parts.append(
            f'<circle class="{seen} {colour}" cx="{a:.1f}" cy="{b:.1f}" r="{radius}">'
            f"<title>{escape(text)}</title></circle>"
        )
    return "".join(parts)


def thinned(points: Points, most: int = MOST) -> Points:
    """At most so many of the points, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
