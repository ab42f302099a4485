"""`fsdp-demo plan`: keys, files, lists, and one sentence for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo import Link, load_config
from fsdp_demo.cli import main
from fsdp_demo.tools.planner import Situation, asking, load, plan_rows, show
from fsdp_demo.tools.planner.choosing import said as said_of

KEYS = {
    "preset", "settings", "bytes_per_exchange", "bytes_per_step", "peak_gbit_s",
    "exposed_seconds_per_step", "compute_utilisation", "memory_gb", "expected_gap",
}  # fmt: skip
TINY = ["--model", "tiny", "--step-time", "0.1s", "--device", "cpu"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints."""
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(said(capsys, *words, "--json"))
    return found


def test_planner_command_table_and_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the table and writes the recommended yaml."""
    out = said(capsys, *TINY, "--islands", "3", "--link", "10Mbit", "--rtt", "20ms",
               "--yaml", str(tmp_path / "a.yaml"), "--tokens", "1M", "--tokens-per-step", "500",
               "--memory", "1GB")  # fmt: skip
    assert "tiny (0.5 M parameters), 3 islands of 1 shard, a link of 10Mbit,20ms" in out
    (line,) = (one for one in out.splitlines() if one.startswith("Recommended: "))
    config = load_config(str(tmp_path / "a.yaml"))
    assert line.startswith(f"Recommended: {config.preset} (every ")
    for name in ("hsdp", "demo", "diloco", "days", "GB device"):
        assert name in out


def test_planner_command_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows have all keys, and one row is recommended."""
    rows = rows_of(capsys, *TINY, "--link", "10Mbit,20ms")
    assert all(set(r) >= KEYS for r in rows)
    assert sum(r["recommended"] for r in rows) == 1
    names = [r["preset"] for r in rows if not r["chosen"]]
    assert names[0] == "hsdp" and "diloco" in names and len(names) == len(set(names))
    for r in rows:
        whole = 0.1 + r["exposed_seconds_per_step"]
        assert r["compute_utilisation"] == pytest.approx(0.1 / whole)


def test_planner_command_lists(capsys: pytest.CaptureFixture[str]) -> None:
    """Lists of links and islands make a row for each case."""
    words = ["--islands", "2:10", "--link", "1Mbit,10Mbit", "1Gbit", "--rtt", "5ms"]
    rows = rows_of(capsys, *TINY, *words, "--exchange", "demo,random")
    seen = [(r["islands"], r["link"], r["preset"]) for r in rows]
    assert len(seen) == len(set(seen)) == 4 * 3 * 2
    assert {n for n, _, _ in seen} == {2, 4, 8, 10}
    sent = {r["islands"]: r["bytes_per_step"] for r in rows if r["preset"] == "demo"}
    assert sent[8] == pytest.approx(7 * sent[2])


def test_planner_command_set_per_preset(capsys: pytest.CaptureFixture[str]) -> None:
    """A setting may name the preset that it is for."""
    words = ["--exchange", "full,diloco", "--exchange", "streaming_diloco", "--link", "1Gbit"]
    words += ["--set", "period=40", "streaming_diloco:layers=1", "diloco:codec.value_dtype=int8"]
    rows = {r["preset"]: r["settings"] for r in rows_of(capsys, *TINY, *words)}
    assert rows == {
        "full": "every 1, fp32",
        "diloco": "every 40, int8",
        "streaming_diloco": "every 40, fp4_e3m0, fragments, delay 5",
    }


def test_planner_command_target(capsys: pytest.CaptureFixture[str]) -> None:
    """The rate for a target utilisation is solved for."""
    words = ["--target-utilisation", "0.5", "90%", "--exchange", "hsdp,diloco", "--rtt", "1ms"]
    rows = rows_of(capsys, *TINY, *words)
    assert [(r["preset"], r["target_utilisation"]) for r in rows] == [
        ("hsdp", 0.5),
        ("hsdp", 0.9),
        ("diloco", 0.5),
        ("diloco", 0.9),
    ]
    for r in rows:
        assert r["gbit_s"] is not None
        assert r["compute_utilisation"] == pytest.approx(r["target_utilisation"], abs=2e-3)
    out = said(capsys, *TINY, *words)
    assert "50%" in out and "90%" in out and out.count("diloco") == 1


