"""Tables of slow links, other programs, the doctor and storms of faults."""

from __future__ import annotations

from typing import Any

from figure_cells import Rows, rate
from report import size

from benchmarks.kept import load

STORMS = ("demo", "diloco", "streaming_diloco")


def storm() -> Rows:
    """Storms of faults, as `benchmarks/chaos.py --json` wrote them."""
    head = [
        "storm",
        "survived",
        "longest stall",
        "back after (median)",
        "participating / alive",
        "digests that differ",
    ]
    rows = [[*head, "tokens in completed rounds", "loss", "loss, undisturbed at as many tokens"]]
    rows += [_storm(name, load(f"storm-{name}.json")) for name in STORMS]
    return rows


def storm_kinds() -> Rows:
    """The same storms by what was done: events that were survived, and the longest stall."""
    found = {name: load(f"storm-{name}.json")["by_kind"] for name in STORMS}
    kinds = sorted({kind for by_kind in found.values() for kind in by_kind})
    rows = [["what happens", *(f"`{name}`: survived, longest stall" for name in found)]]
    for kind in kinds:
        rows.append([f"`{kind}`", *(_of_kind(by_kind.get(kind)) for by_kind in found.values())])
    return rows


def doctor() -> Rows:
    """Each fault that was put into the lab, and what doctor named."""
    rows = [["fault", "named", "other findings", "what it said"]]
    for row in load("doctor.json"):
        named = f"`{row['wanted']}`" if row["wanted"] else "nothing"
        others = ", ".join(f"`{name}`" for name in row["others"])
        rows.append(
            [row["done"], named if row["named"] else "no", others or "none", row["says"] or "-"]
        )
    return rows


def peers() -> Rows:
    """Presets beside other programs, as `benchmarks/peers.py --json` wrote them."""
    head = ["preset", "beside", "link", "s/step, ours", "theirs", "ratio (range)"]
    rows = [[*head, "CPU s/step, ours", "theirs", "ratio (range)", "equal"]]
    found = load("peers.json")["rows"]
    order = list(dict.fromkeys(r["peer"] for r in found))
    for r in sorted(found, key=lambda r: order.index(r["peer"])):
        cells = [f"`{r['peer']}`", r["program"], _link(r)]
        for name in ("seconds", "cpu"):
            low, high = r[f"{name}_range"]
            cells += [f"{r[f'{name}_{side}']:.2f}" for side in ("ours", "theirs")]
            cells.append(f"{r[f'{name}_ratio']:.2f} ({low:.2f} to {high:.2f})")
        equal = "bit for bit" if r["off"] == 0 else f"off by {r['off'] or 0:.0e}"
        rows.append([*cells, f"no: {r['differs']}" if r["differs"] else equal])
    return rows


def slow_predict() -> Rows:
    """Seconds per step that the planner predicted, and what was measured then, as
    `benchmarks/slow_link_predict.py --json` wrote it.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in load("slow_link_predict.json")["rows"]:
        found.setdefault(row["case"], {})[row["link"]] = row
    links = list(dict.fromkeys(link for cells in found.values() for link in cells))
    rows = [["setting", *(f"{rate(link.partition(',')[0])}: s, off" for link in links)]]
    for case, cells in found.items():
        there = [cells.get(link) for link in links]
        rows.append(
            [case, *("-" if c is None else f"{c['measured']:.2f}, {c['off']:+.0%}" for c in there)]
        )
    return rows


def uplinks() -> Rows:
    """The same behind shared uplinks, and how much crossed one."""
    rows = [["setting", "uplink", "no limit, s", "predicted", "measured", "off", "crossed"]]
    for r in load("uplinks.json")["rows"]:
        times = [f"{r[key]:.2f}" for key in ("without_limit", "predicted", "measured")]
        link = rate(r["link"].partition(",")[0])
        rows.append([r["case"], link, *times, f"{r['off']:+.0%}", f"{r['crossed']:.2f}"])
    return rows


def slow_link() -> Rows:
    """Speed that presets keep, as `benchmarks/slow_link.py --json` wrote it."""
    found = _slow()
    links = list(dict.fromkeys(link for cells in found.values() for link in cells))[1:]
    head = ["preset", "tokens/s, no limit", *map(rate, links), "100 Mbit/s without the lab"]
    rows = [[*head, "waiting per step, ms", "delay process", "bytes per step and island"]]
    for case, cells in found.items():
        at, first = cells.get("100Mbit"), next(iter(cells.values()))
        kept = [_kept_speed(cells.get(link)) for link in links]
        own = [
            _kept_speed(at, "ratio_without_lab"),
            *_stood_still(at),
            size(first["bytes_per_step"]),
        ]
        rows.append([_case(case), f"{first['tokens_per_second']:.0f}", *kept, *own])
    return rows


def slow_delay() -> Rows:
    """What a delay is worth at 100 Mbit/s: each preset with one and, where measured, without."""
    found = [cells["100Mbit"] for cells in _slow().values() if "100Mbit" in cells]
    plain = {r["preset"]: r for r in found if not r["delay"]}
    head = ["preset", "speed kept without delay", "waiting, ms", "with it", "waiting, ms"]
    rows = [[*head, "with it, without the lab"]]
    for r in found:
        if r["delay"]:
            old = plain.get(r["preset"])
            before = [_kept_speed(old), _stood_still(old)[0]]
            now = [_kept_speed(r), _stood_still(r)[0], _kept_speed(r, "ratio_without_lab")]
            rows.append([_case(r["case"]), *before, *now])
    return rows


def _slow() -> dict[str, dict[str, dict[str, Any]]]:
    """Cells of slow_link.json by case and link."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in load("slow_link.json")["rows"]:
        found.setdefault(row["case"], {})[row["link"]] = row
    return found


def _case(name: str) -> str:
    preset, comma, more = name.partition(",")
    return f"`{preset}`{comma}{more}"


def _kept_speed(cell: dict[str, Any] | None, key: str = "ratio") -> str:
    """A star: one or two runs, or fewer steps than elsewhere."""
    few = cell is not None and (cell["extrapolated"] or cell["repeats"] < 3)
    return "-" if cell is None else f"{cell[key]:.2f}{'*' if few else ''}"


def _stood_still(cell: dict[str, Any] | None) -> list[str]:
    """Milliseconds of waiting per step; the share of the delay process."""
    if cell is None:
        return ["-", "-"]
    return [f"{1e3 * cell['exposed_seconds_per_step']:.0f}", f"{100 * cell['lab_share']:.1f} %"]


def _link(row: dict[str, Any]) -> str:
    return rate(row["link"]) if row["rtt_ms"] else "no limit"


def _of_kind(found: dict[str, Any] | None) -> str:
    return (
        "-"
        if found is None
        else f"{found['survived']} of {found['events']}, {found['longest_stall_s']:.1f} s"
    )


def _storm(name: str, found: dict[str, Any]) -> list[str]:
    def cell(value: float | None, form: str) -> str:
        return "not run" if value is None else format(value, form)

    return [
        f"`{name}`, {found['events']} events",
        f"{found['survived']} of {found['events']}",
        f"{found['longest_stall_s']:.1f} s",
        "-" if found["rejoin_s"] is None else f"{found['rejoin_s']:.1f} s",
        f"{found['participating_share']:.0%}",
        f"{len(found['mismatches'])} of {found['digests_compared']}",
        cell(found["committed_share"], ".0%"),
        cell(found["loss"], ".3f"),
        cell(found["loss_undisturbed"], ".3f"),
    ]
