"""Tables of benchmarks/results: the json they come from is kept, and what can be counted is counted
again; and what docs/ and the planner take from the study.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import figure_cells
import pytest

from benchmarks import bytes as counting
from benchmarks import kept, published_bytes, tables, tables_costs, tables_links, tables_study
from benchmarks import memory as remembering
from fsdp_demo import preset
from study.muon_rates import one_bit
from tests.support import pages

ROOT = pages.ROOT
FIGURES = ROOT / "benchmarks" / "figures"
PLACE = {
    table: f"benchmarks/results/{page}.md"
    for page, names in {
        "plan": "uplinks slow-predict",
        "doctor": "doctor",
        "methods": "slow-delay",
        "compression": "published formats codec codec-stages positions scale",
        "step": "step idle zero-times zero-memory memory",
        "links": "slow-link peers",
        "unlike-machines": "drop",
        "faults": "storm storm-kinds",
        "study": "study-main study-choice study-forms study-front study-claims study-evidence",
        "study-momentum": "study-memory study-memory-larger study-transform"
        " study-transform-larger study-demo-adamw study-decoupled",
        "study-rounds": "study-divisor study-values study-owners study-feedback"
        " study-one-bit study-states study-rise study-rounds",
        "study-robust": "study-length-long study-length-short study-length-large"
        " study-length-large-short study-replicas study-rates study-longer study-periods"
        " study-delay"
        " study-slow-island study-attached study-precision study-text",
        "study-size": "study-size study-size-muloco study-size-ours",
        "study-muon": "study-muon study-muon-long study-muon-large study-muon-replicas"
        " study-muon-places study-muon-tuned",
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
    """A marked table is what benchmarks/tables.py makes of its json."""
    assert name in tables.TABLES, (
        f"{page}: <!-- table: {name} --> is not known: allowed are {', '.join(tables.TABLES)}"
    )
    assert text.strip() == figure_cells.markdown(tables.TABLES[name]()).strip(), (
        "run python benchmarks/tables.py --write"
    )


def test_figures_every_table_is_on_its_page() -> None:
    """Each table is on the page that it belongs to, and no other is marked."""
    assert PLACE.keys() == tables.TABLES.keys()
    assert {name: page for page, name, _ in marked()} == PLACE


OF_STUDY = tables_study.STUDY | {k: ("muon", *v) for k, v in tables_study.MUON.items()}


@pytest.mark.parametrize("name", sorted({table for table, *_ in OF_STUDY.values()}))
def test_figures_every_group_of_the_study_is_in_one_table(name: str) -> None:
    """Each group of the study is in one table."""
    for group in {row["group"] for row in kept.load(f"study-{name}.json")["rows"]}:
        there = [
            label
            for label, (of, *begins) in OF_STUDY.items()
            if of == name and (not begins or group.startswith(tuple(begins)))
        ]
        assert len(there) == 1, f"group {group!r} of study-{name}.json stands in {there}"


def test_figures_planner_and_docs_have_what_the_study_says() -> None:
    """The planner's gaps, and the rows of docs/study.md, are those of the study."""
    assert not tables_study.gaps_are_stale(), "run python benchmarks/tables.py --write"
    there = json.loads(tables_study.SHORT.read_text(encoding="utf-8"))
    assert there == tables_study.short_tables(), "run python benchmarks/tables.py --write"


def test_tables_say_that_gaps_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run of tables.py says that the planner's gaps.json is stale."""
    old = json.loads(tables_study.GAPS.read_text(encoding="utf-8"))
    old["study"]["loss"] = 9.0
    monkeypatch.setattr(tables, "TABLES", {})
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    monkeypatch.setattr(tables_study, "GAPS", tmp_path / "gaps.json")
    for table, says in ((old, "gaps.json is stale"), (tables_study.planner_gaps, "")):
        (tmp_path / "gaps.json").write_text(json.dumps(table() if callable(table) else table))
        tables.main()
        assert says in capsys.readouterr().out


def test_figures_marks_come_in_pairs() -> None:
    """Each mark of a table has an end."""
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^<!-- table: ", text, re.MULTILINE)) == len(
            figure_cells.MARK.findall(text)
        ), pages.name(page)


@pytest.mark.parametrize(
    "file", sorted(p.name for p in FIGURES.glob("*.json") if p.name != "about.json")
)
def test_figures_file_has_date_machine_and_command(file: str) -> None:
    """Each file of figures has a date, a machine and a command."""
    about = json.loads((FIGURES / "about.json").read_text(encoding="utf-8"))
    assert file in about, f"benchmarks/figures/about.json does not name {file}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about[file]["date"]) and about[file]["machine"]
    (script,) = (
        word
        for word in shlex.split(about[file]["command"])
        if re.match(r"(recipes|benchmarks)/.*\.(py|sh)$", word)
    )
    assert (ROOT / script).is_file()


