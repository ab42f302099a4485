"""The study: two cells in a few steps by the real command and real processes, what the cache does
for a second call, and keys.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "benchmarks" / "study.py"
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent)]

from study_cells import TABLES, Cell, Setting  # noqa: E402


def study(output: Path) -> str:
    words = [
        sys.executable,
        str(SCRIPT),
        "--only",
        "one replica alone,full",
        "--steps",
        "4",
        "--output",
        str(output),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_cells_then_the_cache(tmp_path):
    study(tmp_path)
    table = json.loads((tmp_path / "first.json").read_text())
    alone, full = table["cells"]
    assert alone["bytes_sent"] == 0 and alone["cell"]["replicas"] == 1
    assert full["cell"]["replicas"] == 4 and full["equal_at_end"] is True and full["drift"] == 0
    # a bf16 ring all-reduce, four steps
    assert full["bytes_sent"] == pytest.approx(2 * 3 / 4 * 2 * full["parameters"] * 4, rel=0.01)
    for cell in table["cells"]:
        assert (
            set(cell["loss"]) == {"method", "mean", "replica", "finished"}
            and 2 < cell["loss"]["mean"] < 5.7
        )
        # replicas are equal: one model under four names
        assert cell["loss"] == dict.fromkeys(cell["loss"], cell["loss"]["mean"])
    text = (tmp_path / "first.md").read_text()
    assert (
        "4 steps of 8 x 128 bytes, 4,096 tokens per replica, seed 0" in text
        and "| one replica alone |" in text
    )

    (done,), (again,) = (
        list((tmp_path / "cells").glob(f"{cell['key']}.json")) for cell in (alone, full)
    )
    assert len(list(tmp_path.rglob("*.*"))) == 4, "a temporary file was left"
    when = done.stat().st_mtime_ns
    again.unlink()  # as after an interrupt: goes on with what is missing
    assert study(tmp_path).count("(cached)") == 1 and done.stat().st_mtime_ns == when
    assert json.loads(again.read_text())["loss"] == full["loss"]  # to the bit


def test_keys_follow_the_settings_and_not_the_name():
    cell, setting = Cell("a", "diloco", {"period": 20}), Setting()
    key = cell.key(setting, "texts")
    assert (
        dataclasses.replace(cell, name="b", changes={"period": 20, "momentum": 0.9}).key(
            setting, "texts"
        )
        == key
    )
    others = [
        cell.key(setting, "other"),
        cell.key(Setting(steps=12), "texts"),
        cell.key(Setting(seed=1), "texts"),
    ]
    for change in (
        {"lr": 1e-3},
        {"replicas": 2},
        {"preset": "local_sgd"},
        {"changes": {"period": 20, "momentum": 0.5}},
    ):
        others.append(dataclasses.replace(cell, **change).key(setting, "texts"))
    assert len({key, *others}) == 8


def test_every_cell_is_a_configuration_the_library_takes_under_one_name():
    setting, keys = Setting(), {}
    for cell in (c for cells in TABLES.values() for c in cells):
        assert (
            keys.setdefault(cell.name, cell.key(setting, "")) == cell.key(setting, "")
            and "," not in cell.name
        )
