"""Tables of the study, and what docs/study.md and the planner take from it."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from typing import Any

from figure_cells import Rows, cell
from report import size

from benchmarks.kept import ROOT, find, load
from fsdp_demo import preset
from fsdp_demo.config.methods import UNPUBLISHED
from fsdp_demo.errors import counted
from fsdp_demo.runlog.words import times
from study.cells import parameters
from study.methods import METHODS, TUNING_SEEDS
from study.muon_rates import short
from study.stats import interval
from study.tables import SIZES

STUDY = {
    "study-forms": ("questions", "published form"),
    "study-memory": ("questions", "memory"),
    "study-transform": ("questions", "transform", "other transforms"),
    "study-demo-adamw": ("questions", "demo in AdamW"),
    "study-decoupled": ("questions", "decoupled"),
    "study-divisor": ("questions", "divisor"),
    "study-values": ("questions", "values"),
    "study-owners": ("questions", "owners"),
    "study-feedback": ("questions", "feedback"),
    "study-one-bit": ("questions", "every value in one bit"),
    "study-longer": ("questions", "rates of a run"),
    "study-states": ("questions", "periods of states"),
    "study-rise": ("questions", "rise", "cap"),
    "study-replicas": ("robust", "R ="),
    "study-rates": ("robust", "rate", "2 x longer", "4 x longer"),
    "study-periods": ("robust", "periods"),
    "study-delay": ("robust", "delay"),
    "study-slow-island": ("robust", "one slow island"),
    "study-attached": ("robust", "attached"),
    "study-main": ("main",),
    "study-precision": ("precision",),
    "study-size": ("size", "0.", "3.", "9."),
    "study-size-ours": ("size", "rates at", "changes at"),
    "study-size-muloco": ("size", "sign_muloco at"),
    "study-memory-larger": ("size", "memory"),
    "study-transform-larger": ("size", "transform at"),
    "study-text": ("text",),
}
"""Tables of the study: the table of the study, and the beginnings of the groups that it has."""

MUON = {
    "study-muon": ("480 steps",),
    "study-muon-places": ("known places",),
    "study-muon-long": ("1,920 steps",),
    "study-muon-large": ("3.3 M",),
    "study-muon-replicas": ("R =",),
}
"""Tables beside two all-reduces, of AdamW and of Muon: the beginnings of their groups."""

ONE_RATE = re.compile(r".*\blr (?P<rate>\S+) adamw (?P=rate)\b")
"""The name of a row whose AdamW has Muon's rate."""


def study(name: str, *groups: str) -> Rows:
    """A table of the study, or some groups of it: losses, paired differences with 90 % intervals,
    bytes.
    """
    found = load(f"study-{name}.json")["rows"]
    found = [row for row in found if not groups or row["group"].startswith(groups)]
    several = len({row["group"] for row in found}) > 1
    head = ["method", "seeds", "loss", "minus the reference", "sent per island", "fewer bytes"]
    rows = [["case", *head] if several else head]
    for row in found:
        apart = cell(row["difference"], "+.3f")
        if row["half"] is not None:
            apart += f" +- {row['half']:.3f}"
        cells = [
            row["name"],
            str(row["seeds"]),
            "failed" if row["failed"] else f"{row['loss']:.3f}",
            apart,
            size(row["bytes_sent"]) if row["bytes_sent"] else "-",
            times(row["ratio"]) if row["ratio"] else "-",
        ]
        rows.append([row["group"], *cells] if several else cells)
    return rows


LENGTHS_MUON = {
    "1,920 steps": "long",
    "3.3 M, 640 steps": "large-short",
    "3.3 M, 2,560 steps": "large",
}
"""Groups of the table `muon` whose all-reduce of AdamW is the first row of one of `LENGTHS`: the
same runs of the same machine, on more seeds.
"""


