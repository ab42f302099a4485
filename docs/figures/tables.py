"""Tables of README.md and docs/ from the json files in this folder.

    python docs/figures/tables.py             # print them
    python docs/figures/tables.py --write     # put them between their marks in README.md, docs/*.md and recipes/README.md

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. A test compares
the two (tests/docs/test_figures.py). `about.json` says date, machine and command of each file.
"""  # noqa: E501

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "recipes" / "benchmarks")]

import compare  # noqa: E402
from report import size  # noqa: E402
from study_stats import interval  # noqa: E402

from fsdp_demo import preset  # noqa: E402

Rows = list[list[str]]
MARK = re.compile(
    r"^<!-- table: (?P<name>[\w-]+) -->\n(?P<text>.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE
)
BASELINE = "baseline (all-reduce every step)"
STORMS = ("demo", "diloco", "streaming_diloco")
HOT = {  # rows of codec.json
    "k8": "k = 8",
    "k32": "k = 32",
    "k8_bf16": "k = 8, `codec.transform_precision: bf16`",
    "k32_bf16": "k = 32, `codec.transform_precision: bf16`",
    "plain_k8": "no transform, k = 8",
    "plain_k64": "no transform, k = 64",
}
CHOICE = ("sign_loco", "diloco", "demo", "full")  # those of the README

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
    "local_sgd": ("parameters", "any", "after an exchange"),
    "local_adam": ("parameters and both moments", "AdamW", "after an exchange"),
    "desloc": (
        "parameters and moments (not of embeddings)",
        "AdamW, any with named states",
        "after an exchange",
    ),
}


def load(name: str) -> Any:
    """What a file of this folder holds."""
    return json.loads((HERE / name).read_text(encoding="utf-8"))


# ---- tables ------------------------------------------------------------------------------------


def quickstart() -> Rows:
    """The comparison of the quickstart, in the cells that it prints itself."""
    head = [
        "method",
        "validation loss",
        "sent per island",
        "fewer bytes than bf16 all-reduce",
        "tokens/s",
        "time waiting",
    ]
    rows = []
    for run in load("quickstart.json"):
        name = BASELINE if run["preset"] == "full" else f"`{run['preset']}`"
        name = f"`auto`: it chose {name}" if "auto" in run else name
        rows.append([name, *(cell.removesuffix(" less") for cell in compare.row(name, run)[1:])])
    return [head, *rows]


def quickstart_settings() -> Rows:
    """The same with the settings of each run."""
    settings = ["learning rate, settings", *(run["settings"] for run in load("quickstart.json"))]
    return [[row[0], more, *row[1:]] for row, more in zip(quickstart(), settings, strict=True)]


def methods() -> Rows:
    """The presets to choose from: bytes of Llama-3.2-1B, and the loss of the study."""
    found = {entry["preset"]: entry for entry in load("bytes.json")["presets"]["rows"]}
    rows = _study()
    head = [
        "preset",
        "crosses the slow link",
        "settings",
        "per exchange",
        "per step",
        "fewer bytes",
        "loss in the study",
        "fewer bytes there",
        "inner optimizer",
    ]
    out = [head]
    for name in CHOICE:
        there, full = rows[name], rows["full"]
        learned = f"{there['loss']:.3f}"
        learned += f", {_percent(there, full)}" if there is not full else ""
        fewer = f"{_short(there['ratio'])} x"
        sent = _sent(found[name])
        out.append([*_named(found[name])[:2], *sent, learned, fewer, METHODS[name][1]])
    return out


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
        rows.append([*_named(entry)[:2], *_sent(entry), _short(entry["seconds"]), *more])
    return [[*head, "inner optimizer", "replicas equal"], *rows]


def storm() -> Rows:
    """Storms of faults, as `recipes/benchmarks/chaos.py --json` wrote them."""
    head = [
        "storm",
        "survived",
        "longest stall",
        "back after (median)",
        "participating / alive",
        "digests that differ",
    ]
    rows = [[*head, "tokens in completed rounds", "loss", "loss, undisturbed at as many tokens"]]
    for name in STORMS:
        if (HERE / f"storm-{name}.json").exists():
            rows.append(_storm(name, load(f"storm-{name}.json")))
    return rows


