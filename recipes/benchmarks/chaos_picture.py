"""A picture of a storm: islands over time, and the loss below. From what `chaos.py --picture
DATA.json` wrote:

python recipes/benchmarks/chaos_picture.py DATA.json storm.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from chaos_facts import Tape

COLOURS = {"training": "#4c9f70", "stalled": "#e0a030", "joining": "#5b8bd0", "dead": "#c8c8c8"}
LEFT, WIDTH, LANE, LOSS, TOP = 80, 900, 24, 130, 46
STALL = 1.0
"""Seconds between two steps from which on an island is drawn as stalled."""


def picture_of(
    tape: Tape, events: Sequence[dict[str, Any]], islands: int, title: str
) -> dict[str, Any]:
    """What is to be drawn, as JSON values; seconds from the first step."""
    first = min((steps[0]["time"] for steps in tape.steps.values()), default=0.0)
    spans = {str(slot): _spans(tape, slot, first) for slot in range(islands)}
    losses: dict[int, list[tuple[float, float]]] = {}
    for f in tape.facts:
        if f["what"] == "look" and f["rank"] == 0:
            losses.setdefault(f["step"], []).append((f["time"] - first, f["loss"]))
    curve = [
        [min(t for t, _ in told), statistics.fmean(v for _, v in told)]
        for _, told in sorted(losses.items())
    ]
    marks = [
        {"kind": e["kind"], "time": e["struck"] - first, "victims": e["victims"]}
        for e in events
        if not e["skipped"]
    ]
    return {
        "title": title,
        "seconds": tape.ends - first,
        "islands": spans,
        "events": marks,
        "loss": curve,
    }


def _spans(tape: Tape, slot: int, first: float) -> list[list[Any]]:
    """[state, from, to] without holes."""
    out: list[list[Any]] = []

    def add(state: str, a: float, b: float) -> None:
        a, b = max(a, first), min(b, tape.ends)
        if b > a and out and out[-1][0] == state and abs(out[-1][2] - (a - first)) < 1e-6:
            out[-1][2] = b - first
        elif b > a:
            out.append([state, a - first, b - first])

    told = {
        (f["life"], f["what"]): f["time"]
        for f in tape.facts
        if f["slot"] == slot and f["what"] in ("start", "finishing")
    }
    last = first
    for life in [f for f in tape.lives if f["slot"] == slot]:
        times = [s["time"] for s in tape.steps[slot, life["life"]]]
        ended = told.get((life["life"], "finishing"), life["ended"] or tape.ends)
        begun = min(told.get((life["life"], "start"), ended), ended)
        add("dead", last, begun)
        add("joining", begun, times[0] if times else ended)
        for a, b in zip(times, [*times[1:], ended], strict=False):
            add("stalled" if b - a > STALL else "training", a, b)
        last = ended if life["status"] != 0 else tape.ends
    add("dead", last, tape.ends)
    return out


def svg(data: dict[str, Any]) -> str:
    """The picture as text."""
    seconds, lanes = max(data["seconds"], 1e-9), list(data["islands"].items())
    bottom = TOP + LANE * len(lanes)
    height = bottom + LOSS + 60

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * t / seconds

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{escape(data["title"])}</text>',
    ]
    for n, (state, colour) in enumerate(COLOURS.items()):
        at = LEFT + 90 * n
        out.append(
            f'<rect x="{at}" y="24" width="12" height="12" fill="{colour}"/><text x="{at + 16}" '
            f'y="34">{state}</text>'
        )
    for n, (slot, spans) in enumerate(lanes):
        y = TOP + LANE * n
        out.append(
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">island {escape(slot)}</text>'
        )
        for state, a, b in spans:
            where = (
                f'x="{x(a):.1f}" y="{y + 3}" width="{max(x(b) - x(a), 0.3):.2f}" '
                f'height="{LANE - 6}"'
            )
            out.append(f'<rect {where} fill="{COLOURS[state]}"/>')
    order = {slot: n for n, (slot, _) in enumerate(lanes)}
    right = 0.0
    for event in data["events"]:
        rows = [order[str(slot)] for slot in event["victims"]] or range(len(lanes))
        for n in rows:
            y = TOP + LANE * n
            out.append(
                f'<line x1="{x(event["time"]):.1f}" y1="{y}" x2="{x(event["time"]):.1f}" '
                f'y2="{y + LANE}" stroke="#b03030"/>'
            )
        right = max(x(event["time"]) + 3, right + 11)  # of the name before it
        turned = f'transform="translate({right:.1f} {bottom + 8}) rotate(50)"'
        out.append(f'<text font-size="9" {turned}>{event["kind"]}</text>')
    return (
        "\n".join(
            [
                *out,
                *_loss(data["loss"], x, bottom + 56, LOSS - 26),
                *_axis(seconds, x, height - 22),
                "</svg>",
            ]
        )
        + "\n"
    )


def _loss(curve: Sequence[Sequence[float]], x: Any, top: float, height: float) -> list[str]:
    if not curve:
        return []
    values = [v for _, v in curve]
    low, high = min(values), max(values)
    points = " ".join(
        f"{x(t):.1f},{top + height * (high - v) / max(high - low, 1e-9):.1f}" for t, v in curve
    )
    label = f'<text x="{LEFT - 8}" y="{{}}" text-anchor="end">{{:.2f}}</text>'
    return [
        label.format(top + 8, high),
        label.format(top + height, low),
        f'<text x="{LEFT - 8}" y="{top + height / 2}" text-anchor="end">loss</text>',
        f'<polyline points="{points}" fill="none" stroke="#333" stroke-width="1.2"/>',
    ]


def _axis(seconds: float, x: Any, y: float) -> list[str]:
    step = next(
        s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 10**9) if seconds / s <= 12
    )
    marks = [t * step for t in range(int(seconds / step) + 1)]
    text = [f'<text x="{x(t):.1f}" y="{y + 14}" text-anchor="middle">{t} s</text>' for t in marks]
    return [f'<line x1="{x(0):.1f}" y1="{y}" x2="{x(seconds):.1f}" y2="{y}" stroke="#888"/>', *text]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("chaos_picture.py: give DATA.json and OUT.svg")
    Path(sys.argv[2]).write_text(
        svg(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
