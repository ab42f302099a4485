"""The report: numbers against sums by hand, pictures that hold what was written, one file that
needs no other.
"""

from __future__ import annotations

import json
import math
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fsdp_demo import cli
from fsdp_demo.runlog.files import load
from fsdp_demo.tools.report import picture as report_png
from fsdp_demo.tools.report.figures import (
    MARKS,
    comparison,
    curve,
    figures,
    island_rows,
    marks,
    rates,
    speed,
    still,
    timeline_rows,
)

from ...runlog import made

VOID = {"meta", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """Checks that tags close, and collects what would be fetched."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def drawn(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]


def test_report_figures_of_files(tmp_path, monkeypatch) -> None:
    """The figures of a report are those of the files."""
    run = load(made.run(monkeypatch, tmp_path / "run", steps=40, each=5000, speed=2.0))
    found = figures(run)
    assert (found.step, found.steps, found.tokens, found.sent) == (40, 40, 512 * 40, 5000 * 40)
    assert found.ratio == 4.0 and found.tokens_per_second == 1024 and found.equal is True
    # 0.1 and 0.2 of each step
    assert found.still == pytest.approx(0.15) and found.held_out and found.ended
    head, row = comparison([found])
    assert dict(zip(head, row, strict=True))["against all-reduce"] == "4 x less"


def test_report_curves_mean_over_islands(tmp_path, monkeypatch) -> None:
    """The curves are means over the islands."""
    run = load(made.run(monkeypatch, tmp_path / "run", steps=40))
    lines = [island.lines for island in run.islands]
    pairs = zip(*lines, strict=True)
    by_hand = [((a["tokens"] + b["tokens"]) / 2, (a["loss"] + b["loss"]) / 2) for a, b in pairs]
    found = curve(run, "tokens").training
    assert [x for x, _ in found] == [x for x, _ in by_hand]
    assert [y for _, y in found] == pytest.approx([y for _, y in by_hand])
    assert [x for x, _ in curve(run, "bytes_sent").validation] == [100_000, 200_000]
    assert [y for _, y in still(run.islands[1])] == pytest.approx([0.2] * 8)


def test_report_count_after_restart(tmp_path, monkeypatch) -> None:
    """A count that began anew on one island does not go back."""
    run = load(made.run(monkeypatch, tmp_path / "run", steps=40))
    for line in run.islands[1].lines[4:]:  # it came back after step 20
        line["tokens"], line["bytes_sent"] = line["tokens"] - 10_000, line["bytes_sent"] - 90_000
    for against in ("tokens", "bytes_sent"):
        found = [x for x, _ in curve(run, against).training]
        assert found == sorted(found) == [line[against] for line in run.islands[0].lines]
    assert figures(run).tokens == 512 * 40


def test_report_page_needs_no_other_file(tmp_path, monkeypatch, capsys) -> None:
    """The page needs no other file."""
    folders = [
        made.run(monkeypatch, tmp_path / "a & b", islands=3, steps=200, lost_at=40),
        made.run(monkeypatch, tmp_path / "killed", steps=30, ended=False),
        made.run(monkeypatch, tmp_path / "empty", steps=3, ended=False),
    ]
    out = tmp_path / "out.html"
    assert cli.main(["report", *map(str, folders), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    text = out.read_text(encoding="utf-8")
    assert Page(text).fetched == [] and "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    ids = re.findall(r'id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert "a &amp; b" in text and "prefers-color-scheme: dark" in text
    skipped = "round skipped: a contribution was not finite"
    lines = "killed: island0 has no end", "empty: island0 has no line of metrics yet.", skipped
    for says in (*lines, "island 2 lost", "island 2 joined", "nothing happened", "preset: demo"):
        assert says in text, says


needs_matplotlib = pytest.mark.skipif(
    not report_png.available(), reason="needs matplotlib: pip install 'fsdp_demo[report]'"
)


@needs_matplotlib
def test_report_pictures_text_and_colours(tmp_path, monkeypatch) -> None:
    """The pictures of the page have text and the colours of the page."""
    folder = made.run(monkeypatch, tmp_path / "run", islands=3, steps=130, lost_at=40)
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    pictures = drawn(page)
    assert len(pictures) == 8 and all("width" not in p.attrib for p in pictures)
    words = ["".join(p.itertext()) for p in pictures]
    expected = [
        *(["optimizer steps", "loss (nats per token)"], ["tokens (k)", "loss (nats per token)"]),
        *(["minutes"], ["kB sent by each island"], ["tokens/s of all islands", "minutes"]),
        *(["learning rate", "optimizer steps"], ["standing still (% of the time)"]),
        ["island0, ", "events"],
    ]
    for text, says in zip(words, expected, strict=True):
        assert all(one in text for one in says), (says, text[-300:])
    assert not [c for c in report_png.BY_NAME if c in page.partition("</style>")[2]]
    assert "var(--c0)" in page and "var(--soft)" in page


def test_report_page_without_matplotlib(tmp_path, monkeypatch) -> None:
    """A page without matplotlib says what to install."""
    folder = made.run(monkeypatch, tmp_path / "run", steps=40)
    monkeypatch.setattr("fsdp_demo.tools.report.picture.available", lambda: False)
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("pip install &#39;fsdp_demo[report]&#39;") == 8 and "<svg" not in page
    assert "Key figures" in page and "preset: demo" in page


def test_report_islands_speed_and_rates(tmp_path, monkeypatch) -> None:
    """Each island has a row with its host and starts; speed is what was trained since the line
    before, rates are those that were trained with; a newcomer is marked once.
    """
    run = load(made.run(monkeypatch, tmp_path / "run", islands=3, steps=40, lost_at=10, speed=2.0))
    head, *rows = island_rows(run)
    assert [dict(zip(head, row, strict=True))["starts"] for row in rows] == ["1", "1", "2"]
    assert all(socket.gethostname() in row and "40" in row for row in rows)
    assert [y for _, y in speed(run.islands[0])] == pytest.approx([1024] * 8)
    falling = [(s, pytest.approx(1e-3 * (1 - s / 1000))) for s in range(5, 41, 5)]
    assert rates(run.islands[1]) == falling
    of_2 = [e["kind"] for e in run.islands[2].events if e.get("islands") == [2]]
    assert of_2 == ["lost", "joined"]
    joined = [event["of"] for event in marks(run) if event["kind"] == "joined"]
    assert joined == ["island0", "island1"]
    assert len({m.sign for m in MARKS.values()}) == len({m.marker for m in MARKS.values()}) == 6


@pytest.mark.parametrize("steps", [40, 400])
def test_report_timeline_of_exchanges(tmp_path, monkeypatch, steps: int) -> None:
    """The timeline has every exchange once."""
    run = load(made.run(monkeypatch, tmp_path / "run", steps=steps))
    assert [len(bars) for _, _, bars in timeline_rows(run)] == [steps, steps]
    for _, _, bars in timeline_rows(run):
        assert all(0 <= b.waiting <= b.end - b.start for b in bars)


@needs_matplotlib
def test_report_many_exchanges_one_image(tmp_path, monkeypatch) -> None:
    """Many exchanges are drawn as one image."""
    counts = (40, report_png.MANY + 100)
    few, many = (load(made.run(monkeypatch, tmp_path / str(n), steps=n)) for n in counts)
    assert "<image" not in report_png.exchanges(few) and "<image" in report_png.exchanges(many)
    assert len(report_png.exchanges(many)) < 200_000


def test_report_error_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    """An error of the command is one line."""
    assert cli.main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fsdp-demo: error: ") and error.count("\n") == 1
    folder = made.run(monkeypatch, tmp_path / "run")
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "no" / "r.html")]) == 2
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err


def test_report_nan_loss_and_damaged_file(tmp_path, monkeypatch) -> None:
    """A loss that is no number and damaged lines do not prevent a report."""
    folder = made.run(monkeypatch, tmp_path / "run", steps=40)
    metrics = folder / "island0" / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines()
    one = json.loads(lines[2])
    lines[2] = json.dumps(one | {"loss": math.nan})
    lines += [json.dumps(one | {"step": "x"}), json.dumps(one | {"seconds": None}), "\0{", "[1]"]
    metrics.write_text("\n".join(lines), encoding="utf-8")
    with open(folder / "island1" / "events.jsonl", "a", encoding="utf-8") as file:
        print('{"kind": "lost"}', '{"seconds": 1, "step": 2}', sep="\n", file=file)
    with open(folder / "island1" / "exchanges.jsonl", "a", encoding="utf-8") as file:
        print('{"step": 3}', '{"step": "x", "channels": ["a"]}', sep="\n", file=file)
    run = load(folder)
    assert len(run.islands[0].lines) == 8 and len(run.islands[1].exchanges) == 40
    assert len(curve(run, "tokens").training) == 7
    assert run.notes == [
        "island0: the loss of 1 line is NaN or infinite, not drawn.",
        "island0: 2 lines left out, cut off or damaged.",
    ]
    assert cli.main(["report", str(folder)]) == 0
    assert "nan" not in (folder / "report.html").read_text(encoding="utf-8")


def test_report_loss_names_its_step(tmp_path, monkeypatch) -> None:
    """A loss of a run that did not end says when it was measured."""

    def loss(folder: Path) -> str:
        head, row = comparison([figures(load(folder))])
        return dict(zip(head, row, strict=True))["loss"]

    ended = made.run(monkeypatch, tmp_path / "ended", steps=40)
    assert loss(ended).endswith(" (evaluation, step 40)")
    event = json.dumps({"kind": "evaluation", "step": 41, "seconds": 1, "loss": 9})
    for island in ended.iterdir():
        with open(island / "events.jsonl", "a", encoding="utf-8") as file:
            print(event, file=file)
    assert re.fullmatch(r"9\.000 \(evaluation, step 41; best \d\.\d{3} at 40\)", loss(ended))
    killed = made.run(monkeypatch, tmp_path / "killed", steps=35, ended=False)
    assert loss(killed).endswith(" (evaluation, step 20)")
    for island in killed.iterdir():
        (island / "events.jsonl").unlink()
    assert loss(killed).endswith(" (training)")


def test_report_runs_of_unlike_bytes(tmp_path, monkeypatch) -> None:
    """Runs that sent unlike amounts are drawn by ratio."""
    sent = {"few": 100, "many": 100_000}
    folders = [made.run(monkeypatch, tmp_path / n, steps=40, each=b) for n, b in sent.items()]
    for chosen, words in ((folders, True), (folders[:1], False)):
        out = tmp_path / "out.html"
        assert cli.main(["report", *map(str, chosen), "--out", str(out)]) == 0
        assert ("by powers of ten" in out.read_text(encoding="utf-8")) is words


def test_report_folder_of_runs_refused(tmp_path, monkeypatch) -> None:
    """A folder of runs is refused, and the error names one of them."""
    made.run(monkeypatch, tmp_path / "runs" / "a", steps=5)
    with pytest.raises(ValueError, match=r"as in: fsdp-demo report .*runs.a$"):
        load(tmp_path / "runs")