def storm_kinds() -> Rows:
    """The same storms by what was done: events that were survived, and the longest stall."""
    found = {
        name: load(f"storm-{name}.json")["by_kind"]
        for name in STORMS
        if (HERE / f"storm-{name}.json").exists()
    }
    kinds = sorted({kind for by_kind in found.values() for kind in by_kind})
    rows = [["what happens", *(f"`{name}`: survived, longest stall" for name in found)]]
    for kind in kinds:
        rows.append([f"`{kind}`", *(_of_kind(by_kind.get(kind)) for by_kind in found.values())])
    return rows


def published() -> Rows:
    """What papers say that they send, against this library."""
    head = ["claim", "published", "by its own format", "here"]
    rows = []
    for claim in load("published.json")["published"]:
        unit, text = claim["unit"], claim["published"].partition(" [")[0]
        here = (_figure(claim[key], unit) for key in ("by_format", "ours"))
        rows.append([claim["claim"], text, *here])
    return [head, *rows]


def memory() -> Rows:
    """What each preset takes on a rank: bytes per parameter, and GB."""
    head = [
        "preset",
        "inner state",
        "exchange",
        "offloaded: GPU + host",
        "workspace",
        "offloaded: workspace",
        "messages",
    ]
    rows = []
    for entry in load("memory.json"):
        here, host = entry["here"], entry["host"]
        of = here["parameters"]
        kept = [_kept(here, "device"), _kept(host, "device"), _kept(host, "host")]
        needs = (here["device_workspace"], host["device_workspace"], host["host_workspace"])
        rows.append(
            [
                f"`{entry['preset']}`",
                f"{entry['inner']} {_share(entry['inner_state'], of)}",
                _share(kept[0], of),
                f"{_share(kept[1], of)} + {_share(kept[2], of)}",
                *(_share(count, of) for count in needs),
            ]
        )
    return [head, *rows]


def positions() -> Rows:
    """Bytes and times of positions, as `recipes/benchmarks/positions.py --json` wrote them."""
    codes = ("int8", "2bit", "1bit")
    head = ["k of 4096", "bits", "Rice, random", "Rice, chosen", *(f"bytes, {c}" for c in codes)]
    rows = [[*head, "ns, 12 bits", "ns", "ratio", "ratio with values"]]
    for r in load("positions.json")["rows"]:
        ns, bits = r["ns"], [r[key] for key in ("bits", "rice_uniform", "rice_chosen")]
        cells = [f"{b:.2f}" for b in bits] + [f"{r['bytes'][c]:.3f}" for c in codes]
        times = [f"{ns['encode' + v]:.1f} + {ns['decode' + v]:.1f}" for v in ("12", "")]
        ratios = [f"{r[key]:.2f}" for key in ("ratio", "ratio_with_values")]
        rows.append([str(r["k"]), *cells, *times, *ratios])
    return rows


def codec() -> Rows:
    """Compression beside its published form, as `recipes/benchmarks/codec.py --json` wrote it."""
    head = ["", "published form", "ours", "ratio", "bytes per coefficient", "same coefficients"]
    memory = "temporaries, MB: published (largest tensor) / ours (all)"
    rows, found = [[*head, "residual off by", memory]], load("codec.json")
    for name, words in HOT.items():
        r = found[name]
        cells = [
            _cell(r.get("published_ns"), ".1f"),
            _cell(r["ours_ns"], ".1f"),
            _cell(r.get("ratio"), ".1f"),
            _cell(r["bytes_per_coefficient"], ".2f"),
            _cell(r.get("same_coefficients"), ".2%"),
            _cell(r.get("residual_error"), ".0e"),
            f"{_cell(r.get('published_temporaries_mb'), '.0f')} / {r['workspace_mb']:.0f}",
        ]
        rows.append([words, *cells])
    return rows


