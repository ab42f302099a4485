"""Figures in README.md and docs/: the json they come from lies in docs/figures, and what can be
counted is counted again.
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

import pytest

from ..support import pages

ROOT = pages.ROOT
FIGURES = ROOT / "docs" / "figures"
sys.path[:0] = [str(FIGURES), str(ROOT / "recipes"), str(ROOT / "benchmarks")]

pytest.importorskip("transformers")  # shapes of the models

import bytes as counting  # noqa: E402
import figure_cells  # noqa: E402
import memory as remembering  # noqa: E402
import published_bytes  # noqa: E402
import tables  # noqa: E402
import tables_costs  # noqa: E402
import tables_links  # noqa: E402
import tables_study  # noqa: E402

from fsdp_demo import Link, load_config, preset, ring_all_reduce_bytes  # noqa: E402
from fsdp_demo.exchange.plan import plan_model  # noqa: E402
from study.methods import sign_muloco  # noqa: E402

STORMS = [
    pytest.param(name, id=name)
    for name in tables_links.STORMS
    if (FIGURES / f"storm-{name}.json").exists()
]
PLACE = {
    table: page
    for page, names in {
        "README.md": "methods",
        "docs/methods.md": "all-methods",
        "docs/configuration.md": "keys keys-channels keys-schedule keys-accumulator keys-codec"
        " keys-reducer keys-applier keys-fragments keys-later preset-keywords",
        "docs/measured/results-plan.md": "uplinks slow-predict",
        "docs/measured/results-doctor.md": "doctor",
        "docs/measured/results.md": "quickstart-settings slow-methods slow-delay",
        "docs/measured/results-compression.md": "published formats codec codec-stages"
        " positions scale",
        "docs/measured/results-step.md": "step idle zero-times zero-memory memory",
        "docs/measured/results-links.md": "slow-link peers",
        "docs/measured/results-faults.md": "storm storm-kinds",
        "docs/study.md": "study-short",
        "docs/measured/study.md": "study-main study-choice study-forms study-front"
        " study-claims study-evidence",
        "docs/measured/study-momentum.md": "study-memory study-memory-larger study-transform"
        " study-transform-larger study-demo-adamw study-decoupled",
        "docs/measured/study-rounds.md": "study-divisor study-values study-owners study-feedback"
        " study-one-bit study-states study-rise study-rounds",
        "docs/measured/study-robust.md": "study-length-long study-length-short study-length-large"
        " study-length-large-short study-replicas study-rates study-longer study-periods"
        " study-delay"
        " study-slow-island study-attached study-precision study-text",
        "docs/measured/study-size.md": "study-size study-size-muloco study-size-ours",
    }.items()
    for table in names.split()
}


def marked() -> list[tuple[str, str, str]]:
    """(page, name, text) of every table between marks."""
    found = []
    for page in tables.pages():
        for m in tables.MARK.finditer(page.read_text(encoding="utf-8")):
            found.append((pages.name(page), m["name"], m["text"]))
    return found


@pytest.mark.parametrize(
    ("page", "name", "text"), [pytest.param(*m, id=f"{m[0]} {m[1]}") for m in marked()]
)
def test_figures_table_is_what_its_json_says(page: str, name: str, text: str) -> None:
    """A marked table is what docs/figures/tables.py makes of its json."""
    assert name in tables.TABLES, (
        f"{page}: <!-- table: {name} --> is not known: allowed are {', '.join(tables.TABLES)}"
    )
    assert text.strip() == tables.markdown(tables.TABLES[name]()).strip(), (
        "run python docs/figures/tables.py --write"
    )


def test_figures_every_table_is_on_its_page() -> None:
    """Each table is on the page that it belongs to, and no other is marked."""
    assert PLACE.keys() == tables.TABLES.keys()
    assert {name: page for page, name, _ in marked()} == PLACE


@pytest.mark.parametrize("name", sorted({table for table, *_ in tables_study.STUDY.values()}))
def test_figures_every_group_of_the_study_is_in_one_table(name: str) -> None:
    """Each group of the study is in one table."""
    for group in {row["group"] for row in figure_cells.load(f"study-{name}.json")["rows"]}:
        there = [
            label
            for label, (of, *begins) in tables_study.STUDY.items()
            if of == name and (not begins or group.startswith(tuple(begins)))
        ]
        assert len(there) == 1, f"group {group!r} of study-{name}.json stands in {there}"


def test_figures_planner_has_the_gaps_of_the_study() -> None:
    """The planner's gaps are those of the study."""
    there = json.loads(tables_study.GAPS.read_text(encoding="utf-8"))
    assert there == tables_study.planner_gaps(), "run python docs/figures/tables.py --write"


