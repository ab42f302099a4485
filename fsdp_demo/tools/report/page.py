"""The report of runs: one html file that needs no other, with text, tables and pictures, light and
dark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

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

STYLE = """
:root { --back: #ffffff; --text: #1c2733; --soft: #5a6775; --grid: #e3e8ee; --box: #f5f7f9;
  --c0: #0b6e99; --c1: #c2570c; --c2: #2a7d3f; --c3: #a63d97; --c4: #b3261e; --c5: #6b6f00;
  --c6: #5151cf; --c7: #7a4b2b; --still: #1c2733; --bad: #b3261e; --good: #2a7d3f; --odd: #c2570c }
@media (prefers-color-scheme: dark) { :root { --back: #12181f; --text: #e4e9ee; --soft: #9fadba;
  --grid: #2a343f; --box: #1b232c; --c0: #58b7e6; --c1: #f0a04b; --c2: #6cc287; --c3: #d98ad0;
  --c4: #f28b82; --c5: #c9cc52; --c6: #a3a3ff; --c7: #cc9f80; --still: #e4e9ee; --bad: #f28b82;
  --good: #6cc287; --odd: #f0a04b } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1240px; padding: 20px 16px 60px; background: var(--back);
  color: var(--text); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 24px; line-height: 1.25; margin: 8px 0 4px }
h2 { font-size: 18px; margin: 34px 0 6px }
h3 { font-size: 15px; margin: 18px 0 4px }
p { margin: 4px 0 10px; max-width: 78ch } .soft, figcaption { color: var(--soft) }
figcaption { font-size: 13px }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0; padding: 0;
  list-style: none }
.legend li { display: flex; align-items: center; gap: 7px }
.swatch { width: 18px; height: 4px; border-radius: 2px; display: inline-block }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr));
  gap: 14px } figure { margin: 0 }
.scroll { overflow-x: auto } svg { display: block; width: 100%; height: auto }
svg.chart { max-width: 640px } svg.wide { min-width: 760px } .key { width: 1em; text-align: center }
.key.lost { color: var(--bad) } .key.joined { color: var(--good) }
.key.skipped-round { color: var(--odd) } .key.resume { color: var(--c0) }
.key.chosen { color: var(--c3) }
table { border-collapse: collapse; font-size: 14px; white-space: nowrap }
th, td { padding: 5px 12px 5px 0; text-align: right; border-bottom: 1px solid var(--grid) }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom }
th:first-child, td:first-child { text-align: left }
td:first-child { white-space: normal; min-width: 110px; overflow-wrap: anywhere }
ul.notes { margin: 8px 0; padding: 8px 12px 8px 30px; background: var(--box); border-radius: 6px }
details { margin: 6px 0; background: var(--box); border-radius: 6px; padding: 6px 12px }
summary { cursor: pointer } pre { overflow-x: auto; font-size: 13px; line-height: 1.4 }
dl.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr));
  gap: 12px 18px; margin: 8px 0 }
dl.cards dt { color: var(--soft); font-size: 13px } dl.cards dd { margin: 0; font-weight: 600 }
table.wraps td { white-space: normal }
table.facts { width: 100% } table.facts :is(th, td) { text-align: left; white-space: normal;
  overflow-wrap: anywhere } table.facts td:first-child { width: 14em; min-width: 8em }
.empty { color: var(--soft); border: 1px dashed var(--grid); border-radius: 6px; padding: 30px 12px;
  text-align: center; max-width: none }