def codec_stages() -> Rows:
    """The same by stages, nanoseconds per element."""
    found, rows = load("codec.json"), []
    for name, words in HOT.items():
        r = found[name]
        if "published_stages_ns" in r and not name.endswith("bf16"):
            rows.append([f"{words}, published form", *_stages(r["published_stages_ns"])])
        rows.append([words, *_stages(r["stages_ns"])])
    return [["", *found["k8"]["stages_ns"]], *rows]


def scale() -> Rows:
    """Cost against size, tensors and replicas, as `recipes/benchmarks/scale.py --json` wrote it."""
    found = load("scale.json")["rows"]
    stages = ["momentum, transform", "selection, codes, residual", "decode, gradient", "apply"]
    rows = [["", "elements", "tensors", "replicas", *stages, "all"]]
    for r in found:
        facts = [r["name"], f"{r['elements']:,}", f"{r['tensors']:,}", str(r["replicas"])]
        rows.append([*facts, *_stages({s: r[s] for s in (*stages, "all")})])
    return rows


def idle() -> Rows:
    """A step in which no channel acts: microseconds in the exchange, by ranks and tensors."""
    found = load("idle.json")
    rows = [["ranks of the island", "tensors", "before, median us", "median us"]]
    for now, then in zip(found["rows"], found["before"], strict=True):
        assert (now["ranks"], now["tensors"]) == (then["ranks"], then["tensors"])
        figures = [f"{r['median']:.1f}" for r in (then, now)]
        rows.append([str(now["ranks"]), f"{now['tensors']:,}", *figures])
    return rows


def start() -> Rows:
    """Seconds from launch to first step: medians over pairs of runs, and of their ratios."""
    pairs = load("start.json")["pairs"]
    names = {
        "first_step": "first step, s",
        "cpu": "processor time of all processes until then, s",
    }
    rows = [["", "before", "now", "ratio"]]
    for key, name in names.items():
        then, now = ([pair[side][key] for pair in pairs] for side in ("before", "now"))
        ratio = statistics.median(b / a for a, b in zip(then, now, strict=True))
        medians = [f"{statistics.median(values):.1f}" for values in (then, now)]
        rows.append([name, *medians, f"{ratio:.2f}"])
    parts = []
    for part in pairs[0]["now"]["parts"]:
        seconds = statistics.median(pair["now"]["parts"][part] for pair in pairs)
        parts.append([f"of it: {part}, s", "-", f"{seconds:.1f}", "-"])
    return [*rows[:2], *parts, *rows[2:]]


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
    """Presets beside other programs, as `recipes/benchmarks/peers.py --json` wrote them."""
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
    `recipes/benchmarks/slow_link_predict.py --json` wrote it.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in load("slow_link_predict.json")["rows"]:
        found.setdefault(row["case"], {})[row["link"]] = row
    links = list(dict.fromkeys(link for cells in found.values() for link in cells))
    rows = [["setting", *(f"{_rate(link.partition(',')[0])}: s, off" for link in links)]]
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
        link = _rate(r["link"].partition(",")[0])
        rows.append([r["case"], link, *times, f"{r['off']:+.0%}", f"{r['crossed']:.2f}"])
    return rows


def slow_link() -> Rows:
    """Speed that presets keep, as `recipes/benchmarks/slow_link.py --json` wrote it."""
    found = _slow()
    links = list(dict.fromkeys(link for cells in found.values() for link in cells))[1:]
    head = ["preset", "tokens/s, no limit", *map(_rate, links), "100 Mbit/s without the lab"]
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


def slow_methods() -> Rows:
    """The same for the methods of the quickstart, at 100 Mbit/s."""
    rows = [["method", "speed kept", "without the lab", "waiting per step, ms"]]
    for case, cells in _slow().items():
        at = cells.get("100Mbit")
        if at is not None and at["preset"] in ("full", "demo", "diloco"):
            kept = [_kept_speed(at, name) for name in ("ratio", "ratio_without_lab")]
            rows.append([_case(case), *kept, _stood_still(at)[0]])
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