def test_figures_marks_come_in_pairs() -> None:
    """Each mark of a table has an end."""
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^<!-- table: ", text, re.MULTILINE)) == len(
            tables.MARK.findall(text)
        ), pages.name(page)


@pytest.mark.parametrize(
    "file", sorted(p.name for p in FIGURES.glob("*.json") if p.name != "about.json")
)
def test_figures_file_has_date_machine_and_command(file: str) -> None:
    """Each file of figures has a date, a machine and a command."""
    about = json.loads((FIGURES / "about.json").read_text(encoding="utf-8"))
    assert file in about, f"docs/figures/about.json does not name {file}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about[file]["date"]) and about[file]["machine"]
    (script,) = (
        word
        for word in shlex.split(about[file]["command"])
        if word.startswith(("recipes/", "benchmarks/"))
    )
    assert (ROOT / script).is_file()


# ---- counted again -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shapes() -> Callable[[str], Any]:
    """Names and shapes of a model of recipes/models, made once."""
    kept: dict[str, Any] = {}
    return lambda name: kept.setdefault(name, counting.load(name))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=f"auto {run['preset']}" if "auto" in run else run["preset"])
        for run in figure_cells.load("quickstart.json")
    ],
)
def test_figures_quickstart_sends_what_the_planner_counts(
    run: dict[str, Any], shapes: Callable[[str], Any]
) -> None:
    """The bytes of the measured quickstart are those that the planner counts."""
    small, steps, islands = shapes("small"), run["steps"], run["islands"]
    config = load_config(run["preset"], run["changes"])
    plans = plan_model(config, small, islands, run["procs"])
    # auto measures for some steps, and exchanges after them
    sent = sum(p.over(range(run.get("auto", 0), steps)).bytes_sent for p in plans)
    # it ends inside a round: finish() exchanges what is left
    if any(p.message(steps - 1).exchanges == 0 for p in plans):
        sent += sum(p.most().bytes_sent for p in plans)
    full = ring_all_reduce_bytes(islands, 2 * run["parameters"]) * steps
    assert run["parameters"] == counting.numel(small)
    assert run["tokens"] == steps * 4 * 256 * islands * run["procs"]
    assert (run["bytes_sent_per_island"], run["bytes_full_per_island"]) == (sent, full)
    assert run["ratio"] == pytest.approx(full / sent, rel=1e-6)


def test_figures_bytes_are_what_the_planner_counts(shapes: Callable[[str], Any]) -> None:
    """The table of bytes per preset is what the planner counts."""
    facts = figure_cells.load("bytes.json")["presets"]
    assert (facts["model"], facts["islands"], facts["shards"]) == ("llama-3.2-1b", 3, 1)
    link = Link.parse(facts["link"])
    made = {e.preset: e for e in counting.entries(shapes("llama-3.2-1b"), 3, 1, link)}
    assert list(made) == [row["preset"] for row in facts["rows"]]
    for row in facts["rows"]:
        entry = made[row["preset"]]
        assert {key: row[key] for key in ("settings", "sent", "received", "messages")} == {
            key: getattr(entry, key) for key in ("settings", "sent", "received", "messages")
        }
        assert row["sent_per_step"] == pytest.approx(entry.sent_per_step) and row[
            "seconds"
        ] == pytest.approx(entry.seconds)


