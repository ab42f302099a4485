"""The exchanges of a run over time: when messages were under way, how long training stood still for
them, and what happened meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .load import IslandFiles, Run

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
        found.append(Bar(max(start, 0.0), end, min(e.get("waiting", 0.0), end - start)))
    return found


def marks(run: Run) -> list[dict[str, Any]]:
    """The events that are shown, of all islands, in time; what several islands saw is there once
    for each."""
    found = [
        {**event, "of": island.name}
        for island in run.islands
        for event in island.events
        if event.get("kind") in MARKS and event.get("seconds") is not None
    ]
    return sorted(found, key=lambda event: event["seconds"])


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