def formats() -> Rows:
    """Number formats of values, as `recipes/benchmarks/codec.py --codes --json` wrote them."""
    head = ["format", "bits per value", "error, Gaussian", "error, t3", "encode, ns", "decode, ns"]
    rows = [head]
    for r in load("formats.json")["codes"]:
        figures = [f"{r[key]:.4f}" for key in ("error_gaussian", "error_heavy")]
        times = [f"{r[key]:.2f}" for key in ("ns_encode", "ns_decode")]
        rows.append([r["code"], f"{r['bits']:.4g}", *figures, *times])
    return rows


def step() -> Rows:
    """A whole step with a message, as `recipes/benchmarks/step.py --json` wrote it."""
    head = ["", "preset", "step alone, ms", "with the exchange", "of it in the hooks, ms"]
    rows = [[*head, "check for NaN and Inf, ms", "memory alone, MB", "more"]]
    for r in load("step.json")["rows"]:
        times = [f"{1e3 * r['alone']:.0f}", f"{r['busy'] / r['alone']:.2f} x"]
        times += [f"{1e3 * r['busy_hooks']:.0f}", f"{1e3 * r['looking']:.1f}"]
        memory = [f"{n / 1e6:.0f}" for n in (r["bytes_alone"], r["bytes"] - r["bytes_alone"])]
        rows.append([r["setting"], f"`{r['preset']}`", *times, *memory])
    return rows


def zero_times() -> Rows:
    """Steps under ZeRO, as `recipes/benchmarks/zero.py --json` wrote them."""
    head = ["", "elements of a rank", "plain step, ms: wall, CPU", "not due: wall", "CPU"]
    head += ["in the exchange, ms", "plain again: wall", "CPU", "due: ns per element, CPU"]
    rows = [head]
    for r in load("zero.json")["times"]:
        wall, cpu = (1e3 * r[kind]["adamw"] for kind in ("wall", "cpu"))
        idle, again = (
            [f"{r[f'{clock}_adamw{what}']:+.1%}" for clock in ("wall", "cpu")]
            for what in (", not due", " again")
        )
        own = f"{1e3 * r['inside']:.2f} ({r['inside'] / r['cpu']['adamw']:.1%})"
        facts = [f"ZeRO-{r['stage']}", f"{r['held']:,}", f"{wall:.1f}, {cpu:.1f}"]
        rows.append([*facts, *idle, own, *again, f"{r['ns_per_element']:.0f}"])
    return rows


def zero_memory() -> Rows:
    """The most memory of a step under ZeRO, bytes per parameter of a rank."""
    rows = []
    for r in load("zero.json")["memory"]:
        figures = {
            key: value for key, value in r.items() if key not in ("stage", "parts", "largest")
        }
        head = ["most of a step, bytes per parameter", "masters", "largest", *figures]
        rows = rows or [[*head, "gradients held"]]
        cells = [f"{value:.2f}" for value in figures.values()]
        facts = [f"ZeRO-{r['stage']}", str(r["parts"]), f"{r['largest']:.0%}"]
        rows.append([*facts, *cells, f"{4 * (1 - r['largest']):.2f}"])
    return rows


STUDY = {
    "study-forms": ("questions", "published form"),
    "study-transform": ("questions", "transform", "other transforms"),
    "study-demo-adamw": ("questions", "demo in AdamW"),
    "study-decoupled": ("questions", "decoupled"),
    "study-divisor": ("questions", "divisor"),
    "study-feedback": ("questions", "feedback"),
    "study-states": ("questions", "periods of states"),
    "study-rise": ("questions", "rise", "cap"),
    "study-replicas": ("robust", "R ="),
    "study-rates": ("robust", "rate", "2 x longer", "4 x longer"),
    "study-periods": ("robust", "periods"),
    "study-delay": ("robust", "delay"),
    "study-slow-island": ("robust", "one slow island"),
    "study-attached": ("robust", "attached"),
    "study-main": ("main",),
    "study-size": ("size",),
    "study-text": ("text",),
}
"""Tables of docs/study.md: the table of the study, and the beginnings of the groups that it has."""