"""
MOST_EVENTS = 100
SIGNS = {
    "lost": "▼",
    "joined": "▲",
    "skipped round": "◆",
    "checkpoint": "■",
    "resume": "▶",
    "chosen": "★",
}


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
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _subtitle(runs),
        _notes(runs),
        *_figures(runs),
        *(["<h2>Islands</h2>", _table(island_rows(runs[0]))] if len(runs) == 1 else []),
        "<h2>Loss</h2>",
        _legend([(run.name, i) for i, run in enumerate(runs)]) if len(runs) > 1 else "",
        _losses(runs),
        "<h2>Speed and learning rate</h2>",
        _speed_and_rate(runs),
        "<h2>Time standing still</h2>",
        "<p>The share of time for which training stood still, waiting for messages. The rest is "
        "training, evaluation and saving.</p>",
        _standing_still(runs),
        "<h2>Exchanges and events</h2>",
        "<p>Each row is a channel of an island. Pale bars are messages under way, the strong bars "
        "at their foot the time for which training stood still for them.</p>",
        *(_exchanges(run, len(runs) > 1) for run in runs),
        *_bytes(runs),
        "<h2>Configuration</h2>",
        *(_configuration(run, len(runs) == 1) for run in runs),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: training report</title><style>{STYLE}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _subtitle(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f'<p class="soft">{escape(", ".join(run.name for run in runs))}</p>'
    head = runs[0].head
    found = figures(runs[0])
    text = f"preset {found.preset}, {found.shape}"
    if found.ratio:
        text += f", {times(found.ratio)} fewer bytes than a bf16 all-reduce at every step"
    if model := head.get("facts", {}).get("model"):
        text = f"{model}, {text}"
    if began := head.get("began"):
        text += f", began {time.strftime('%Y-%m-%d %H:%M', time.localtime(began))}"
    return f'<p class="soft">{escape(text)}</p>'


def _notes(runs: Sequence[Run]) -> str:
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    if not notes:
        return ""
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>'


def _figures(runs: Sequence[Run]) -> list[str]:
    """Several runs one below the other; of one run each figure below its name."""
    rows = comparison([figures(run) for run in runs])
    if len(runs) > 1:
        return ["<h2>Comparison</h2>", _table(rows, "wraps")]
    pairs = list(zip(*rows, strict=True))[1:]  # its name is the title
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs
    )
    return ["<h2>Key figures</h2>", f'<dl class="cards">{cards}</dl>']


def _table(rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:]
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _legend(names: Sequence[tuple[str, int]]) -> str:
    items = "".join(
        f'<li><span class="swatch" style="background: var(--c{n % 8})"></span>{escape(name)}</li>'
        for name, n in names
    )
    return f'<ul class="legend">{items}</ul>'


def _drawn(draw: Callable[[], str]) -> str:
    """A picture, or the text that says what to install for it."""
    if picture.available():
        return draw()
    return _empty("pictures need matplotlib: pip install 'fsdp_demo[report]', then run it again")


def _empty(text: str) -> str:
    """A text in the place of a picture that has nothing to show."""
    return f'<p class="empty">{escape(text)}</p>'


def _losses(runs: Sequence[Run]) -> str:
    drawn = []
    for against in picture.PLAIN:
        curves = [curve(run, against) for run in runs]
        if against == "bytes_sent" and not any(figures(run).sent for run in runs):
            drawn.append(_empty("nothing was sent"))
        elif not any(c.training or c.validation for c in curves):
            drawn.append(_empty("nothing was written yet"))
        else:
            drawn.append(_drawn(partial(picture.losses, runs, against)))
    caption = (
        "Loss in nats per token. Lines with dots are evaluations, thin lines the mean training "
        "loss of the islands."
    )
    figures_ = "".join(f"<figure>{one}</figure>" for one in drawn)
    return f'<div class="charts">{figures_}</div><figcaption>{caption}</figcaption>'


def _speed_and_rate(runs: Sequence[Run]) -> str:
    """Tokens per second and learning rate of each island; of several runs the first that is here
    stands for all.
    """
    islands = list(runs[0].islands) if len(runs) == 1 else [run.islands[0] for run in runs]
    names = [i.name for i in islands] if len(runs) == 1 else [run.name for run in runs]
    drawn = []
    for read, against, label in (
        (speed, "seconds", "tokens/s of all islands, since the line before"),
        (rates, "step", "learning rate"),
    ):
        each = [read(island) for island in islands]
        draw = partial(picture.lines, each, against, label)
        drawn.append(_drawn(draw) if any(each) else _empty(f"{label}: not written"))
    legend = _legend([(name, n) for n, name in enumerate(names)])
    return f'{legend}<div class="charts">{"".join(f"<figure>{d}</figure>" for d in drawn)}</div>'


def _standing_still(runs: Sequence[Run]) -> str:
    each = [(run.name, still_everywhere(run)) for run in runs]
    if len(runs) == 1:
        each = [(island.name, still(island)) for island in runs[0].islands]
    if not any(still_everywhere(run) for run in runs):
        return _empty("no line of metrics was written yet")
    legend = _legend([(name, n) for n, (name, _) in enumerate(each)])
    shares = [[(x, 100 * y) for x, y in points] for _, points in each]
    draw = partial(picture.lines, shares, "seconds", "standing still (% of the time)", "wide")
    return f'{legend}<div class="scroll">{_drawn(draw)}</div>'


def _exchanges(run: Run, named: bool) -> str:
    head = f"<h3>{escape(run.name)}</h3>" if named else ""
    rows, events = timeline_rows(run), marks(run)
    if not rows and not events:
        return head + _empty("no exchange has ended and nothing happened")
    channels: dict[str, int] = {}
    for name, colour, _ in rows:
        channels.setdefault(name.partition(", ")[2], colour)
    kinds = {str(event["kind"]) for event in events}
    signs = "".join(
        f'<li><span class="key {kind.replace(" ", "-")}">{SIGNS[kind]}</span>{escape(text)}</li>'
        for kind, text in MARKS.items()
        if kind in kinds
    )
    legend = _legend([*channels.items()]).replace("</ul>", f"{signs}</ul>")
    drawn = _drawn(partial(picture.exchanges, run))
    return f'{head}{legend}<div class="scroll">{drawn}</div>{_events(run)}'


def _events(run: Run) -> str:
    found = [event for event in marks(run) if event["kind"] != "checkpoint"]
    if not found:
        return ""
    seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for event in found:
        seen.setdefault((said(event), event["step"]), []).append(event)
    rows = [["event", "step", "seconds", "seen by"]]
    for (text, step), events in [*seen.items()][:MOST_EVENTS]:
        seconds = f"{min(event['seconds'] for event in events):.1f}"
        by = ", ".join(sorted({str(event["of"]) for event in events}))
        rows.append([text, str(step), seconds, by])
    more = len(seen) - MOST_EVENTS
    return _table(rows) + (f'<p class="soft">and {more} more</p>' if more > 0 else "")


def _bytes(runs: Sequence[Run]) -> list[str]:
    found = [(run, byte_rows(run)) for run in runs]
    found = [(run, rows) for run, rows in found if len(rows) > 1]
    if not found:
        return []
    parts = ["<h2>Bytes</h2><p>Of the rank that wrote them, since its last start.</p>"]
    for run, rows in found:
        parts.append(f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "")
        parts.append(_table(rows))
    return parts


def _configuration(run: Run, opened: bool) -> str:
    facts: dict[str, Any] = run.head.get("facts", {})
    rows = [["fact", "value"], *([name, str(value)] for name, value in facts.items())]
    if trained := [rate for island in run.islands for _, rate in rates(island)]:
        low, high = min(trained), max(trained)
        rows.append(["learning rates trained with", f"{low:.3g} to {high:.3g}"])
    if because := run.head.get("chosen_because"):
        rows.append(["chosen by auto", str(because)])
    text = _table(rows, "facts") if len(rows) > 1 else ""
    return (
        f"<details{' open' if opened else ''}><summary>{escape(run.name)}: preset "
        f"{escape(str(run.head.get('preset')))}</summary>{text}"
        "<p>The method; its <code>lr</code> on top is what the preset advises for the inner "
        "optimizer.</p>"
        f"<pre>{escape(str(run.head.get('config', '')))}</pre></details>"
    )
