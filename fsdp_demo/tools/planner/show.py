"""A plan as text: a table, the recommendation, what was assumed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ...errors import counted, size
from ...runlog.words import table
from .choosing import said
from .rows import Row
from .situation import Situation

_HEAD = (
    "preset|settings|bytes/exchange|bytes/step|mean Gbit/s|peak Gbit/s|line use|exposed s/step|"
    "compute|GB device|GB host|gap %"
).split("|")
_SPARED = "line use|GB host|mean Gbit/s|peak Gbit/s|bytes/exchange|bytes of the run|GB device"
"""Columns that are left out of a table that is too wide, the first of them first."""
COLUMNS = 120
"""Of a line at most."""


def plan_table(rows: Sequence[Row], width: int = COLUMNS) -> str:
    """The table of rows, with as many columns as fit `width`; the text names those left out."""
    days = any(r.days is not None for r in rows)
    head = [*_HEAD, *(["days", "bytes of the run"] if days else [])]
    body = [head]
    for r in rows:
        cells = [
            r.name,
            r.settings,
            size(r.bytes_per_exchange),
            size(r.bytes_per_step),
            f"{r.mean_gbit_s:.3g}",
            f"{r.peak_gbit_s:.3g}",
            f"{r.line_use:.0%}",
            _short(r.exposed_seconds_per_step),
            f"{r.compute_utilisation:.1%}",
            f"{r.device_bytes / 1e9:.2f}",
            f"{r.host_bytes / 1e9:.2f}",
            _gap(r.expected_gap),
        ]
        if days:
            cells += [
                "-" if r.days is None else f"{r.days:.3g}",
                "-" if r.run_bytes is None else size(r.run_bytes),
            ]
        body.append(cells)
    spared: list[str] = []
    for name in _SPARED.split("|"):
        if max(map(len, table(body, left=2).splitlines())) <= width:
            break
        if name in body[0]:
            i = body[0].index(name)
            body, spared = [row[:i] + row[i + 1 :] for row in body], [*spared, name]
    left_out = f"left out for want of width (--json has all): {', '.join(spared)}"
    return "\n".join([table(body, left=2), *([wrapped(left_out, width)] if spared else [])])


def plan_tables(rows: Sequence[Row], width: int = COLUMNS) -> str:
    """Tables of the settings that the planner has chosen, and of all others, each with a title."""
    chosen = ("Settings that the planner would choose:", [r for r in rows if r.chosen])
    others = ("Presets at their published settings:", [r for r in rows if not r.chosen])
    if not chosen[1]:
        return plan_table(rows, width)
    return "\n\n".join(f"{name}\n{plan_table(of, width)}" for name, of in (chosen, others) if of)


def wrapped(text: str, width: int = COLUMNS) -> str:
    """Each line of a text in lines of at most `width` columns; paths and names stay whole."""
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent="  " if line.startswith("* ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def summary(found: Sequence[tuple[Situation, Row]]) -> str:
    """A table with a line for each case: its recommended setting and what that costs."""
    body = ["islands, link|settings|bytes/step|exposed s/step|compute".split("|")]
    for s, r in found:
        cells = [f"{s.islands}, {said(s).removeprefix('a link of ')}", f"{r.name} ({r.settings})"]
        cells.append(size(r.bytes_per_step))
        missed = f" (below {s.target:.0%})" if r.compute_utilisation < s.target else ""
        share = f"{r.compute_utilisation:.1%}{missed}"
        body.append([*cells, _short(r.exposed_seconds_per_step), share])
    return table(body, left=2)


def _short(seconds: float) -> str:
    """Three digits, and none below a tenth of a millisecond."""
    return f"{seconds:.3g}" if seconds >= 1e-4 or not seconds else "<0.0001"


def _gap(gap: dict[str, Any] | None) -> str:
    """`+0.5`; `+0.5*` away from where it was measured; `(+0.5)` where that was a model of another
    order of size, so that only the order of methods can be compared.
    """
    if gap is None:
        return "-"
    percent = f"{round(gap['percent'], 1) + 0.0:+.1f}"  # no -0.0
    if not 0.1 < gap["factor"] < 10:
        return f"({percent})"
    return f"{percent}{'*' * bool(gap['extrapolated'] or gap['period'])}"


def title(situations: Sequence[Situation]) -> str:
    """A title: model, islands and link of the plan, and the source of the step's time. situations:
    unlike in their islands only. One: its link is named, too.
    """
    s = situations[0]
    counts = ", ".join(f"{one.islands}" for one in situations)
    link = f", {said(s)}" if len(situations) == 1 and s.link.bits_per_second else ""
    out = (
        f"{s.model} ({s.parameters / 1e6:,.1f} M parameters), {counts} islands of "
        f"{counted(s.shards, 'shard')}{link}\nstep {s.step_seconds:.4g} s ({s.step_source})"
    )
    if s.system.overlap_backward:
        return (
            f"{out}\nas simulated in papers: bytes over a rate, which leave layer by layer while "
            "backward runs; no headers, no windows, no work of compression"
        )
    return f"{out}\n{s.device}: {s.processor.source}"


def notes(rows: Sequence[Row]) -> str:
    """The text under all tables: the columns, and the sources of the gaps."""
    lines = [
        "GB of one rank, parameters, gradients and inner optimizer included, activations not. gap: "
        "of the loss against an all-reduce at every step, where somebody has measured it; * away "
        "from where it was measured; in brackets: on a model of another order of size, not to be "
        "compared with the others:"
    ]
    seen: dict[str, list[str]] = {}
    sources: dict[str, set[str]] = {}  # a preset whose settings were measured apart
    for r in rows:
        sources.setdefault(r.name, set()).add(str((r.expected_gap or {}).get("source")))
    for r in rows:
        if r.expected_gap is not None and r.expected_gap["extrapolated"]:
            key = f"{r.expected_gap['source']}: {r.expected_gap['extrapolated']}"
            name = f"{r.name} ({r.settings})" if len(sources[r.name]) > 1 else r.name
            if name not in seen.setdefault(key, []):
                seen[key].append(name)
    lines += [f"* {', '.join(names)}: {key}" for key, names in seen.items()]
    gaps = [(r.name, r.expected_gap) for r in rows if r.expected_gap is not None]
    if told := dict.fromkeys(f"{name} {gap['period']}" for name, gap in gaps if gap["period"]):
        lines.append(f"* measured at other periods: {', '.join(told)}")
    lines += [
        f"* {r.name} ({r.settings}): counted with an exchange in each check; with the fewest "
        f"{size(r.least_bytes_per_step)}/step"
        for r in rows
        if r.least_bytes_per_step < r.bytes_per_step
    ]
    none = {r.name: r.no_gap for r in rows if r.expected_gap is None}
    return wrapped("\n".join([*lines, *(f"* {name}: {why}" for name, why in none.items())]))


def targets_table(rows: Sequence[dict[str, Any]], rtt: float) -> str:
    """Gbit/s for each target, of links with a round trip of `rtt` seconds."""
    wanted = list(dict.fromkeys((r["islands"], r["target_utilisation"]) for r in rows))
    several = len({islands for islands, _ in wanted}) > 1
    found: dict[tuple[str, str], dict[tuple[int, float], float | None]] = {}
    for r in rows:
        key = (r["preset"], r["settings"])
        found.setdefault(key, {})[r["islands"], r["target_utilisation"]] = r["gbit_s"]
    shares = (f"{t:.0%}{f', {n} islands' if several else ''}" for n, t in wanted)
    head = ["preset", "settings", *shares]
    body = [
        [name, words, *(_rate(by.get(case)) for case in wanted)]
        for (name, words), by in found.items()
    ]
    link = f"a link with a round trip of {1e3 * rtt:g} ms" if rtt else "a link"
    return f"Gbit/s of {link} for a compute utilisation of\n{table([head, *body], left=2)}"


def _rate(value: float | None) -> str:
    return "no rate does" if value is None else f"{value:.3g}"