def test_figures_sign_muloco_has_what_the_study_chose() -> None:
    """The preset `sign_muloco` has the settings that the study chose."""
    row = tables_study.tuned()["sign_muloco"]
    assert row["name"] == "sign_muloco tuned"
    rate, *chosen = figure_cells.load("study-main.json")["tuned"][row["name"]].split()
    cell = sign_muloco()
    plain = preset("muloco", **{**cell.changes, "clip": 1.0, "lr": 0.8})
    assert {f"{key}={cell.changes[key]}" for key in ("momentum", "beta")} <= set(chosen)
    ours = preset("sign_muloco")
    assert replace(ours, preset="muloco", lr=plain.lr) == plain
    assert f"lr={ours.lr}" == rate and ours.lr == cell.lr


def test_figures_published_bytes_are_counted_again(shapes: Callable[[str], Any]) -> None:
    """Published bytes beside ours are counted again."""
    made = published_bytes.published(shapes("olmo-300m"), shapes("olmo-1b"))
    assert [asdict(claim) for claim in made] == [
        {key: row[key] for key in asdict(made[0])}
        for row in figure_cells.load("published.json")["published"]
    ]


def test_figures_memory_is_what_the_planner_counts(shapes: Callable[[str], Any]) -> None:
    """The table of memory is what the planner counts."""
    rows = figure_cells.load("memory.json")
    assert [asdict(e) for e in remembering.entries(shapes("llama-3.2-1b"), 4, 8)] == rows


def test_figures_every_preset_has_its_words() -> None:
    """Each preset has a text in the table of methods."""
    from fsdp_demo import presets

    assert set(tables.METHODS) == set(presets())


# ---- compression -------------------------------------------------------------------------------


def test_figures_compression_rows_add_up() -> None:
    """The figures of compression are consistent: stages make the whole, ratios are of the figures
    beside them, and the processor is named.
    """
    found = figure_cells.load("codec.json")
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
    found = figure_cells.load("scale.json")
    costs = [r["all"] for r in found["rows"] if r["kind"] == "size"]
    assert found["cpu"] and found["spread"]["size"] == pytest.approx(max(costs) / min(costs) - 1)
    assert {r["replicas"] for r in found["rows"]} >= {2, 4, 8, 16}


# ---- storms ------------------------------------------------------------------------------------


@pytest.mark.skipif(not STORMS, reason="no storm has been kept yet")
@pytest.mark.parametrize("name", STORMS)
def test_figures_storm_is_whole_and_of_its_preset(name: str) -> None:
    """The figures of a storm are of all its events and of its preset."""
    found, about = (
        figure_cells.load(f"storm-{name}.json"),
        figure_cells.load("about.json")[f"storm-{name}.json"],
    )
    words = shlex.split(about["command"])
    assert words[words.index("--preset") + 1] == name and words[words.index("--events") + 1] == str(
        found["events"] + found["skipped"]
    )
    kinds = found["by_kind"].values()
    assert (
        sum(k["events"] for k in kinds) == found["events"]
        and sum(k["survived"] for k in kinds) == found["survived"]
    )
    assert found["events"] - found["survived"] == len(found["failures"])
    assert found["longest_stall_s"] == max(k["longest_stall_s"] for k in kinds)
    assert (
        found["digests_equal"] == (not found["mismatches"])
        and 0 < found["participating_share"] <= 1
    )


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
    (tmp_path / "storm-demo.json").write_text(json.dumps(found))
    monkeypatch.setattr(figure_cells, "HERE", tmp_path)
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
    assert tables_links.storm_kinds()[1] == ["`stop`", "2 of 2, 10.3 s"]