def muon_rows(group: str) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """The rows of a group of the table `muon`, the all-reduce of AdamW first; that all-reduce, and
    the one of Muon with AdamW at its rate.
    """
    adamw, *found = (r for r in load("study-muon.json")["rows"] if r["group"] == group)
    if group in LENGTHS_MUON:
        (table,) = (t for t in load("study-length.json") if t["table"] == LENGTHS_MUON[group])
        losses = dict(zip("01234567", table["rows"][0]["losses"], strict=False))
        mean = statistics.fmean(losses.values())
        found = [row for row in (adamw, *found) if "muon" in row["name"] or "muloco" in row["name"]]
        adamw = {"group": group, "name": table["rows"][0]["method"], "seeds": len(losses)}
        adamw |= {"losses": losses, "loss": mean, "ratio": 1}
    reduced = [
        row for row in found if row["name"].startswith("full") and ONE_RATE.match(row["name"])
    ]
    # of several rates the one with the most seeds
    return [adamw, *found], adamw, max(reduced, key=lambda row: row["seeds"])


def study_muon(*begins: str) -> Rows:
    """Some groups of the table `muon`: losses, and paired differences in percent, with 90 %
    intervals, to the all-reduce of AdamW and to that of Muon.
    """
    groups = dict.fromkeys(row["group"] for row in load("study-muon.json")["rows"])
    groups = [group for group in groups if group.startswith(begins)]
    head = ["method", "seeds", "loss", "beside AdamW", "beside Muon", "fewer bytes"]
    rows = [["case", *head] if len(groups) > 1 else head]
    for group in groups:
        found, *both = muon_rows(group)
        for row in found:
            beside = ("-" if row is other else percent(row, other) for other in both)
            cells = [row["name"], str(row["seeds"]), f"{row['loss']:.3f}", *beside]
            cells.append(times(row["ratio"]))
            rows.append([group, *cells] if len(groups) > 1 else cells)
    return rows


def study_front() -> Rows:
    """Loss over bytes, the most bytes first; a star where nothing ends lower with as few bytes."""
    found = [r for r in load("study-front.json")["rows"] if r["ratio"] and not r["failed"]]
    found.sort(key=lambda row: (row["ratio"], -row["loss"]))
    rows = [["", "method", "loss", "sent per island", "fewer bytes"]]
    for i, row in enumerate(found):
        best = all(row["loss"] < other["loss"] for other in found[i + 1 :])
        cells = [row["name"], f"{row['loss']:.3f}", size(row["bytes_sent"])]
        rows.append(["*" if best else "", *cells, times(row["ratio"])])
    return rows


def study_short() -> Rows:
    """A table of docs/study.md: of the tuned methods those that nothing beats with as few bytes,
    and `full`, which is beaten.
    """
    ended = [row for row in tuned().values() if not row["failed"]]
    found = sorted(ended, key=lambda row: (row["ratio"], -row["loss"]))
    full = tuned()["full"]
    rows = [["method", "fewer bytes", "loss", "beside the all-reduce with AdamW"]]
    for i, row in enumerate(found):
        loss = f"{row['loss']:.3f}"
        if row is full or row["name"] == full["name"]:
            rows.append(["`full`: all-reduce, AdamW", "1 x", loss, "-"])
        elif all(row["loss"] < other["loss"] for other in found[i + 1 :]):
            name = row["name"].removesuffix(" tuned")
            rows.append([f"`{name}`", times(row["ratio"]), loss, percent(row, full)])
    return rows


def study_muon_tuned() -> Rows:
    """What was tried of each form of the table `muon_short`, and the loss on the tuning seed."""
    runs = map(json.loads, find("study-runs.jsonl").read_text(encoding="utf-8").splitlines())
    found = {r["cell"]["name"]: r["loss"]["finished"] for r in runs if r["seed"] in TUNING_SEEDS}
    rows = [["method", "rate", "warm-up", "outer step", "loss"]]
    for method in short():
        for tried in method.grid:
            assert tried.setting is not None
            outer = preset(tried.preset, **tried.changes).channels[0].applier
            step = f"{outer.lr:g} / {outer.momentum:g}" if "period" in tried.changes else "-"
            told = [method.published.name, f"{tried.lr:g}", str(tried.setting.warmup), step]
            rows.append([*told, f"{found[tried.name]:.3f}"])
    return rows


SHORT_MUON = {
    "480 steps": "0.49 M, 480 steps",
    "1,920 steps": "0.49 M, 1,920 steps",
    "3.3 M, 2,560 steps": "3.3 M, 2,560 steps",
}
"""Groups of the table `muon` that docs/study.md shows, and what it calls them."""


