"""Tables of README.md and docs/ from the json files in this folder.

    python docs/figures/tables.py             # print them
    python docs/figures/tables.py --write     # put them between their marks in README.md, docs/*.md and recipes/README.md

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. A test compares
the two (tests/docs/test_figures.py). `about.json` says date, machine and command of each file.
"""  # noqa: E501

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

import compare  # noqa: E402
from report import size  # noqa: E402

Rows = list[list[str]]
MARK = re.compile(
    r"^<!-- table: (?P<name>[\w-]+) -->\n(?P<text>.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE
)
BASELINE = "baseline (all-reduce every step)"
STORMS = ("demo", "diloco", "streaming_diloco")
CHOICE = ("demo", "diloco", "decoupled_momentum")  # the three that the README recommends

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
        rows.append([name, *(cell.removesuffix(" less") for cell in compare.row(name, run)[1:])])
    return [head, *rows]


def quickstart_settings() -> Rows:
    """The same with the settings of each run."""
    settings = ["learning rate, settings", *(run["settings"] for run in load("quickstart.json"))]
    return [[row[0], more, *row[1:]] for row, more in zip(quickstart(), settings, strict=True)]


def methods() -> Rows:
    """The presets to choose from: bytes of Llama-3.2-1B."""
    found = {entry["preset"]: entry for entry in load("bytes.json")["presets"]["rows"]}
    head = [
        "preset",
        "crosses the slow link",
        "settings",
        "per exchange",
        "per step",
        "fewer bytes",
        "inner optimizer",
    ]
    return [
        head,
        *([*_named(found[name])[:2], *_sent(found[name]), METHODS[name][1]] for name in CHOICE),
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


TABLES: dict[str, Callable[[], Rows]] = {
    "quickstart": quickstart,
    "quickstart-settings": quickstart_settings,
    "methods": methods,
    "all-methods": all_methods,
    "storm": storm,
    "storm-kinds": storm_kinds,
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


def write() -> None:
    """Put every table between its marks."""
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
