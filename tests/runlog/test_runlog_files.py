"""What a run leaves: read whole, cut off in the middle, gone on with, and told apart from what is
no run.
"""

from __future__ import annotations

import errno
import json
import re
import resource
from pathlib import Path

import pytest

from fsdp_demo import preset
from fsdp_demo.runlog import files
from fsdp_demo.runlog.files import load, load_all

from ..support.inside import in_ranks
from ..support.refused import refusal
from . import made


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def keys(file: str) -> dict[str, str]:
    """Key -> what it is, by the table of a file in docs/report.md."""
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    table = re.search(rf"^`{re.escape(file)}`[^|]*:\n\n(.*?)\n\n", page, re.M | re.S)
    assert table is not None
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table[1], re.M))


def test_runlog_reads_back(tmp_path, monkeypatch) -> None:
    """A run is read as it was written."""
    run = load(made.run(monkeypatch, tmp_path / "run", islands=3, steps=40, lost_at=20))
    assert run.name == "run" and [i.name for i in run.islands] == ["island0", "island1", "island2"]
    first = run.islands[0]
    assert [line["step"] for line in first.lines] == list(range(5, 45, 5))
    assert len(first.exchanges) == 40 and first.exchanges[0]["start"] == pytest.approx(0.4)
    assert first.exchanges[24]["islands"] == [0, 1] and first.exchanges[35]["islands"] == [0, 1, 2]
    kinds = [e["kind"] for e in first.events if e["kind"] not in ("evaluation", "checkpoint")]
    assert kinds == ["begin", "lost", "joined", "skipped round", "finish"]
    lost = next(e for e in first.events if e["kind"] == "lost")
    assert (lost["islands"], lost["step"], lost["seconds"]) == ([2], 20, 20.0)
    assert run.notes == [] and first.summary is not None


def test_runlog_fields_are_documented(tmp_path, monkeypatch) -> None:
    """Every field that is written stands in the tables of docs/report.md."""
    folder = made.run(monkeypatch, tmp_path / "run", steps=20, lost_at=5) / "island0"
    assert set(json.loads((folder / files.HEAD_FILE).read_text())) == set(keys(files.HEAD_FILE))
    assert set(lines(folder / files.STEPS_FILE)[0]) == set(keys(files.STEPS_FILE))
    assert set(lines(folder / files.EXCHANGES_FILE)[0]) == set(keys(files.EXCHANGES_FILE))
    fields = {name for event in lines(folder / files.EVENTS_FILE) for name in event}
    assert fields - {"tokens", "bytes_sent"} == set(keys(files.EVENTS_FILE))
    kinds = {event["kind"] for event in lines(folder / files.EVENTS_FILE)}
    assert kinds <= set(keys(files.EVENTS_FILE)["kind"].split(", "))


def test_runlog_of_a_killed_run_says_so(tmp_path, monkeypatch) -> None:
    """The files of a run that was killed are read, with a note that they have no end."""
    folder = made.run(monkeypatch, tmp_path / "run", steps=40, ended=False)
    path = folder / "island1" / files.STEPS_FILE
    path.write_text(path.read_text()[:-30])
    run = load(folder)
    assert [line["step"] for line in run.islands[1].lines] == list(range(5, 40, 5))
    assert run.notes == [
        "island0 has no end: its last line is of step 40 of 40.",
        "island1 has no end: its last line is of step 35 of 40.",
        "island1: 1 line left out, cut off or damaged.",
    ]


def test_runlog_names_islands_that_are_missing(tmp_path, monkeypatch) -> None:
    """Islands whose files are elsewhere are named."""
    folder = made.run(monkeypatch, tmp_path / "run", islands=3)
    (tmp_path / "one").mkdir()
    (folder / "island1").rename(tmp_path / "one" / "island1")
    assert load(tmp_path / "one").notes == ["1 of 3 islands here: island1."]
    assert [i.name for i in load(tmp_path / "one" / "island1").islands] == ["island1"]


