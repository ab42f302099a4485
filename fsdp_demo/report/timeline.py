"""The exchanges of a run over time, as SVG text: when messages were under way, how long training
stood still for them, and what happened meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .axis import Axis, axis
from .load import IslandFiles, Run

WIDTH, LEFT, RIGHT, ROW = 1000, 150, 14, 30
SINGLE = 120
"""Exchanges of a row up to which each is a bar of its own; more are shown as shares of bins."""
BINS = 210
MOST_CHANNELS = 4
MARKS = {
    "lost": "an island was lost",
    "joined": "an island joined",
    "skipped round": "a round was skipped",
    "checkpoint": "a checkpoint",
    "resume": "a later start goes on",
    "chosen": "auto has chosen the method",
}


@dataclass(frozen=True)
class Bar:
    """One exchange on the wire, in seconds; training stood still for the last `waiting` of them."""

    start: float
    end: float
    waiting: float
    text: str


def rows(run: Run) -> list[tuple[str, int, list[Bar]]]:
    """(name, number of the colour, bars) for each island and channel; the channels of an island
    are one row where they are many, as with fragments."""
    found = []
    for island in run.islands:
        names = sorted({name for e in island.exchanges for name in e.get("channels", ())})
        groups = [[name] for name in names] if len(names) <= MOST_CHANNELS else [names]
        for number, group in enumerate(groups):
            channel = group[0] if len(group) == 1 else f"{len(group)} channels"
            bars = _bars(island, set(group))
            if bars:
                found.append((f"{island.name}, {channel}", number, bars))
    return found


def _bars(island: IslandFiles, channels: set[str]) -> list[Bar]:
    found = []
    for e in island.exchanges:
        start, end = e.get("start"), e.get("end")
        if start is None or end is None or not channels & set(e.get("channels", ())):
            continue
        text = (
            f"step {e['step'] + 1}: {', '.join(e['channels'])}, {1e3 * (end - start):.1f} ms, "
            f"{e.get('bytes', 0):,} B, training stood still for "
            f"{1e3 * e.get('waiting', 0.0):.1f} ms"
        )
        found.append(Bar(max(start, 0.0), end, min(e.get("waiting", 0.0), end - start), text))
    return found


def marks(run: Run) -> list[dict[str, Any]]:
    """The events that are drawn, of all islands, in time; what several islands saw is there once
    for each."""
    found = [
        {**event, "of": island.name}
        for island in run.islands
        for event in island.events
        if event.get("kind") in MARKS and event.get("seconds") is not None
    ]
    return sorted(found, key=lambda event: event["seconds"])


def timeline(run: Run) -> str | None:
    """The picture, or None where the run has no exchange and no event."""
    lanes, events = rows(run), marks(run)
    ends = [bar.end for _, _, bars in lanes for bar in bars] + [e["seconds"] for e in events]
    ends += [line["seconds"] for island in run.islands for line in island.lines[-1:]]
    if not lanes and not events:
        return None
    across = axis("seconds", ends, count=9)
    parts, top = [], 10.0
    height = 10 + ROW * (len(lanes) + bool(events)) + 44
    floor = height - 44
    for value, text in across.ticks:
        at = _x(across, value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="8" y2="{floor}"/>')
        parts.append(f'<text x="{at:.1f}" y="{floor + 17}" text-anchor="middle">{text}</text>')
    for name, colour, bars in lanes:
        parts.append(_lane(name, colour, bars, across, top))
        top += ROW
    if events:
        parts.append(_events(events, across, top))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle:.0f}" y="{height - 8}" text-anchor="middle">'
        f"{across.label}</text>"
    )
    return (
        f'<svg class="wide" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="timeline of {escape(run.name)}">{"".join(parts)}</svg>'
    )


def _x(across: Axis, seconds: float) -> float:
    return LEFT + across.place(seconds) * (WIDTH - LEFT - RIGHT)


def _lane(name: str, colour: int, bars: Sequence[Bar], across: Axis, top: float) -> str:
    label = name if len(name) <= 22 else f"{name[:21]}…"
    parts = [
        f'<text x="{LEFT - 8}" y="{top + 17}" text-anchor="end">{escape(label)}'
        f"<title>{escape(name)}</title></text>",
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top + 24}" y2="{top + 24}"/>',
    ]
    if len(bars) <= SINGLE:
        for bar in bars:
            parts.append(
                _rect(across, bar.start, bar.end, top + 4, 20, f"wire c{colour}", bar.text)
            )
            if bar.waiting > 0:
                parts.append(
                    _rect(across, bar.end - bar.waiting, bar.end, top + 14, 10, "still", bar.text)
                )
        return "".join(parts)
    width = (across.high - across.low) / BINS
    wire, still = [0.0] * BINS, [0.0] * BINS
    for bar in bars:
        _spread(wire, bar.start, bar.end, width)
        _spread(still, bar.end - bar.waiting, bar.end, width)
    for i, (share, waited) in enumerate(zip(wire, still, strict=True)):
        start = i * width
        text = f"on the wire {share:.0%} of the time, training stood still {waited:.0%}"
        for part, kind in ((share, f"wire c{colour}"), (waited, "still")):
            high = 20 * min(part, 1.0)
            if high > 0.05:
                parts.append(_rect(across, start, start + width, top + 24 - high, high, kind, text))
    return "".join(parts)


def _spread(bins: list[float], start: float, end: float, width: float) -> None:
    """Add the share of each bin that lies between two times."""
    first, last = int(start / width), int(end / width)
    for i in range(max(first, 0), min(last, len(bins) - 1) + 1):
        bins[i] += max(0.0, min(end, (i + 1) * width) - max(start, i * width)) / width


def _rect(
    across: Axis, start: float, end: float, top: float, high: float, kind: str, text: str
) -> str:
    left = _x(across, start)
    wide = max(_x(across, end) - left, 1.0)
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}">'
        f"<title>{escape(text)}</title></rect>"
    )


def _events(events: Sequence[dict[str, Any]], across: Axis, top: float) -> str:
    parts = [f'<text x="{LEFT - 8}" y="{top + 17}" text-anchor="end">events</text>']
    for event in events:
        at, kind = _x(across, event["seconds"]), str(event["kind"]).replace(" ", "-")
        if event["kind"] in ("lost", "joined", "skipped round"):
            line = f'x1="{at:.1f}" x2="{at:.1f}" y1="8" y2="{top}"'
            parts.append(f'<line class="at {kind}" {line}/>')
        text = f"{said(event)}, step {event['step']}, {event['of']}"
        parts.append(mark(str(event["kind"]), at, top, text))
    return "".join(parts)


def mark(kind: str, at: float, top: float, text: str = "") -> str:
    """The mark of an event in a row that begins at `top`; `text` is shown over it."""
    shape = {
        "lost": f"M{at - 6:.1f},{top + 7} h12 l-6,11 z",
        "joined": f"M{at - 6:.1f},{top + 18} h12 l-6,-11 z",
        "skipped round": f"M{at:.1f},{top + 6} l6,6 l-6,6 l-6,-6 z",
    }.get(kind, f"M{at - 3:.1f},{top + 9} h6 v6 h-6 z")
    title = f"<title>{escape(text)}</title>" if text else ""
    return f'<path class="mark {kind.replace(" ", "-")}" d="{shape}">{title}</path>'


def said(event: dict[str, Any]) -> str:
    """An event in words."""
    who = ", ".join(map(str, event.get("islands", ())))
    return {
        "lost": f"island {who} lost",
        "joined": f"island {who} joined",
        "skipped round": f"round skipped: {event.get('reason', '')}",
        "checkpoint": "checkpoint saved",
        "resume": "a later start goes on here",
        "chosen": f"auto has chosen: {event.get('reason', '')}",
    }.get(str(event.get("kind")), str(event.get("kind")))
