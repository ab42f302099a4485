"""Figures in README.md and docs/: the json they come from lies in docs/figures, and what can be
counted is counted again.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest

from ..support import pages

ROOT = pages.ROOT
FIGURES = ROOT / "docs" / "figures"
sys.path.append(str(FIGURES))

pytest.importorskip("transformers")  # shapes of the models

import figure_cells  # noqa: E402

from fsdp_demo import Link, load_config, preset, presets, ring_all_reduce_bytes  # noqa: E402
from fsdp_demo.exchange.plan import plan_model  # noqa: E402
from fsdp_demo.tools.planner import load  # noqa: E402
from fsdp_demo.tools.planner.models import numel  # noqa: E402
from fsdp_demo.tools.planner.rows import settings  # noqa: E402

# by its path: benchmarks/ has tables of its own
spec = spec_from_file_location("docs_tables", FIGURES / "tables.py")
assert spec is not None and spec.loader is not None
tables = module_from_spec(spec)
spec.loader.exec_module(tables)

PLACE = {
    table: page
    for page, names in {
        "README.md": "methods",
        "docs/methods.md": "all-methods",
        "docs/configuration.md": "keys keys-channels keys-schedule keys-accumulator keys-codec"
        " keys-reducer keys-applier keys-fragments keys-later keys-drop keys-pairs"
        " preset-keywords",
        "docs/results.md": "quickstart peers-seconds slow-methods storms",
        "docs/study.md": "study-short study-short-muon",
    }.items()
    for table in names.split()
}


def marked() -> list[tuple[str, str, str]]:
    """(page, name, text) of every table between marks."""
    return [
        (pages.name(page), m["name"], m["text"])
        for page in tables.pages()
        for m in figure_cells.MARK.finditer(page.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(
    ("page", "name", "text"), [pytest.param(*m, id=f"{m[0]} {m[1]}") for m in marked()]
)
def test_figures_table_is_what_its_json_says(page: str, name: str, text: str) -> None:
    """A marked table is what docs/figures/tables.py makes of its json."""
    assert name in tables.TABLES, f"{page}: allowed are {', '.join(tables.TABLES)}"
    made = figure_cells.markdown(tables.TABLES[name]()).strip()
    assert text.strip() == made, "run python docs/figures/tables.py --write"


def test_figures_every_table_is_on_its_page() -> None:
    """Each table is on the page that it belongs to, and no other is marked."""
    assert PLACE.keys() == tables.TABLES.keys()
    assert {name: page for page, name, _ in marked()} == PLACE


def test_figures_marks_come_in_pairs() -> None:
    """Each mark of a table has an end."""
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        marks = re.findall(r"^<!-- table: ", text, re.MULTILINE)
        assert len(marks) == len(figure_cells.MARK.findall(text)), pages.name(page)


@pytest.mark.parametrize(
    "file", sorted(p.name for p in FIGURES.glob("*.json") if p.name != "about.json")
)
def test_figures_file_has_date_machine_and_command(file: str) -> None:
    """Each file of figures has a date, a machine and a command that starts a program."""
    about = figure_cells.load("about.json")
    assert file in about, f"docs/figures/about.json does not name {file}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about[file]["date"]) and about[file]["machine"]
    words = shlex.split(about[file]["command"])
    (script,) = (w for w in words if re.match(r"(recipes|benchmarks)/.*\.(py|sh)$", w))
    assert (ROOT / script).is_file()


def test_results_length() -> None:
    """docs/results.md has at most 1,900 words: what is longer belongs into benchmarks/results."""
    assert len((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split()) <= 1900


# ---- counted again -----------------------------------------------------------------------------


QUICKSTARTS = figure_cells.load("quickstart.json")


@pytest.mark.parametrize(
    "run", QUICKSTARTS, ids=lambda run: "auto " * ("auto" in run) + run["preset"]
)
def test_figures_quickstart_sends_what_the_planner_counts(run: dict[str, Any]) -> None:
    """The bytes of the measured quickstart are those that the planner counts."""
    small, steps, islands = load("small"), run["steps"], run["islands"]
    config = load_config(run["preset"], run["changes"])
    plans = plan_model(config, small, islands, run["procs"])
    # auto measures for some steps, and exchanges after them
    sent = sum(p.over(range(run.get("auto", 0), steps)).bytes_sent for p in plans)
    # it ends inside a round: finish() exchanges what is left
    if any(p.message(steps - 1).exchanges == 0 for p in plans):
        sent += sum(p.most().bytes_sent for p in plans)
    full = ring_all_reduce_bytes(islands, 2 * run["parameters"]) * steps
    assert run["parameters"] == numel(small)
    assert run["tokens"] == steps * 4 * 256 * islands * run["procs"]
    assert (run["bytes_sent_per_island"], run["bytes_full_per_island"]) == (sent, full)
    assert run["ratio"] == pytest.approx(full / sent, rel=1e-6)


def test_figures_bytes_are_what_the_planner_counts() -> None:
    """The table of bytes per preset is what the planner counts."""
    facts = figure_cells.load("bytes.json")["presets"]
    assert (facts["model"], facts["islands"], facts["shards"]) == ("llama-3.2-1b", 3, 1)
    llama, link = load("llama-3.2-1b"), Link.parse(facts["link"])
    ring, *rows = facts["rows"]
    assert ring["sent"] == ring_all_reduce_bytes(3, 2 * numel(llama))
    assert [row["preset"] for row in rows] == list(presets())
    for row in rows:
        config = preset(row["preset"])
        (plan,) = plan_model(config, llama, 3)
        most = plan.most()
        assert (row["settings"], row["sent"]) == (settings(config), most.bytes_sent)
        assert (row["received"], row["messages"]) == (most.bytes_received, most.messages)
        assert row["sent_per_step"] == pytest.approx(plan.average()[0])
        moved = 8 * max(most.bytes_sent, most.bytes_received) / link.bits_per_second
        assert row["seconds"] == pytest.approx(moved + most.messages * link.rtt)


def test_figures_every_preset_has_its_words() -> None:
    """Each preset has a text in the table of methods."""
    assert set(tables.METHODS) == set(presets())


@pytest.mark.parametrize("name", ["demo", "diloco", "streaming_diloco"])
def test_figures_storm_is_whole_and_of_its_preset(name: str) -> None:
    """The figures of a storm are of all its events and of its preset."""
    file = f"storm-{name}.json"
    found, about = figure_cells.load(file), figure_cells.load("about.json")[file]
    words = shlex.split(about["command"])
    assert words[words.index("--preset") + 1] == name
    assert words[words.index("--events") + 1] == str(found["events"] + found["skipped"])
    kinds = found["by_kind"].values()
    assert sum(k["events"] for k in kinds) == found["events"]
    assert sum(k["survived"] for k in kinds) == found["survived"]
    assert found["events"] - found["survived"] == len(found["failures"])
    assert found["longest_stall_s"] == max(k["longest_stall_s"] for k in kinds)
    assert found["digests_equal"] == (not found["mismatches"])
    assert 0 < found["participating_share"] <= 1
