"""`recipes/check.sh` and `check.py`: the rows that a machine takes, and how they are judged."""

import importlib.machinery
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture
def checker(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import check

    def plan(gpus, *options):
        monkeypatch.setattr(sys, "argv", ["check.py", *options])
        return check.plan(check.arguments(), gpus)

    check.planned = plan
    return check


@pytest.mark.parametrize(("gpus", "ranks", "skipped"), [
    (0, "2 x 2", set()),
    (1, "2 x 1 sharing 1 GPU", {"unsharded", "mesh"}),
    (2, "2 x 2 sharing 2 GPUs", {"mesh"}),
    (3, "2 x 2 sharing 2 GPUs", {"mesh"}),
    (4, "2 x 2", set()),
    (8, "2 x 4", set()),
])  # fmt: skip
@pytest.mark.parametrize("deepspeed", [True, False])
def test_check_plans_rows_by_the_number_of_gpus(
    checker, monkeypatch, gpus, ranks, skipped, deepspeed
):
    """recipes/check.py takes as many GPUs as its rows say, and skips the others."""
    # none: the folder recipes/deepspeed alone
    file = "deepspeed/__init__.py" if deepspeed else None
    found = importlib.machinery.ModuleSpec("deepspeed", None, origin=file)
    monkeypatch.setattr(checker.importlib.util, "find_spec", lambda name: found)
    skipped = skipped if deepspeed else {*skipped, "zero"}
    rows = checker.planned(gpus)
    assert {name for name, row in rows.items() if row.skipped} == skipped
    assert rows["fsdp2"].ranks == ranks
    words = rows["fsdp2"].words
    assert ("--cpu" in words) == (gpus == 0) and ("--bf16" in words) == (gpus > 0)
    assert rows["zero"].skipped == ("" if deepspeed else "no deepspeed here")
    if deepspeed:
        assert ("--cpu" in rows["zero"].words) == (gpus == 0)
        assert "pretrain_deepspeed.py" in " ".join(rows["zero"].words)
    assert list(checker.planned(gpus, "--rows", "fsdp2")) == ["fsdp2"]
    with pytest.raises(SystemExit, match="ddp: unknown"):
        checker.planned(gpus, "--rows", "ddp")


@pytest.mark.parametrize(("status", "second", "result", "agree"), [
    (0, {}, "ok", "yes"),
    (0, {"digests_equal": False}, "FAILED: islands differ", "NO"),
    (0, {"loss_end": 5.6}, "FAILED: no learning", "yes"),
    (0, {"loss_end": float("nan")}, "FAILED: no learning", "yes"),
    (75, None, "FAILED: status 75, islands differ", "NO"),
])  # fmt: skip
def test_check_judges_both_islands(checker, tmp_path, status, second, result, agree):
    """recipes/check.py judges a row by the summaries of both islands."""
    first = {"digests_equal": True, "loss_start": 5.5, "loss_end": 5.0, "peak_memory": 2_000_000}
    first["tokens_per_second"] = 10.4
    for number, summary in enumerate([first, None if second is None else {**first, **second}]):
        if summary is not None:
            (tmp_path / f"island{number}").mkdir()
            (tmp_path / f"island{number}" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "log.txt").write_text(
        f"...\n[rehearse] ended after 9 s with status {status} (island0 0, island1 {status})\n"
    )
    found, cells = checker.judge(checker.Row("islands", "2 x 1", islands=2), status, tmp_path)
    assert found == result and cells[:2] == [f"island0 0, island1 {status}", agree]
    assert cells[3:] == ["2 MB", "10"]


def test_check_says_that_nothing_came(checker, tmp_path):
    """recipes/check.py says that a row failed or timed out where no summary came."""
    (tmp_path / "log.txt").write_text("Traceback\n")
    row, nothing = checker.Row("mesh", "2 x 2"), ["1", "-", "-", "-", "-"]
    assert checker.judge(row, 1, tmp_path) == ("FAILED", nothing)
    assert checker.judge(row, 124, tmp_path)[0] == "timed out"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_check_on_the_cpu(tmp_path):
    """recipes/check.sh runs its rows on the CPU."""
    env = {**os.environ, "FSDP_DEMO_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    options = "--cpu --procs 1 --steps 6 --model tiny --batch-size 2 --sequence-length 64 --output"
    words = ["bash", str(RECIPES / "check.sh"), *options.split(), str(tmp_path)]
    how = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=380)
    done = subprocess.run(words, env=env, **how)
    assert done.returncode == 0, done.stdout
    lines = (tmp_path / "check.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("|")]
    assert [row[3].strip() for row in rows[2:3]] == ["ok"] and rows[2][5].strip() == "yes"