# ---- counted again -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shapes() -> Callable[[str], Any]:
    """Names and shapes of a model of recipes/models, made once."""
    kept: dict[str, Any] = {}
    return lambda name: kept.setdefault(name, counting.load(name))


def test_figures_sign_muloco_has_what_the_study_chose() -> None:
    """The preset `sign_muloco` has the settings of a row of the study that AdamW's all-reduce is
    the reference of, and that several seeds of long runs put below it.
    """
    cell = one_bit(24, 3.2e-2)
    plain = preset("muloco", **{**cell.changes, "clip": 1.0, "lr": 0.8})
    ours = preset("sign_muloco")
    assert replace(ours, preset="muloco", lr=plain.lr) == plain and ours.lr == cell.lr
    rows = [r for r in kept.load("study-muon.json")["rows"] if r["group"] == "1,920 steps"]
    (row,) = (r for r in rows if r["name"].startswith(cell.name))
    assert rows[0]["name"].startswith("full lr") and row["seeds"] >= 2
    assert row["difference"] + row["half"] < 0


@pytest.mark.parametrize("group", tables_study.LENGTHS_MUON)
def test_figures_all_reduce_beside_muon_is_that_of_longer_runs(group: str) -> None:
    """The all-reduce of AdamW beside Muon has the losses that were kept of it, on more seeds."""
    _, adamw, reduced = tables_study.muon_rows(group)
    rows = [r for r in kept.load("study-muon.json")["rows"] if r["group"] == group]
    for row in (r for r in rows if r["name"].startswith("full lr")):
        for seed, loss in row["losses"].items():
            assert abs(adamw["losses"][seed] - loss) < 2e-4
    assert set(reduced["losses"]) <= set(adamw["losses"])


def test_figures_published_bytes_are_counted_again(shapes: Callable[[str], Any]) -> None:
    """Published bytes beside ours are counted again."""
    made = published_bytes.published(shapes("olmo-300m"), shapes("olmo-1b"))
    assert [asdict(claim) for claim in made] == [
        {key: row[key] for key in asdict(made[0])}
        for row in kept.load("published.json")["published"]
    ]


def test_figures_memory_is_what_the_planner_counts(shapes: Callable[[str], Any]) -> None:
    """The table of memory is what the planner counts."""
    rows = kept.load("memory.json")
    assert [asdict(e) for e in remembering.entries(shapes("llama-3.2-1b"), 4, 8)] == rows


# ---- compression -------------------------------------------------------------------------------


def test_figures_compression_rows_add_up() -> None:
    """The figures of compression are consistent: stages make the whole, ratios are of the figures
    beside them, and the processor is named.
    """
    found = kept.load("codec.json")
    assert found["cpu"] and found["form"].startswith("part=")
    for name in tables_costs.HOT:
        r = found[name]
        for whole, key in (("ours_ns", "stages_ns"), ("published_ns", "published_stages_ns")):
            if key in r:
                *parts, total = r[key].values()
                assert r[whole] == total == pytest.approx(sum(parts), rel=0.05)
        if "ratio" in r:
            assert r["ratio"] == pytest.approx(r["published_ns"] / r["ours_ns"])


def test_figures_scale_table_has_the_spread() -> None:
    """The table of scale has the spread of its costs."""
    found = kept.load("scale.json")
    costs = [r["all"] for r in found["rows"] if r["kind"] == "size"]
    assert found["cpu"] and found["spread"]["size"] == pytest.approx(max(costs) / min(costs) - 1)
    assert {r["replicas"] for r in found["rows"]} >= {2, 4, 8, 16}


# ---- storms ------------------------------------------------------------------------------------


def test_figures_storms_are_taken_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of storms take the files as the benchmark writes them."""
    kind = {
        "events": 2,
        "survived": 2,
        "longest_stall_s": 10.26,
        "lost": 1,
        "rejoin_s": None,
        "not_back": 0,
    }
    found: dict[str, Any] = {
        "events": 2,
        "survived": 2,
        "by_kind": {"stop": kind},
        "longest_stall_s": 10.26,
        "rejoin_s": 5.34,
    }
    found |= {
        "participating_share": 0.912,
        "mismatches": [],
        "digests_compared": 209,
        "committed_share": None,
    }
    found |= {"loss": 1.8338, "loss_undisturbed": None}
    for name in tables_links.STORMS:
        (tmp_path / f"storm-{name}.json").write_text(json.dumps(found))
    monkeypatch.setattr(kept, "FOLDERS", (tmp_path,))
    assert tables_links.storm()[1] == [
        "`demo`, 2 events",
        "2 of 2",
        "10.3 s",
        "5.3 s",
        "91%",
        "0 of 209",
        "not run",
        "1.834",
        "not run",
    ]
    assert tables_links.storm_kinds()[1] == ["`stop`", *["2 of 2, 10.3 s"] * 3]
