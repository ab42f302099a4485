"""The report of runs: one html file (`page.html` filled) that needs no other, with text, tables and
pictures, light and dark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from ...runlog.files import Run, load_all
from ...runlog.words import times
from . import picture
from .figures import (
    MARKS,
    byte_rows,
    comparison,
    curve,
    figures,
    island_rows,
    marks,
    rates,
    said,
    speed,
    still,
    still_everywhere,
    timeline_rows,
)

MOST_EVENTS = 100


def make(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of runs into one html file; the path of it.

    Args:
        out: the html; None: report.html in the folder of the one run, or here for several.

    Raises:
        ValueError: a folder holds no run. OSError: the file cannot be written.
    """
    runs = load_all(folders)
    out = Path(out) if out else (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    out.write_text(page(runs), encoding="utf-8")
    return out


def page(runs: Sequence[Run]) -> str:
    """The report of one run or several, html."""
    several = len(runs) > 1
    members = [run.name for run in runs] if several else [i.name for i in runs[0].islands]
    rows = comparison([figures(run) for run in runs])
    sent = [(run.name, byte_rows(run)) for run in runs]
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    return template.render(
        several=several,
        title=f"{len(runs)} runs" if several else runs[0].name,
        subtitle=", ".join(run.name for run in runs) if several else _subtitle(runs[0]),
        notes=[f"{run.name}: {note}" if several else note for run in runs for note in run.notes],
        compared=rows,
        cards=list(zip(*rows, strict=True))[1:],  # of one run; its name is the title
        islands=island_rows(runs[0]),
        members=[(name, n) for n, name in enumerate(members)],
        losses=[_losses(runs, against) for against in picture.PLAIN],
        speed_and_rate=_speed_and_rate(runs),
        standing_still=_standing_still(runs),
        exchanges=[_exchanges(run) for run in runs],
        sent=[(name, found) for name, found in sent if len(found) > 1],
        configurations=[(run, _facts(run)) for run in runs],
    )


def _subtitle(run: Run) -> str:
    found = figures(run)
    text = f"preset {found.preset}, {found.shape}"
    if found.ratio:
        text += f", {times(found.ratio)} fewer bytes than a bf16 all-reduce at every step"
    if model := run.head.get("facts", {}).get("model"):
        text = f"{model}, {text}"
    if began := run.head.get("began"):
        text += f", began {time.strftime('%Y-%m-%d %H:%M', time.localtime(began))}"
    return text


def _drawn(draw: Callable[[], str]) -> Markup:
    """A picture, or the text that says what to install for it."""
    if picture.available():
        return Markup(draw())
    return _empty("pictures need matplotlib: pip install 'fsdp_demo[report]', then run it again")


def _empty(text: str) -> Markup:
    """A text in the place of a picture that has nothing to show."""
    return Markup('<p class="empty">{}</p>').format(text)


def _losses(runs: Sequence[Run], against: str) -> Markup:
    curves = [curve(run, against) for run in runs]
    if against == "bytes_sent" and not any(figures(run).sent for run in runs):
        return _empty("nothing was sent")
    if not any(c.training or c.validation for c in curves):
        return _empty("nothing was written yet")
    return _drawn(partial(picture.losses, runs, against))


def _speed_and_rate(runs: Sequence[Run]) -> list[Markup]:
    """Tokens per second and learning rate of each island, or of each run's first."""
    islands = list(runs[0].islands) if len(runs) == 1 else [run.islands[0] for run in runs]
    drawn = []
    for read, against, label in (
        (speed, "seconds", "tokens/s of all islands, since the line before"),
        (rates, "step", "learning rate"),
    ):
        each = [read(island) for island in islands]
        draw = partial(picture.lines, each, against, label)
        drawn.append(_drawn(draw) if any(each) else _empty(f"{label}: not written"))
    return drawn


def _standing_still(runs: Sequence[Run]) -> Markup:
    each = [still_everywhere(run) for run in runs]
    if not any(each):
        return _empty("no line of metrics was written yet")
    if len(runs) == 1:
        each = [still(island) for island in runs[0].islands]
    shares = [[(x, 100 * y) for x, y in points] for points in each]
    label = "standing still (% of the time)"
    return _drawn(partial(picture.lines, shares, "seconds", label, "wide"))


def _exchanges(run: Run) -> tuple[Any, ...]:
    """A run's name, channels and signs for a legend, picture, rows of events, number of others."""
    rows, events = timeline_rows(run), marks(run)
    if not rows and not events:
        return run.name, [], [], _empty("no exchange has ended and nothing happened"), [], 0
    channels: dict[str, int] = {}
    for name, colour, _ in rows:
        channels.setdefault(name.partition(", ")[2], colour)
    kinds = {str(event["kind"]) for event in events}
    signs = [(kind, m.sign, m.legend) for kind, m in MARKS.items() if kind in kinds]
    drawn = _drawn(partial(picture.exchanges, run))
    return run.name, [*channels.items()], signs, drawn, *_events(events)


def _events(marked: Sequence[dict[str, Any]]) -> tuple[list[list[str]], int]:
    """The rows of at most `MOST_EVENTS` events, and how many more there are."""
    seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for event in marked:
        if event["kind"] != "checkpoint":
            seen.setdefault((said(event), event["step"]), []).append(event)
    rows = [["event", "step", "seconds", "seen by"]] if seen else []
    for (text, step), events in [*seen.items()][:MOST_EVENTS]:
        seconds = f"{min(event['seconds'] for event in events):.1f}"
        by = ", ".join(sorted({str(event["of"]) for event in events}))
        rows.append([text, str(step), seconds, by])
    return rows, len(seen) - MOST_EVENTS


def _facts(run: Run) -> list[tuple[str, str]]:
    facts = [(name, str(value)) for name, value in run.head.get("facts", {}).items()]
    if trained := [rate for island in run.islands for _, rate in rates(island)]:
        facts.append(("learning rates trained with", f"{min(trained):.3g} to {max(trained):.3g}"))
    if because := run.head.get("chosen_because"):
        facts.append(("chosen by auto", str(because)))
    return facts