def test_planner_command_guessed_step(capsys: pytest.CaptureFixture[str]) -> None:
    """A guessed step time is called a guess."""
    words = ["--params", "1B", "--link", "1Gbit", "--exchange", "diloco", "--shards", "8"]
    out = said(capsys, *words)
    assert "a guess: 6 FLOPs per parameter and token, 65,536 tokens" in out
    (row,) = rows_of(capsys, *words)
    assert row["step_seconds"] == pytest.approx(6e9 * 65536 / (8 * 989e12 * 0.4))


def test_planner_command_step_from_summary(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step time comes from the summary of a run: 10 steps in 8 s of which 3 were waited; the
    evaluation's 2 s count for the share only.
    """
    summary = {"steps": 12, "since": 2, "tokens": 8000, "tokens_per_second": 1000.0}
    summary |= {"islands": 2, "wait_share": 0.3, "seconds": 10.0, "procs": 2}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    words = ["--model", "tiny", "--link", "1Gbit", "--exchange", "demo", "--tokens", "1M"]
    (row,) = rows_of(capsys, *words, "--step-from", str(tmp_path / "summary.json"))
    assert row["step_seconds"] == pytest.approx(0.5) and row["shards"] == 2
    steps = 1e6 / (2 * 400)
    whole = 0.5 + row["exposed_seconds_per_step"]
    assert row["days"] == pytest.approx(steps * whole / 86400)


LINE = ["--link", "1Gbit"]


@pytest.mark.parametrize(("words", "says"), [
    (["--model", "lama-3.2-1b", *LINE], "'lama-3.2-1b' is not known: the nearest known are"),
    ([*LINE], "give --model NAME or --params N"),
    (["--model", "tiny", "--params", "1B", *LINE], "two models: give --model NAME or"),
    (["--model", "tiny"], "plan needs --link RATE"),
    ([*TINY, "--link", "0"], "link rate '0': expected a number above 0 with kbit"),
    ([*TINY, "--link", "0Gbit"], "expected a number above 0"),
    ([*TINY, "--link", "fast"], "link rate 'fast'"),
    ([*TINY, "--link", "1Gbit,5ms", "--rtt", "6ms"], "name 2 round trips"),
    ([*TINY, *LINE, "--islands", "1"], "fewer than two islands exchange nothing"),
    ([*TINY, *LINE, "--islands", "0"], "fewer than two islands exchange nothing"),
    ([*TINY[:2], *LINE, "--step-from", "no.json"], "--step-from no.json: No such file"),
    ([*TINY, *LINE, "--islands", "8:2"], "expected the lower end first, as in 2:8"),
    ([*TINY, *LINE, "--islands", "few"], "expected a number, a list or a range"),
    ([*TINY, *LINE, "--shards", "3"], "does not divide the 128 rows of .*1, 2, 4"),
    ([*TINY, *LINE, "--shards", "0"], "1 shard or more"),
    ([*TINY[:2], *LINE, "--step-time", "0s"], "expected a time above 0"),
    ([*TINY[:2], *LINE, "--step-time", "soon"], "expected a time above 0"),
    ([*TINY, *LINE, "--step-from", "a.json"], "both say how long a step takes"),
    ([*TINY, *LINE, "--set", "topk=3"], "give --exchange NAME"),
    ([*TINY, *LINE, "--exchange", "dmo"], "did you mean 'demo'"),
    ([*TINY, *LINE, "--exchange", "full,demo", "--set", "tpk=3"], "has such a setting"),
    ([*TINY, *LINE, "--exchange", "full,diloco", "--set", "period=0"], "diloco: .*sync_every=0"),
    ([*TINY, *LINE, "--exchange", "full,demo", "--set", "topk=a"], "must be a whole number"),
    ([*TINY, *LINE, "--device", "h10"], "did you mean 'h100'"),
    ([*TINY, *LINE, "--memory", "much"], "expected a size above 0"),
    ([*TINY, "--target-utilisation", "1.5"], "expected a share between 0 and 1"),
    ([*TINY, "--target-utilisation", "0.9", "--yaml", "a"], "which needs --link"),
    ([*TINY, *LINE, "--exchange", "hsdp", "--yaml", "a"], "hsdp is no exchange"),
    ([*TINY, *LINE, "--memory", "80"], "with MB, GB, GiB or TB, as in 80GB"),
    ([*TINY, *LINE, "--tokens", "1B"], "give --tokens-per-step, too"),
    ([*TINY, *LINE, "--keep-inner", "lion"], "no method was tried with it"),
    ([*TINY, *LINE, "--yaml", "/nowhere/a.yaml"], "there is no folder /nowhere"),
    ([*TINY, "--link", "doctor.json"], "doctor.json cannot be read"),
    ([*TINY, *LINE, "--islands-per-uplink", "2"], "2 islands .* 1 to 1 behind each"),
    (["--model", "nosuch/config.json", *LINE], "there is no such file"),
    ([*TINY, "--link", "1Gb"], "with kbit, Mbit or Gbit"),
    (["--params", "many", *LINE], "expected a number above 0"),
    (["--params", "4", "--layers", "5", *LINE], "4 parameters in 5 layers"),
    (["--params", "1e309", *LINE], "expected a number above 0"),
    ([*TINY, *LINE, "--as-simulated", "inf"], "at most 8"),
    ([*TINY, *LINE, "--layers", "3"], "--layers 3: of --params alone"),
    ([*TINY, "--link", "1Gbit,1Mbit", "--yaml", "a"], "--yaml a: of 2 cases"),
])  # fmt: skip
def test_planner_command_error_one_sentence(words: list[str], says, capsys) -> None:
    """An error of the command is one sentence."""
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert re.search(says, printed.err), printed.err


def test_planner_command_wrong_summary_refused(tmp_path: Path) -> None:
    """A file that is no summary is refused."""
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="is no summary.json of a recipe"):
        asking.step_from(str(tmp_path / "a.json"))


def test_planner_command_reads_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads what `fsdp-demo doctor` has measured."""
    file = tmp_path / "doctor.json"
    islands = [{"step_seconds": 0.2}, {"step_seconds": 0.3}]
    link = {"bits_per_second": 5e8, "rtt": 0.02}
    file.write_text(json.dumps({"format": 1, "link": link, "islands": islands}))
    words = ["--model", "tiny", "--exchange", "demo", "--link", str(file)]
    (row,) = rows_of(capsys, *words)
    assert row["link"] == "500Mbit,20ms" and row["step_seconds"] == 0.3
    assert "the slowest island" in row["step_source"]
    (row,) = rows_of(capsys, *words, "--rtt", "5ms", "--step-time", "1s")
    assert row["link"] == "500Mbit,5ms" and row["step_seconds"] == 1


def test_planner_command_cases_and_target(capsys: pytest.CaptureFixture[str]) -> None:
    """Several cases are summed up, and the recommendation aims at the target."""
    words = [*TINY, "--link", "1Mbit,1Gbit", "--exchange", "demo,diloco"]
    out = said(capsys, *words, "--target-utilisation", "0.3")
    assert "that keeps 30%" in out and "Gbit/s of a link for a compute utilisation of" in out
    assert out.count("tiny (0.5 M parameters)") == 2, "the second table repeats nothing"
    _, _, rest = out.partition("The best of each case:\n")
    head, slow, fast = rest.splitlines()[:3]
    assert [line.split()[0] for line in (head, slow, fast)] == ["islands,", "2,", "2,"]
    slow_link = said(capsys, *TINY, "--link", "1kbit,100Gbit", "--exchange", "diloco")
    _, slow, fast = slow_link.partition("The best of each case:\n")[2].splitlines()[:3]
    assert slow.endswith("(below 95%)") and not fast.endswith(")")


def test_planner_command_notes_of_all_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """The notes are those of all cases."""
    words = [*TINY, "--link", "1Gbit", "--exchange", "diloco,sign_loco"]
    for islands in ("2,4", "4,2"):
        out = said(capsys, *words, "--islands", islands)
        assert "measured with 4 islands, not 2" in out
        assert "* measured at other periods: diloco 20" in out


def test_planner_command_target_per_islands(capsys: pytest.CaptureFixture[str]) -> None:
    """A target is solved for several numbers of islands."""
    words = [*TINY, "--exchange", "full", "--target-utilisation", "0.3", "--rtt", "2ms"]
    out = said(capsys, *words, "--islands", "2,4")
    assert out.startswith("tiny (0.5 M parameters), 2, 4 islands of 1 shard\n")
    *_, head, row = out.splitlines()
    assert "30%, 2 islands  30%, 4 islands" in head
    alone = [said(capsys, *words, "--islands", n).split()[-1] for n in "24"]
    assert row.split()[-2:] == alone and alone[0] != alone[1]


def test_planner_table_narrow_terminal() -> None:
    """A narrow terminal gets fewer columns."""
    rows = plan_rows(Situation(load("tiny"), 2, Link(1e7), 0.1, device="cpu"), ["demo", "diloco"])
    assert "GB host" in show.plan_table(rows, 400)
    lines = show.plan_table(rows, 100).splitlines()
    assert max(map(len, lines)) <= 100 and "compute" in lines[0] and "GB host" not in lines[0]
    assert "left out for want of width (--json has all): line use, GB host" in "\n".join(lines)


def test_planner_command_recommendation_first(capsys: pytest.CaptureFixture[str]) -> None:
    """The recommendation stands above the tables, its settings above the published ones; no line is
    wider than 120 columns; a note names each preset once, or with its settings.
    """
    words = ["--model", "llama-3.2-3b", "--islands", "4", "--shards", "8", "--step-time", "1s"]
    out = said(capsys, *words, "--link", "1Gbit,40ms", "--tokens", "20B", "--tokens-per-step", "1M")
    assert max(map(len, out.splitlines())) <= 120
    found = [out.index(t) for t in ("Recommended: ", "the planner would choose:", "published")]
    assert found == sorted(found) and "in the order of evidence" in " ".join(out.split())
    notes = out[out.index("GB of one rank") :].splitlines()
    sources = [line for line in notes if "benchmarks/figures" in line]
    named = [one for line in sources for one in line[2:].split(":")[:1]]
    assert len(named) == len(set(named))


def test_planner_command_links_text() -> None:
    """Links are separated by commas or spaces."""
    for texts in (["100Mbit,1Gbit,40ms"], ["100Mbit", "1Gbit", "40ms"], ["100Mbit 1 Gbit 40ms"]):
        assert asking.links(texts, None) == [Link(1e8, 0.04), Link(1e9, 0.04)]


def test_planner_reason_rounds_link() -> None:
    """A measured link is rounded in the text of the reason."""
    measured = Situation([("w", (64, 64))], 2, Link(6262884193.505108, 0.00041763766), 1.0)
    assert said_of(measured) == "a link of 6.26Gbit,0.418ms"


def test_planner_command_numbers_and_times() -> None:
    """Numbers, sizes and times are read with their units."""
    assert asking.quantity("1.3B", "--params", "number") == 1.3e9
    assert asking.quantity("80GB", "--memory", "size") == 8e10
    assert asking.quantity("20e9", "--tokens", "number") == 2e10
    assert asking.quantity("350ms", "--step-time", "time") == pytest.approx(0.35)
    assert asking.islands("2:9") == [2, 4, 8, 9] and asking.islands("5,8,4:5") == [5, 8, 4]