def study_short_muon() -> Rows:
    """A table of docs/study.md: the two all-reduces and `sign_muloco`, AdamW at Muon's rate."""
    rows = [["run", "method", "seeds", "fewer bytes", "loss", "beside AdamW", "beside Muon"]]
    for group, run in SHORT_MUON.items():
        found, *both = muon_rows(group)
        names = {id(both[0]): "all-reduce, AdamW", id(both[1]): "all-reduce, Muon"}
        for row in found:
            form = re.match(r"muloco H=(\d+) 1 bit beta (\S+)", row["name"])
            if form and ONE_RATE.match(row["name"]) and row["seeds"] > 1:
                names[id(row)] = f"`sign_muloco`, period {form[1]}, feedback {form[2]}"
        for row in (row for row in found if id(row) in names):
            beside = ("-" if row is other else percent(row, other) for other in both)
            cells = [run, names[id(row)], str(row["seeds"]), times(row["ratio"])]
            rows.append([*cells, f"{row['loss']:.3f}", *beside])
    return rows


def study_choice() -> Rows:
    """What the grids of the main table chose."""
    tuned = load("study-main.json")["tuned"]
    return [["method", "chosen"], *([name, _told(told)] for name, told in tuned.items())]


def _told(choice: str) -> str:
    """A choice of a grid; its `lr` is the inner optimizer's, which no preset calls so."""
    rate, *changes = choice.split()
    more = f", `{' '.join(changes)}`" if changes else ""
    return f"rate {rate.removeprefix('lr=')}{more}"


def study_evidence() -> Rows:
    """Every preset at its published settings and at the best that were found, beside `full`."""
    main = load("study-main.json")
    rows, best = {row["name"]: row for row in main["rows"]}, tuned()
    found = [["preset", "published rule", "best of the grid", "seeds", "what the grid chose"]]
    for name in (e["preset"] for e in load("bytes.json")["presets"]["rows"]):
        if name not in best or best[name] is best["full"]:
            continue
        chosen = best[name]
        plain = rows.get(chosen["name"].removesuffix(" tuned"))
        told = main["tuned"][chosen["name"]]
        seeds = str(chosen["seeds"]) if not plain else f"{plain['seeds']}, {chosen['seeds']}"
        # one row each where the grid chose what was published
        cells = [percent(row, best["full"]) for row in (plain or chosen, chosen)]
        if name in UNPUBLISHED:
            cells[0], seeds = "-", str(chosen["seeds"])
        found.append([f"`{name}`", *cells, seeds, _told(told)])
    return found


def study_claims() -> Rows:
    """What papers claim, and the same comparison in the main table of the study."""
    rows = tuned()
    found = [["claim", "here", "loss here", "bytes here", "what differs"]]
    for claim in load("claims.json"):
        ours, other = rows[claim["ours"]], rows[claim["against"]]
        fewer = other["bytes_sent"] / ours["bytes_sent"]
        found.append(
            [
                f"{claim['claim']} ({claim['source']})",
                f"`{claim['ours']}` beside `{claim['against']}`",
                percent(ours, other),
                f"{fewer:.3g} x fewer" if fewer >= 1 else f"{1 / fewer:.3g} x more",
                claim["differs"],
            ]
        )
    return found


def study_rounds() -> Rows:
    """How the deltas of tuned methods point, by quarters of the run, and the gain of a round."""
    lines = find("study-runs.jsonl").read_text(encoding="utf-8").splitlines()
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in map(json.loads, lines):
        name = run["cell"]["name"]
        if name.endswith(" tuned") and len(run.get("rounds", {}).get("successive", ())) >= 8:
            runs.setdefault(name, []).append(run)
    head = ["method", "runs", "along the round before", "of two islands", "gain of a round"]
    found = [head]
    for name in sorted(runs):
        cell, seen = runs[name][0]["cell"], [run["rounds"] for run in runs[name]]
        outer = preset(cell["preset"], **cell["changes"]).channels[0].applier
        along = _quarters([r["successive"] for r in seen])
        gain = outer.lr * (1 + outer.momentum / (1 - outer.momentum * along[-1]))
        parts = [along, _quarters([r["islands"] for r in seen])]
        cells = [" ".join(f"{v:.2f}" for v in part) for part in parts]
        found.append([name.removesuffix(" tuned"), str(len(seen)), *cells, f"{gain:.2f}"])
    return found


