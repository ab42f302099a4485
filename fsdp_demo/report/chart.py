"""A chart of lines as SVG text. Colours are classes: the page says what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from .axis import Axis, axis, log_axis
from .figures import Points

LEFT, RIGHT, TOP, BOTTOM = 48, 14, 30, 46
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


@dataclass(frozen=True)
class Box:
    """Where points lie in a picture of this size."""

    across: Axis
    up: Axis
    width: int
    height: int

    def x(self, value: float) -> float:
        return LEFT + self.across.place(value) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - self.up.place(value) * (self.height - TOP - BOTTOM)


def chart(
    lines: Sequence[Line],
    x: str,
    y: str,
    zero: bool = False,
    log: bool = False,
    width: int = 380,
    height: int = 270,
) -> str:
    """Lines over one another, with axes (`axis.UNITS`).

    Args:
        zero: the y axis begins at 0. log: the x axis goes by ratio; points at 0 are not drawn.
        width, height: in user units; text has 12.
    """
    if log:
        lines = [replace(a, points=[p for p in a.points if p[0] > 0]) for a in lines]
    xs = [p[0] for line in lines for p in line.points]
    ys = [p[1] for line in lines for p in line.points]
    if not xs:
        return empty("nothing was written yet")
    across = log_axis(x, xs) if log else axis(x, xs, count=max(4, round(width / 100)))
    up = axis(y, ys, zero=zero, count=5)
    box = Box(across, up, width, height)
    parts = [_frame(box)]
    for line in sorted(lines, key=lambda one: not one.faint):
        parts.append(_drawn(line, box))
    title = f"{up.label} against {across.label}"
    kind = "wide" if width > 700 else "chart"
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def empty(text: str) -> str:
    """In the place of a chart that has nothing to show."""
    return f'<p class="empty">{escape(text)}</p>'


def _frame(box: Box) -> str:
    right, floor = box.width - RIGHT, box.height - BOTTOM
    parts = []
    for value, text in box.up.ticks:
        at = box.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in box.across.ticks:
        at = box.x(value)
        line = f'x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 4}"'
        parts.append(f'<line class="axis" {line}/>')
        # a long text at the end would be cut off
        side = "end" if at > right - 1 and len(text) > 3 else "middle"
        parts.append(f'<text x="{at:.1f}" y="{floor + 17}" text-anchor="{side}">{text}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    middle = (LEFT + right) / 2
    parts.append(
        f'<text class="label" x="{middle:.0f}" y="{box.height - 8}" text-anchor="middle">'
        f"{escape(box.across.label)}</text>"
    )
    parts.append(f'<text class="label" x="4" y="14">{escape(box.up.label)}</text>')
    return "".join(parts)


def _drawn(line: Line, box: Box) -> str:
    points = thinned(line.points)
    if not points:
        return ""
    colour = f"c{line.colour % 8}" + (" dashed" if line.colour >= 8 else "")
    where = [(box.x(x), box.y(y)) for x, y in points]
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
