"""What `memory.py` prints and writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import memory as weighing
from fsdp_demo import preset, presets
from fsdp_demo.exchange.plan import plan_memory


def test_memory_benchmark_inner_optimizers() -> None:
    """The table names the inner optimizer of each preset."""
    found = {e.preset: e.inner for e in weighing.entries(weighing.load("tiny"), 4, 8)}
    assert {name: inner for name, inner in found.items() if inner != "AdamW"} == {
        **dict.fromkeys(("demo", "random", "stride"), "SGD"),
        **dict.fromkeys(("muloco", "sign_muloco"), "Muon + AdamW"),
    }


def script(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["memory.py", *words])
    weighing.main()


def test_memory_benchmark_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of the memory benchmark is the plan."""
    script(
        monkeypatch,
        "--model",
        "tiny",
        "--islands",
        "3",
        "--shards",
        "2",
        "--json",
        str(tmp_path / "out.json"),
    )
    text, saved = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "3 islands of 2 shards" in text and [e["preset"] for e in saved] == list(presets())
    tensors = weighing.load("tiny")
    for e in saved:
        assert e["here"] == vars(plan_memory(preset(e["preset"]), tensors, 3, 2))
        assert f"\n{e['preset']} " in text
    assert max(map(len, text.splitlines())) <= 160


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--model", "nothing"], "is not known"), (["--shards", "0"], "is not allowed")],
)
def test_memory_benchmark_bad_input(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input of the memory benchmark ends in an error of one line."""
    with pytest.raises(SystemExit) as ended:
        script(monkeypatch, *words)
    printed = capsys.readouterr()
    assert (
        ended.value.code == 2
        and printed.out == ""
        and says in printed.err
        and printed.err.count("\n") == 1
    )