def _quarters(rows: list[list[float]]) -> list[float]:
    """The mean of each quarter of some rows of equal length."""
    means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    cuts = [len(means) * n // 4 for n in range(5)]
    return [statistics.fmean(means[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]


def tuned() -> dict[str, dict[str, Any]]:
    """The tuned rows of the study's main table, by preset, and by "full muon" and the like."""
    rows = load("study-main.json")["rows"]
    return {_short(row["name"]): row for row in rows if row["name"].endswith(" tuned")}


def _short(name: str) -> str:
    """Of a row's name the preset, and its inner optimizer where that is another."""
    first, *others = name.split()
    return " ".join([first, *(word for word in others if word in ("muon", "adamw"))])


def percent(ours: dict[str, Any], other: dict[str, Any]) -> str:
    """The paired difference of two rows of the study in percent of the other's loss, with its 90 %
    interval.
    """
    pairs = [(loss, other["losses"].get(seed)) for seed, loss in ours["losses"].items()]
    apart = [100 * (loss / beside - 1) for loss, beside in pairs if loss and beside]
    if not apart:
        return "failed"
    mean, half = interval(apart)
    return f"{mean:+.1f} %" + (f" +- {half:.1f} %" if len(apart) > 1 else "")


LENGTHS = ("long", "short", "large", "large-short")
"""Tables of study-length.json: `sign_loco` beside an all-reduce of the same machine."""


def study_length(name: str) -> Rows:
    """One of `LENGTHS`: the loss of each seed, and the paired difference to the first row."""
    (table,) = (t for t in load("study-length.json") if t["table"] == name)
    seeds = [f"seed {n}" for n in range(max(len(row["losses"]) for row in table["rows"]))]
    means = ["mean"] if len(seeds) > 1 else []
    rows = [["method", *seeds, *means, "minus the all-reduce", "fewer bytes"]]
    for row in table["rows"]:
        losses, apart = row["losses"], ["-"] * (len(seeds) - len(row["losses"]))
        mean = [f"{sum(losses) / len(losses):.4f}" for _ in means]
        cells = [*(f"{loss:.4f}" for loss in losses), *apart, *mean, _apart(table, row)]
        rows.append([row["method"], *cells, times(row["fewer"])])
    return rows


def _apart(table: dict[str, Any], row: dict[str, Any]) -> str:
    if row is table["rows"][0]:
        return "-"
    mean, half = interval(_pairs(table, row))
    return f"{mean:+.3f}" + (f" +- {half:.3f}" if half == half else "")


def _pairs(table: dict[str, Any], row: dict[str, Any]) -> list[float]:
    """The difference to the first row of each seed that both have."""
    return [a - b for a, b in zip(row["losses"], table["rows"][0]["losses"], strict=False)]


def _with_phases(name: str) -> dict[str, Any]:
    """What the planner takes from a table of `LENGTHS`: methods that change in the run."""
    (table,) = (t for t in load("study-length.json") if t["table"] == name)
    full = table["rows"][0]["losses"]
    pairs = {row["is"]: _pairs(table, row) for row in table["rows"] if "is" in row}
    return {
        "source": f"our study (benchmarks/figures/study-length.json): {table['steps']} steps, "
        f"{table['seeds']}",
        "date": load("about.json")["study-length.json"]["date"],
        "parameters": parameters(table["model"]),
        "loss": round(sum(full) / len(full), 6),
        "difference": {name: round(sum(of) / len(of), 6) for name, of in pairs.items()},
    }


BESIDE = "sign_muloco"
"""Of this the planner has the table `muon`: in others AdamW has less than Muon's rate."""

GAPS = ROOT / "fsdp_demo" / "tools" / "planner" / "gaps.json"


def planner_gaps() -> dict[str, Any]:
    """The planner's table of gaps, with the study's rows as they are now."""
    table, rows = json.loads(GAPS.read_text(encoding="utf-8")), tuned()
    full = rows["full"]
    table["study"]["loss"] = round(full["loss"], 6)
    table["study"]["date"] = load("about.json")["study-main.json"]["date"]
    table["study"]["difference"] = {
        name: round(row["difference"], 6)
        for name, row in rows.items()
        if row is not full and not name.endswith(("muon", BESIDE)) and row["difference"] is not None
    }
    table["study"]["period"] = {
        name: max(c.schedule.sync_every for c in method.published.config().channels)
        for method in METHODS
        if (name := _short(method.name or method.published.name)) in table["study"]["difference"]
    }
    table["study"]["larger"] = [_at_size(size) for size in ("0.92 M", "3.3 M")]
    table["study"]["phases"] = [_with_phases(name) for name in ("long", "large")]
    table["study"]["muon"] = [*_with_muon("1,920 steps"), *_with_muon("3.3 M, 2,560 steps")]
    return table


def _with_muon(group: str) -> Iterator[dict[str, Any]]:
    """What the planner takes from a group of the table `muon`: `muloco` in 2 bits and in 1 bit."""
    found, full, _ = muon_rows(group)
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(found, key=lambda row: -row["seeds"]):  # of several forms the surest
        form = re.match(r"muloco H=(\d+) (1 bit|)", row["name"])
        if form and ONE_RATE.match(row["name"]):
            kept.setdefault((BESIDE if form[2] else "muloco", form[1]), row)
    for (method, period), row in kept.items():
        pairs = [(loss, full["losses"][seed]) for seed, loss in row["losses"].items()]
        yield {
            "source": f"our study (benchmarks/figures/study-muon.json): {group}, "
            f"{counted(row['seeds'], 'seed')}",
            "date": load("about.json")["study-muon.json"]["date"],
            "parameters": parameters("small" if group.startswith("3.3 M") else "study-small"),
            "loss": round(statistics.fmean(beside for _, beside in pairs), 6),
            "difference": {method: round(statistics.fmean(a - b for a, b in pairs), 6)},
            "period": {method: int(period)},
        }


def _at_size(size: str) -> dict[str, Any]:
    """What the planner takes from a larger model of the study: each method in its form of the main
    table, at the best of the rates that were tried. Other periods, bits or values are other bytes.
    """
    forms = {
        size,
        *(f"{form} at {size}" for form in ("rates", "sign_muloco", "transform", "memory of demo")),
    }
    rows = [r for r in load("study-size.json")["rows"] if r["group"] in forms]
    best: dict[str, dict[str, Any]] = {}
    # the rate that ended lowest, of those with the most seeds
    for row in sorted(rows, key=lambda r: (-r["seeds"], r["difference"] or 0.0)):
        name = row["name"].split()[0]
        # `muloco` has 2 bits, `demo` its transform
        other = any(part in row["name"] for part in ("full", BESIDE, "1 bit", "DCT on nothing"))
        if not other and row["difference"] is not None:  # one that failed has none
            best.setdefault(name, row)
    full = next(r for r in rows if r["name"] == f"full {size}")
    return {
        "source": f"our study (benchmarks/figures/study-size.json): {SIZES[size][1]} steps, "
        "one seed or two",
        "date": load("about.json")["study-size.json"]["date"],
        "parameters": parameters(SIZES[size][0]),
        "loss": round(full["loss"], 6),
        "difference": {name: round(row["difference"], 6) for name, row in best.items()},
    }


def gaps_are_stale() -> bool:
    """Whether the planner's table has other rows of the study than the study has now."""
    return bool(json.loads(GAPS.read_text(encoding="utf-8")) != planner_gaps())


SHORT = ROOT / "docs" / "figures" / "study-short.json"


def short_tables() -> dict[str, Rows]:
    """The tables of docs/study.md."""
    return {"study-short": study_short(), "study-short-muon": study_short_muon()}


def write_short() -> None:
    """Write the tables of docs/study.md."""
    SHORT.write_text(json.dumps(short_tables(), indent=1) + "\n", encoding="utf-8")


def write_gaps() -> None:
    """Put the study's rows into the planner's table."""
    GAPS.write_text(json.dumps(planner_gaps(), indent=1) + "\n", encoding="utf-8")