def test_runlog_later_start_drops_later_lines(tmp_path, monkeypatch) -> None:
    """A later start drops the lines that came after its step."""
    folder = made.run(monkeypatch, tmp_path / "run", islands=1, steps=40, ended=False)
    clock = made.Clock()
    monkeypatch.setattr("fsdp_demo.runlog.record.time.perf_counter", clock)
    exchange = made.Said(made.Place(0, 1), step=20)
    began = json.loads((folder / "island0" / files.HEAD_FILE).read_text())["began"]
    record = made.record(folder / "island0", exchange, steps=40)
    assert record.last["step"] == 20 and record.seconds == pytest.approx(20.0)
    clock.now += 3
    record.line({"step": 21})
    run = load(folder).islands[0]
    assert [line["step"] for line in run.lines] == [5, 10, 15, 20, 21]
    assert run.lines[-1]["seconds"] == pytest.approx(23.0) and run.head["began"] == began
    assert [e["step"] for e in run.exchanges] == list(range(20))
    assert (run.events[-1]["kind"], run.events[-1]["step"]) == ("resume", 20)


def test_runlog_full_disk_is_a_warning(tmp_path, caplog) -> None:
    """Where the disk is full a file gets one warning, and its next line says how many lack."""
    full = tmp_path / "island0" / files.STEPS_FILE
    record = made.record(full.parent)
    full.symlink_to("/dev/full")  # which nothing may read
    for step in range(1, 5):
        record.line({"step": step})
    full.unlink()
    record.line({"step": 5})
    record.line({"step": 6})
    (warned,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert f"{full} cannot be written (No space left on device)" in warned
    assert [(line["step"], line.get("missing")) for line in lines(full)] == [(5, 4), (6, None)]
    assert load(tmp_path).notes[1:] == ["island0: 4 lines could not be written."]


@in_ranks(1, 1)
def test_runlog_line_is_whole_or_absent(me, tmp_path) -> None:
    """Of a line for which there is no room nothing stays in the file (RLIMIT_FSIZE of a rank)."""
    path = tmp_path / files.STEPS_FILE
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    record = made.record(tmp_path)
    for step in range(1, 9):
        record.line({"step": step, "seconds": 1.5, "loss": 3.25})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    record.line({"step": 9, "seconds": 9.5})
    found = [(line["step"], line.get("missing")) for line in lines(path)]
    assert found == [(1, None), (2, None), (9, 6)]


def test_runlog_unwritable_folder_ends_nothing(tmp_path) -> None:
    """A record whose folder cannot be made lets a training end."""
    (tmp_path / "file").touch()
    record = made.record(tmp_path / "file" / "island0")
    record.tick()
    record.line({"step": 1})
    record.finish({})


def test_runlog_drops_lines_in_one_piece(tmp_path, monkeypatch, caplog) -> None:
    """Where later lines cannot be dropped, since there is no room, the file stays as it was."""
    path = tmp_path / files.STEPS_FILE
    files.append(path, [{"step": step} for step in range(4)])

    def full(part: Path, *_: object, **__: object) -> None:
        part.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert files.keep_until(path, 2) == [{"step": step} for step in range(3)]
    assert len(lines(path)) == 4 and "cannot be written" in caplog.text


def test_runlog_second_training_puts_the_first_aside(tmp_path, monkeypatch) -> None:
    """A second training in a folder puts the files of the first aside, as a run of its own."""
    folder = made.run(monkeypatch, tmp_path / "run", islands=1, steps=20) / "island0"
    exchange = made.Said(made.Place(0, 1))
    for _ in range(2):
        made.record(folder, exchange).line({"step": 3, "seconds": 0.5})
    assert [line["step"] for line in lines(folder / files.STEPS_FILE)] == [3]
    assert [e["kind"] for e in lines(folder / files.EVENTS_FILE)] == ["begin"]
    first, second = (load(folder / f"earlier-{n}").islands[0] for n in (1, 2))
    assert [line["step"] for line in first.lines] == [5, 10, 15, 20] and first.summary is not None
    assert [line["step"] for line in second.lines] == [3]
    assert len(load(tmp_path / "run").islands) == 1


def test_runlog_counts_the_time_an_island_was_gone(tmp_path, monkeypatch) -> None:
    """An island that joins again counts the time it was gone."""
    folder = made.run(monkeypatch, tmp_path / "run", islands=2, steps=20, ended=False) / "island1"
    head = json.loads((folder / files.HEAD_FILE).read_text())
    monkeypatch.setattr("fsdp_demo.runlog.record.time.time", lambda: head["began"] + 500.0)
    exchange = made.Said(made.Place(1, 2), step=60, newcomer=True)
    record = made.record(folder, exchange, steps=90)
    assert record.seconds == pytest.approx(500.0, abs=1.0)
    record.line({"step": 65, "tokens": 30, "loss": 1.0})
    last = load(folder).islands[0].events[-1]
    assert (last["kind"], last["islands"]) == ("joined", [1])


def test_runlog_head_has_the_choice_of_auto(tmp_path) -> None:
    """The head of a run has what `auto` has chosen."""
    exchange = made.Said(made.Place(0, 2), "auto")
    record = made.record(tmp_path, exchange, steps=90)
    record.tick()
    assert json.loads((tmp_path / files.HEAD_FILE).read_text())["preset"] == "auto"
    exchange.config = preset("diloco", period=7)
    exchange.chosen_because = "the link is slow"
    exchange.step = 8
    record.tick()
    record.tick()
    head = json.loads((tmp_path / files.HEAD_FILE).read_text())
    assert (head["preset"], head["chosen_because"]) == ("diloco", "the link is slow")
    assert "sync_every: 7" in head["config"]
    chosen = [e for e in lines(tmp_path / files.EVENTS_FILE) if e["kind"] == "chosen"]
    assert [(e["step"], e["reason"]) for e in chosen] == [(8, "the link is slow")]


def test_runlog_writes_each_exchange_once(tmp_path) -> None:
    """Each exchange is written once."""
    exchange = made.Said(made.Place(0, 2))
    record = made.record(tmp_path, exchange)
    for step in range(6):
        exchange.flown.append(made.ExchangeRecord(step, step, ("a",), None, None))
        if step % 2:
            record.exchanges()
    record.exchanges()
    assert [e["step"] for e in lines(tmp_path / files.EXCHANGES_FILE)] == list(range(6))


@pytest.mark.parametrize(("prepare", "says"), [
    (lambda f: None, "is no folder: give the output folder of a run"),
    (lambda f: f.mkdir(), "holds no run: neither it nor a folder in it has a run.json"),
    (lambda f: (f.mkdir(), (f / "run.json").write_text('{"format": 99}')),
        "has format 99, this release reads 1"),
    (lambda f: (f.mkdir(), (f / "run.json").write_text("{")), "is no JSON"),
    (lambda f: (f.mkdir(), (f / "run.json").write_text("[]")), "holds a list"),
])  # fmt: skip
def test_runlog_refuses_other_folders(tmp_path, prepare, says) -> None:
    """A folder that is no run is refused in one sentence."""
    prepare(tmp_path / "run")
    refusal(lambda: load(tmp_path / "run"), says, str(tmp_path / "run"))


def test_runlog_tells_runs_of_one_name_apart(tmp_path, monkeypatch) -> None:
    """Runs of one name get names that differ."""
    folders = [made.run(monkeypatch, tmp_path / part / "demo") for part in ("a", "b")]
    assert [run.name for run in load_all(folders)] == ["a/demo", "b/demo"]
    assert [run.name for run in load_all(folders[:1] * 2)] == ["a/demo", "a/demo (2)"]


def test_runlog_format_is_on_its_page() -> None:
    """docs/report.md has the fields of the format."""
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    assert f"`format` in `run.json` is {files.FORMAT}." in page
    texts = {"channels", "islands", "kind", "reason"}
    named = {key for file in (files.STEPS_FILE, files.EXCHANGES_FILE) for key in keys(file)}
    assert named | set(keys(files.EVENTS_FILE)) == files.NUMBERS - {"missing"} | texts
