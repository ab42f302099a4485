"""Tables of README.md and docs/ from the json files in this folder, and of all keys of a
configuration from the package.

    python docs/figures/tables.py             # print them
    python docs/figures/tables.py --write     # put them between their marks in README.md, docs/**/*.md and recipes/README.md

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. A test compares
the two (tests/docs/test_figures.py). `about.json` says date, machine and command of each file.
"""  # noqa: E501

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tables_configuration as configuration  # noqa: E402
import tables_costs as costs  # noqa: E402
import tables_links as links  # noqa: E402
import tables_study as the_study  # noqa: E402
from figure_cells import ROOT, Rows, load, short  # noqa: E402

import compare  # noqa: E402  isort: skip
from report import size  # noqa: E402  isort: skip

MARK = re.compile(
    r"^<!-- table: (?P<name>[\w-]+) -->\n(?P<text>.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE
)
BASELINE = "baseline (all-reduce every step)"
CHOICE = {  # those of the README, and for whom each is
    "diloco": "a first run; an exchange may take minutes, but is seldom",
    "sparse_loco": "large models and long runs on slow links",
    "decoupled_momentum": "the same, on the slowest links",
    "muloco": "you may take Muon; its paper tuned up to 3.1 B parameters",
    "sign_loco": "small and frequent exchanges; it is ours, from no paper",
    "sign_muloco": "the same with Muon; nobody has trained a large model with it",
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
    "local_sgd": ("parameters", "any", "after an exchange"),
    "local_adam": ("parameters and both moments", "AdamW", "after an exchange"),
    "desloc": (
        "parameters and moments (not of embeddings)",
        "AdamW, any with named states",
        "after an exchange",
    ),
}


# ---- tables ------------------------------------------------------------------------------------


def quickstart_settings() -> Rows:
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


TABLES: dict[str, Callable[[], Rows]] = {
    **{name: partial(the_study.study, *of) for name, of in the_study.STUDY.items()},
    **{f"study-length-{n}": partial(the_study.study_length, n) for n in the_study.LENGTHS},
    "study-short": the_study.study_short,
    "study-choice": the_study.study_choice,
    "study-front": the_study.study_front,
    "study-claims": the_study.study_claims,
    "study-evidence": the_study.study_evidence,
    "study-rounds": the_study.study_rounds,
    "quickstart-settings": quickstart_settings,
    "methods": methods,
    "all-methods": all_methods,
    "published": costs.published,
    "memory": costs.memory,
    "positions": costs.positions,
    "formats": costs.formats,
    "step": costs.step,
    "zero-times": costs.zero_times,
    "zero-memory": costs.zero_memory,
    "storm": links.storm,
    "storm-kinds": links.storm_kinds,
    "codec": costs.codec,
    "codec-stages": costs.codec_stages,
    "scale": costs.scale,
    "idle": costs.idle,
    "doctor": links.doctor,
    "peers": links.peers,
    "slow-link": links.slow_link,
    "slow-predict": links.slow_predict,
    "uplinks": links.uplinks,
    "slow-methods": links.slow_methods,
    "slow-delay": links.slow_delay,
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


def markdown(rows: Rows) -> str:
    """A table whose columns of numbers are aligned to the right."""
    number = re.compile(r"^[\d.,]+( of [\d.]+)?( ?[%xs]| [kMGT]?B)?$|^-$|^not run$")
    right = [all(number.match(row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("---:" if r else "---" for r in right) + "|")
    return "\n".join(lines) + "\n"


def pages() -> Iterator[Path]:
    """The files that may hold tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield ROOT / "recipes" / "README.md"


def write() -> None:
    """Put every table between its marks, and the study's rows into the planner's table."""
    the_study.write_gaps()
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