def study(name: str, *groups: str) -> Rows:
    """A table of the study, or some groups of it: losses, paired differences with 90 % intervals,
    bytes.
    """
    found = load(f"study-{name}.json")["rows"]
    found = [row for row in found if not groups or row["group"].startswith(groups)]
    groups = len({row["group"] for row in found}) > 1
    head = ["method", "seeds", "loss", "minus the reference", "sent per island", "fewer bytes"]
    rows = [["case", *head] if groups else head]
    for row in found:
        apart = _cell(row["difference"], "+.3f")
        if row["half"] is not None:
            apart += f" +- {row['half']:.3f}"
        cells = [
            row["name"],
            str(row["seeds"]),
            "failed" if row["failed"] else f"{row['loss']:.3f}",
            apart,
            size(row["bytes_sent"]) if row["bytes_sent"] else "-",
            _cell(row["ratio"], ".3g") + (" x" if row["ratio"] else ""),
        ]
        rows.append([row["group"], *cells] if groups else cells)
    return rows


def study_front() -> Rows:
    """Loss over bytes, the most bytes first; a star where nothing ends lower with as few bytes."""
    found = [row for row in load("study-front.json")["rows"] if row["ratio"]]
    found.sort(key=lambda row: (row["ratio"], -row["loss"]))
    rows = [["", "method", "loss", "sent per island", "fewer bytes"]]
    for i, row in enumerate(found):
        best = all(row["loss"] < other["loss"] for other in found[i + 1 :])
        cells = [row["name"], f"{row['loss']:.3f}", size(row["bytes_sent"])]
        ratio = f"{row['ratio']:.3g}" if row["ratio"] < 1000 else f"{row['ratio']:.0f}"
        rows.append(["*" if best else "", *cells, f"{ratio} x"])
    return rows


def study_choice() -> Rows:
    """What the grids of the main table chose."""
    tuned = load("study-main.json")["tuned"]
    return [["method", "chosen"], *([name, f"`{told}`"] for name, told in tuned.items())]


def study_evidence() -> Rows:
    """Every preset at its published settings and at the best that were found, beside `full`."""
    main = load("study-main.json")
    rows, best = {row["name"]: row for row in main["rows"]}, _study()
    found = [["preset", "published settings", "best of the grid", "seeds", "what the grid chose"]]
    for name in (entry["preset"] for entry in load("bytes.json")["presets"]["rows"]):
        if name not in best or best[name] is best["full"]:
            continue
        tuned = best[name]
        plain = rows.get(tuned["name"].removesuffix(" tuned"))
        told = main["tuned"][tuned["name"]]
        seeds = str(tuned["seeds"]) if not plain else f"{plain['seeds']}, {tuned['seeds']}"
        # one row each where the grid chose what was published
        cells = [_percent(row, best["full"]) for row in (plain or tuned, tuned)]
        found.append([f"`{name}`", *cells, seeds, f"`{told}`"])
    return found


def study_claims() -> Rows:
    """What papers claim, and the same comparison in the main table of the study."""
    rows = _study()
    found = [["claim", "here", "loss here", "bytes here", "what differs"]]
    for claim in load("claims.json"):
        ours, other = rows[claim["ours"]], rows[claim["against"]]
        fewer = other["bytes_sent"] / ours["bytes_sent"]
        found.append(
            [
                f"{claim['claim']} ({claim['source']})",
                f"`{claim['ours']}` beside `{claim['against']}`",
                _percent(ours, other),
                f"{fewer:.3g} x fewer" if fewer >= 1 else f"{1 / fewer:.3g} x more",
                claim["differs"],
            ]
        )
    return found


def study_rounds() -> Rows:
    """How the deltas of tuned methods point, by quarters of the run, and the gain of a round."""
    lines = (HERE / "study-runs.jsonl").read_text(encoding="utf-8").splitlines()
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


