"""Tables of README.md and docs/ from the json files in this folder, and of all keys of a
configuration from the package.

    python docs/figures/tables.py             # print them
    python docs/figures/tables.py --write     # put them between their marks in README.md and docs/

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. A test compares
the two (tests/docs/test_figures.py). `about.json` says date, machine and command of each file.
`benchmarks/tables.py` makes those of benchmarks/results, and study-short.json for this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tables_configuration as configuration  # noqa: E402
from figure_cells import ROOT, Rows, load, printed, rate, short, write  # noqa: E402

import compare  # noqa: E402  isort: skip
from report import size  # noqa: E402  isort: skip

BASELINE = "baseline (all-reduce every step)"
CHOICE = {  # those of the README, and for whom each is
    "diloco": "a first run; an exchange may take minutes, but is seldom",
    "sparse_loco": "large models and long runs on slow links",
    "decoupled_momentum": "the same, on the slowest links",
    "muloco": "you may take Muon; its paper tuned up to 3.1 B parameters",
    "sign_loco": "small and frequent exchanges; it is ours, from no paper",
    "sign_muloco": "you may take Muon, on a slower link; nobody has trained a large model with it",
    "demo": "all islands must be equal at every step",
    "full": "the all-reduce, in fp32, for comparison",
}

# Of each preset: what crosses the slow link, the inner optimizer, when the replicas are equal.
METHODS = {
    "full": ("mean gradient", "any", "always"),
    "demo": (
        "largest DCT coefficients of the momentum",
        'SGD by sign, or `inner_optimizer="adamw"`',
        "always",
    ),
    "random": (
        "momentum at positions that all islands know",
        'SGD by sign, or `inner_optimizer="adamw"`',
        "always",
    ),
    "stride": (
        "momentum at positions that all islands know",
        'SGD by sign, or `inner_optimizer="adamw"`',
        "always",
    ),
    "diloco": ("weight change (pseudo-gradient)", "AdamW", "after an exchange"),
    "decoupled_momentum": (
        "largest values of the outer momentum",
        "AdamW",
        "after an exchange; `rule=released`: never",
    ),
    "sparse_loco": (
        "largest values of the pseudo-gradient, with error feedback",
        "AdamW",
        "after an exchange",
    ),
    "sign_loco": (
        "signs of the largest values of the pseudo-gradient",
        "AdamW",
        "after an exchange",
    ),
    "streaming_diloco": (
        "pseudo-gradient by fragments, while training goes on",
        "AdamW",
        "at the end",
    ),
    "muloco": ("pseudo-gradient of Muon, with error feedback", "Muon + AdamW", "after an exchange"),
    "sign_muloco": (
        "signs of the pseudo-gradient of Muon, with error feedback",
        "Muon + AdamW",
        "after an exchange",
    ),
    "noloco": ("parameters, to one island", "AdamW", "at the end"),
    "saps": ("parameters at positions that all know, to one island", "any", "at the end"),
    "local_sgd": ("parameters", "any", "after an exchange"),
    "sel_sync": ("parameters, if a gradient has changed", "any", "after an exchange"),
    "local_adam": ("parameters and both moments", "AdamW", "after an exchange"),
    "desloc": (
        "parameters and moments (not of embeddings)",
        "AdamW, any with named states",
        "after an exchange",
    ),
}


# ---- tables ------------------------------------------------------------------------------------


def quickstart() -> Rows:
    """The comparison of the quickstart, in the cells that it prints itself, and its settings."""
    head = ["validation loss", "sent per island", "fewer bytes than bf16 all-reduce"]
    rows = [["method", "learning rate, settings", *head, "tokens/s", "time waiting"]]
    for run in load("quickstart.json"):
        name = BASELINE if run["preset"] == "full" else f"`{run['preset']}`"
        name = f"`auto`: it chose {name}" if "auto" in run else name
        cells = (cell.removesuffix(" less") for cell in compare.row(name, run)[1:])
        rows.append([name, run["settings"], *cells])
    return rows


def methods() -> Rows:
    """The presets to choose from, with the bytes of Llama-3.2-1B."""
    found = {entry["preset"]: entry for entry in load("bytes.json")["presets"]["rows"]}
    head = ["preset", "crosses the slow link", "bytes per step", "for whom"]
    return [
        head,
        *(
            [*_named(found[name]), size(found[name]["sent_per_step"]), whom]
            for name, whom in CHOICE.items()
        ),
    ]


def all_methods() -> Rows:
    """Every preset: bytes of Llama-3.2-1B, seconds on the link."""
    facts = load("bytes.json")["presets"]
    link = facts["link"].partition(",")[0]
    head = [
        "preset",
        "crosses the slow link",
        "settings",
        "per exchange",
        "per step",
        "fewer bytes",
        f"seconds of an exchange at {link}",
    ]
    rows = []
    for entry in facts["rows"]:
        more = METHODS.get(entry["preset"], ("", "any", "always"))[1:]
        rows.append([*_named(entry)[:2], *_sent(entry), short(entry["seconds"]), *more])
    return [[*head, "inner optimizer", "replicas equal"], *rows]


def study(name: str) -> Rows:
    """A table of the study that benchmarks/tables.py has made."""
    rows: Rows = load("study-short.json")[name]
    return rows


def peers() -> Rows:
    """Seconds per step beside other programs, as `benchmarks/peers.py --json` wrote them."""
    rows = [["preset", "beside", "link", "s per step", "theirs", "ratio (range)"]]
    found = load("peers.json")["rows"]
    order = list(dict.fromkeys(r["peer"] for r in found))
    for r in sorted(found, key=lambda r: order.index(r["peer"])):
        low, high = r["seconds_range"]
        link = rate(r["link"]) if r["rtt_ms"] else "no limit"
        took = [f"{r[f'seconds_{side}']:.2f}" for side in ("ours", "theirs")]
        ratio = f"{r['seconds_ratio']:.2f} ({low:.2f} to {high:.2f})"
        rows.append([f"`{r['peer']}`", r["program"], link, *took, ratio])
    return rows


def slow_methods() -> Rows:
    """What methods keep of their speed at 100 Mbit/s, as `benchmarks/slow_link.py --json` wrote
    it.
    """
    rows = [["method", "speed kept", "waiting per step, ms"]]
    for r in load("slow_link.json")["rows"]:
        if r["link"] == "100Mbit" and r["preset"] in ("full", "demo", "diloco"):
            name, comma, more = r["case"].partition(",")
            waited = f"{1e3 * r['exposed_seconds_per_step']:.0f}"
            rows.append([f"`{name}`{comma}{more}", f"{r['ratio']:.2f}", waited])
    return rows


def storms() -> Rows:
    """Storms of faults, as `benchmarks/chaos.py --json` wrote them."""
    head = ["storm", "survived", "longest stall", "back after (median)", "digests that differ"]
    rows = [head]
    for name in ("demo", "diloco", "streaming_diloco"):
        found = load(f"storm-{name}.json")
        times = [f"{found[key]:.1f} s" for key in ("longest_stall_s", "rejoin_s")]
        survived = f"{found['survived']} of {found['events']}"
        apart = f"{len(found['mismatches'])} of {found['digests_compared']}"
        rows.append([f"`{name}`, {found['events']} events", survived, *times, apart])
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "methods": methods,
    "all-methods": all_methods,
    **{name: partial(study, name) for name in ("study-short", "study-short-muon")},
    "quickstart": quickstart,
    "peers-seconds": peers,
    "slow-methods": slow_methods,
    "storms": storms,
    **{name: partial(configuration.keys, name) for name in configuration.CLASSES},
    "preset-keywords": configuration.preset_keywords,
}


# ---- cells -------------------------------------------------------------------------------------


def _named(entry: dict[str, Any]) -> tuple[str, str]:
    """(name, what crosses the link and how) of a preset or of the all-reduce."""
    if entry["preset"] not in METHODS:
        return entry["preset"], "bf16 gradients"
    name = f"`{entry['preset']}`"
    return f"**{name}**" if entry["preset"] in CHOICE else name, METHODS[entry["preset"]][0]


def _sent(entry: dict[str, Any]) -> list[str]:
    """Settings, bytes of an exchange and of a step, times fewer than an all-reduce at every
    step.
    """
    ratio = entry["ratio_per_step"] or 1.0
    return [
        entry["settings"],
        size(entry["sent"]),
        size(entry["sent_per_step"]),
        f"{short(ratio)} x",
    ]


# ---- pages -------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """The files that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write(TABLES, pages())
    elif sys.argv[1:]:
        sys.exit(f"usage: {sys.argv[0]} [--write]")
    else:
        print(printed(TABLES))
