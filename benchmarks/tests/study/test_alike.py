"""What says that the study's kept runs still hold: it fails where one does not, or none is there; a
code is entered only where short runs of it equal those of the code before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study import alike, chosen
from study import results as study_results
from study import study as script
from study.cells import Run

Command = Callable[..., tuple[int, str]]
WORDS = ("--table", "front", "--only", "local_sgd H=5", "--seeds", "1")
NAMES = ("full", "local_sgd H=5")


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """The command with a list of codes and kept runs of its own; its code is `new`."""
    codes, kept = tmp_path / "codes.json", tmp_path / "kept.jsonl"
    codes.write_text(json.dumps([{"codes": ["first", "old"], "why": "nothing"}]))
    cells = [c for part in chosen.TABLES["front"].groups.values() for c in part if c.name in NAMES]
    runs = [Run(cell, chosen.TABLES["front"].at(cell, {}), 0) for cell in cells]
    known = [{"loss": {"finished": 1.5}, "bytes_sent": 7, "code": "old"} for _ in runs]
    lines = [json.dumps({**k, "key": r.key("old")}) for k, r in zip(known, runs, strict=True)]
    kept.write_text("\n".join(lines))

    def results(folder: Path, version: str) -> Any:
        return study_results.Results(folder, version, kept, codes)

    monkeypatch.setattr(script, "ALIKE", codes)
    monkeypatch.setattr(script, "Results", results)
    monkeypatch.setattr(script, "code_version", lambda: "new")

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["study.py", "--output", str(tmp_path / "out"), *words])
        return script.main(), capsys.readouterr().out

    return call


def ending(monkeypatch: pytest.MonkeyPatch, **result: Any) -> None:
    """Every run of the study ends at once, with these results."""

    def train_all(runs: list[Run], jobs: int, done: Callable[..., None], compiled: bool) -> None:
        for run in runs:
            done(run, dict(result))

    monkeypatch.setattr(script, "train_all", train_all)


@pytest.mark.parametrize(
    ("result", "status", "says"),
    [
        (
            {"loss": {"finished": 1.500004}, "bytes_sent": 7},
            0,
            "2 of 2 runs end as kept, at most 0",
        ),
        (
            {"loss": {"finished": 1.52}, "bytes_sent": 7},
            1,
            "2 of 2 runs differ: full seed 0, local",
        ),
        ({"loss": {"finished": None}, "bytes_sent": 7}, 1, "2 of 2 runs differ"),
        ({"loss": {"finished": 1.5}, "bytes_sent": 8}, 1, "bytes differ"),
        ({"error": "Traceback\nLost: peers"}, 1, "full seed 0: failed: Lost: peers"),
    ],
)
def test_verify_fails_where_a_run_differs(
    command: Command, monkeypatch: pytest.MonkeyPatch, result: Any, status: int, says: str
) -> None:
    """`--verify` compares with what is kept by codes that are entered, and its status says so."""
    ending(monkeypatch, **result)
    found, said = command(*WORDS, "--verify", "2")
    assert found == status and says in said, said


def test_verify_fails_where_nothing_is_kept(command: Command) -> None:
    """`--verify` of runs that nobody kept fails with a sentence."""
    status, said = command(*WORDS, "--steps", "3", "--verify", "2")
    assert status == 1 and "table front: none of its runs is kept, so nothing was verified" in said


def test_list_says_that_kept_runs_do_not_count(command: Command) -> None:
    """`--list` says why all runs are missing, and what to do."""
    status, said = command(*WORDS, "--list")
    assert status == 0 and "2 runs are missing" in said
    assert "kept runs do not count: this code is not in codes.json; --verify" in said


RUN = {"name": "full", "loss": {"finished": 2.5}, "bytes_sent": 9}


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ({"a": RUN, "b": RUN}, {"a": RUN, "b": RUN}, "2 short runs equal those of old; new is ent"),
        ({"a": RUN}, {"b": RUN}, "no cell has the same configuration in old and in new"),
        ({"a": RUN}, {"a": {**RUN, "bytes_sent": 8}}, "full: bytes_sent 9, now 8"),
        ({"a": RUN}, {"a": {"name": "full", "error": "lost"}}, "error missing, now lost"),
        ({"a": {"name": "full", "error": "x"}}, {"a": {"name": "full", "error": "x"}}, "full: x"),
    ],
)
def test_code_is_entered_where_short_runs_are_equal(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: Any,
    now: Any,
    says: str,
) -> None:
    """`--enter` enters a code only where every figure of all short runs is equal."""
    pair = ({"code": "old", "runs": before}, {"code": "new", "runs": now})
    monkeypatch.setattr(alike, "compare", lambda *words: pair)
    status, said = command("--enter", "a comment")
    (group,) = json.loads((tmp_path / "codes.json").read_text())
    entered = group == {"codes": ["first", "old", "new"], "why": "nothing; new: a comment"}
    assert says in said and entered == (status == 0) == (before == now and len(before) == 2), said
    assert entered or (group["codes"] == ["first", "old"] and "nothing was entered" in said)


def test_code_is_entered_beside_a_known_one_only(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last commit of the list has another code than one of it, nothing is entered."""
    pair = ({"code": "else", "runs": {"a": RUN}}, {"code": "new", "runs": {"a": RUN}})
    monkeypatch.setattr(alike, "compare", lambda *words: pair)
    status, said = command("--enter", "a comment")
    assert status == 1 and "has the code else, which is not in it" in said


@pytest.mark.slow
def test_short_runs_of_one_code_are_equal() -> None:
    """Two processes that train the short runs of a table give the same figures."""
    one, two = (alike.trained(alike.ROOT, "front", "local_sgd H=5", 1) for _ in range(2))
    count, lines = alike.differences(one, two)
    assert count == len(one["runs"]) > 0 and not lines


def test_last_entry_is_a_checkout() -> None:
    """The code that was entered last is the one of the last commit of the list, checked out."""
    if not (alike.ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    with alike.last_entry() as folder:
        (file,) = folder.rglob("study-codes.json")
        listed = json.loads(file.read_text())
        assert listed[-1]["codes"] and (folder / "fsdp_demo").is_dir()
    assert not folder.exists()
    words = ["git", "-C", str(alike.ROOT), "worktree", "list"]
    assert str(folder) not in subprocess.run(words, capture_output=True, text=True).stdout