TABLES: dict[str, Callable[[], Rows]] = {
    **{name: partial(study, *of) for name, of in STUDY.items()},
    "study-choice": study_choice,
    "study-front": study_front,
    "study-claims": study_claims,
    "study-evidence": study_evidence,
    "study-rounds": study_rounds,
    "quickstart": quickstart,
    "quickstart-settings": quickstart_settings,
    "methods": methods,
    "all-methods": all_methods,
    "published": published,
    "memory": memory,
    "positions": positions,
    "formats": formats,
    "step": step,
    "zero-times": zero_times,
    "zero-memory": zero_memory,
    "storm": storm,
    "storm-kinds": storm_kinds,
    "codec": codec,
    "codec-stages": codec_stages,
    "scale": scale,
    "idle": idle,
    "start": start,
    "doctor": doctor,
    "peers": peers,
    "slow-link": slow_link,
    "slow-predict": slow_predict,
    "uplinks": uplinks,
    "slow-methods": slow_methods,
    "slow-delay": slow_delay,
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
        f"{_short(ratio)} x",
    ]


def _figure(value: float, unit: str) -> str:
    return f"{value:.2f} MB" if unit == "MB" else f"{value:.1f} x"


def _kept(memory: dict[str, int], place: str) -> int:
    return memory[f"{place}_state"] + memory[f"{place}_flight"]


def _share(count: int, parameters: int) -> str:
    """Bytes per parameter, with GB in brackets."""
    return f"{count / parameters:.2f} ({count / 1e9:.2f})" if count else "0"


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
    return _rate(row["link"]) if row["rtt_ms"] else "no limit"


def _rate(link: str) -> str:
    """As "100 Mbit/s"."""
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", link).groups()  # type: ignore[union-attr]
    return f"{number} {unit}/s"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _study() -> dict[str, dict[str, Any]]:
    """The tuned rows of the study's main table, by preset, and by "full muon", "muloco 1 bit"."""
    found = {}
    for row in load("study-main.json")["rows"]:
        words = row["name"].split()
        inner = [word for word in words if word in ("muon", "adamw", "1", "bit")]
        if words[-1] == "tuned":
            found[" ".join([words[0], *inner])] = row
    return found


def _percent(ours: dict[str, Any], other: dict[str, Any]) -> str:
    """The paired difference of two rows of the study in percent of the other's loss, with its 90 %
    interval.
    """
    seeds = [seed for seed in ours["losses"] if other["losses"].get(seed) is not None]
    apart = [100 * (ours["losses"][s] / other["losses"][s] - 1) for s in seeds]
    mean, half = interval(apart)
    return f"{mean:+.1f} %" + (f" +- {half:.1f} %" if len(apart) > 1 else "")


def _stages(found: dict[str, float]) -> list[str]:
    return [f"{ns:.2f}" for ns in found.values()]


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


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


# ---- pages -------------------------------------------------------------------------------------


def markdown(rows: Rows) -> str:
    """A table whose columns of numbers are aligned to the right."""
    number = re.compile(r"^[\d.]+( of [\d.]+)?( ?[%xs]| [kMGT]?B)?$|^-$|^not run$")
    right = [all(number.match(row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("---:" if r else "---" for r in right) + "|")
    return "\n".join(lines) + "\n"


def pages() -> Iterator[Path]:
    """The files that may hold tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))
    yield ROOT / "recipes" / "README.md"


GAPS = ROOT / "fsdp_demo" / "planner" / "gaps.json"


def planner_gaps() -> dict[str, Any]:
    """The planner's table of gaps, with the study's rows as they are now."""
    table, rows = json.loads(GAPS.read_text(encoding="utf-8")), _study()
    full = rows["full"]
    table["study"]["loss"] = round(full["loss"], 6)
    table["study"]["difference"] = {
        name: round(row["difference"], 6)
        for name, row in rows.items()
        if row is not full and " " not in name
    }
    return table


def write() -> None:
    """Put every table between its marks, and the study's rows into the planner's table."""
    GAPS.write_text(json.dumps(planner_gaps(), indent=1) + "\n", encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        made = MARK.sub(
            lambda m: f"<!-- table: {m['name']} -->\n{markdown(TABLES[m['name']]())}<!-- end -->",
            text,
        )
        if made != text:
            page.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    elif sys.argv[1:]:
        sys.exit(f"usage: {sys.argv[0]} [--write]")
    else:
        print(
            "\n".join(
                f"<!-- table: {name} -->\n{markdown(make())}<!-- end -->\n"
                for name, make in TABLES.items()
            )
        )
