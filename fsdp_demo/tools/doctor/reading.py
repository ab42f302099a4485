"""An examination as a table for people and as `doctor.json`, which `fsdp-demo doctor --json` writes
and `fsdp-demo plan` reads.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...files import read_json
from ...net.link import Link
from .measured import Direction, Examination, Finding

FORMAT = 1
"""Of `doctor.json`."""


@dataclass(frozen=True)
class Reading:
    """The part of `doctor.json` that a plan needs.

    Attributes:
        link: slowest direction, with as many connections as the exchange uses, and longest round
            trip.
        steps: seconds of a step by island; empty unless all were measured. lines: by island, the
            slowest direction from it, with its longest round trip; empty unless all were measured.
    """

    link: Link
    steps: tuple[float, ...] = ()
    lines: tuple[Link, ...] = ()


def load(path: str | Path) -> Reading:
    """Read what `fsdp-demo doctor --json` wrote. Raises ValueError: no such file, no json, another
    format, or no link was measured.
    """
    try:
        found: Any = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as what `fsdp-demo doctor --json` writes: {error}"
        ) from None
    form = found.get("format") if isinstance(found, dict) else None
    if form != FORMAT:
        raise ValueError(
            f"{path} has format {form!r}, this release reads {FORMAT}: let this release's "
            "`fsdp-demo doctor --json` write it"
        )
    link = found.get("link")
    numbers = [link.get(name) for name in ("bits_per_second", "rtt")] if link else []
    if len(numbers) != 2 or not all(_number(value) for value in numbers):
        raise ValueError(
            f"{path} holds no measured link: cure what its findings name, and run `fsdp-demo "
            "doctor` again"
        )
    steps = [island.get("step_seconds") for island in found.get("islands", [])]
    whole = all(_number(value) and value for value in steps)
    lines = [_line(found.get("links", []), i) for i in range(len(steps))]
    return Reading(
        Link(float(numbers[0]), float(numbers[1])),
        tuple(map(float, steps)) if whole else (),
        tuple(line for line in lines if line) if all(lines) else (),
    )


def _line(links: Sequence[dict[str, Any]], island: int) -> Link | None:
    """The line of one island: its slowest direction to another one, and its longest round trip."""
    mine = [link for link in links if link.get("from") == island]
    rates: list[Any] = [
        (link.get("mbit_s") or {}).get(str(link.get("connections"))) for link in mine
    ]
    trips: list[Any] = [link.get("rtt_ms") for link in mine]
    if not mine or not all(map(_number, [*rates, *trips])):
        return None
    return Link(1e6 * min(map(float, rates)), max(map(float, trips)) / 1e3)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


# ---- what was found, as a table for people and as `doctor.json` ----------------------------------

LINE = "  {:24} {:>9} {:>7} {:>7} {:>6} {:>9} {:>9} {:>8}"
HEAD = "link|rtt ms|jitter|loss %|mtu|1 conn.|exchange|idle ms".split("|")


def text(seen: Examination, found: Sequence[Finding]) -> str:
    """Islands, links, and what is wrong with its cure."""
    lines = ["Islands"]
    for island in seen.islands:
        what = [
            f"host {island.host}",
            f"{island.interface or 'interface unknown'} {island.address}".strip(),
            _with(island.speed_mbit, "Mbit/s"),
            _with(island.mtu, "bytes MTU"),
            island.congestion,
            _with(island.disk_mb_s, "MB/s to disk"),
            _with(island.step_seconds, "s per step"),
        ]
        lines.append(f"  {island.label}: " + ", ".join(word for word in what if word))
        said = ", ".join(f"{name} {value}" for name, value in island.versions.items())
        lines.append(f"    {said}")
    lines += _links(seen)
    lines += ["", "Findings" if found else "Nothing is wrong."]
    for finding in found:
        lines += [
            f"  {finding.name}{' (stops a run)' if finding.stops else ''}: {finding.says}.",
            f"    Cure: {finding.cure}. ({finding.see})",
        ]
    return "\n".join(lines)


def _links(seen: Examination) -> list[str]:
    lines = ["", "Links (rates in Mbit/s)", LINE.format(*HEAD)] if seen.directions else []
    for (i, j), d in sorted(seen.directions.items()):
        name = f"{seen.islands[i].name} -> {seen.islands[j].name}"
        idle = d.first_after_idle_ms
        cells = (
            _cell(d.rtt_ms, 2),
            _cell(d.jitter_ms, 2),
            _cell(None if d.loss is None else 100 * d.loss, 2),
            _cell(d.mtu, 0),
            _cell(d.mbit_s.get("1"), 1),
            f"{_cell(d.rate, 1)}/{d.connections}",
            f"{_cell(idle, 0)}/{_cell(d.warm_ms, 0)}",
        )
        lines.append(LINE.format(name, *cells))
        if d.error:
            lines.append(f"    not all was measured: {d.error}")
    if any(d.mbit_s for d in seen.directions.values()):
        lines.append(
            "  exchange: rate / connections that it uses; idle: a message after a pause / without"
        )
    return lines


def _with(value: float | None, unit: str) -> str:
    return (
        "" if value is None else f"{value:.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"
    )


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def as_json(seen: Examination, found: Sequence[Finding]) -> dict[str, Any]:
    """The object of `doctor.json`; `reading.load` reads it."""
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "islands": msgspec.to_builtins(seen.islands),
        "links": [_link(d) for _, d in sorted(seen.directions.items())],
        "reached": [msgspec.to_builtins(reach) for _, reach in sorted(seen.reaches.items())],
        "link": summary(seen),
        "findings": [{**msgspec.to_builtins(finding), "see": finding.see} for finding in found],
    }


def _link(direction: Direction) -> dict[str, Any]:
    note = msgspec.to_builtins(direction)
    return {"from": note.pop("sender"), "to": note.pop("receiver"), **note}


def summary(seen: Examination) -> dict[str, float] | None:
    """The slowest direction with the exchange's number of connections, and the longest round trip;
    None unless all directions were measured.
    """
    count = len(seen.islands)
    rates = [d.rate for d in seen.directions.values()]
    trips = [d.rtt_ms for d in seen.directions.values()]
    whole = [r for r in rates if r is not None], [t for t in trips if t is not None]
    if not all(len(found) == count * (count - 1) > 0 for found in whole):
        return None
    return {"bits_per_second": 1e6 * min(whole[0]), "rtt": max(whole[1]) / 1e3}
