"""The benchmark on a slow link: what it says where there is no lab, its arithmetic, its file; and,
as root, a small run in the lab.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import network_lab as lab
from benchmarks import slow_link
from fsdp_demo import Link, preset

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "slow_link.py"


def call(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str, str]:
    """Status, output and errors of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["slow_link.py", *words])
    status = 0
    try:
        slow_link.main()
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_slow_link_without_root_says_so(monkeypatch, capsys) -> None:
    """Without root, or a program, the benchmark says what it needs."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status, _, err = call(monkeypatch, capsys)
    assert status == 2 and "needs root" in err and len(err.splitlines()) == 1
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab.shutil, "which", lambda program: None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert lab.missing() == (
        "the network lab needs ethtool, iproute2, iptables: apt-get install ethtool "
        "iproute2 iptables"
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["--only", "demo,dmo"], "--only dmo"),
        (["--links", "none,fast"], "link rate 'fast'"),
        (["--rtt", "20"], "round trip '20'"),
        (["--delay", "20"], "0 < --delay < --period"),
        (["--islands", "1"], "--islands from 2"),
    ],
)
def test_slow_link_wrong_words_are_one_line(monkeypatch, capsys, words, message) -> None:
    """Wrong words end the benchmark with one line."""
    status, _, err = call(monkeypatch, capsys, *words)
    assert status == 2 and message in err and len(err.splitlines()) == 1


def test_slow_link_grid_runs_whole_cycles() -> None:
    """The grid has all presets and runs whole cycles."""
    grid = slow_link.cases(20, 15)
    late = {"demo", "diloco", "streaming_diloco", "local_sgd", "decoupled_momentum", "desloc"}
    assert {c.preset for c in grid} == late | {"full"}
    assert {c.preset for c in grid if any(x.schedule.delay for x in c.config.channels)} == late
    assert {
        max(x.schedule.delay for x in c.config.channels) for c in grid if c.preset == "demo"
    } == {0, 1}
    for case in grid:
        assert all(case.steps % c.schedule.sync_every == 0 for c in case.config.channels), case.name
        assert len({c.name for c in grid}) == len(grid)


def test_slow_link_runs_begin_in_the_quiet_phase() -> None:
    """Runs begin where the least is under way."""
    assert slow_link.quiet_phase(preset("demo")) == (0, 0)
    assert slow_link.quiet_phase(preset("demo", **{"schedule.delay": 2})) == (0, 2)
    # Period 10: a payload leaves in step 9 and lands in step 9 + 4 = 13, so the first quiet step of
    # the cycle is 4.
    assert slow_link.quiet_phase(preset("diloco", period=10, **{"schedule.delay": 4})) == (4, 0)


def test_slow_link_site_has_one_limited_cable(monkeypatch) -> None:
    """A site has one limited cable and no delay inside. Four nodes in two sites: only the ends of
    the two uplinks get the rate, and a node delays what comes from the other site.
    """
    said: list[str] = []
    monkeypatch.setattr(lab, "command", lambda *words, check=True: said.append(" ".join(words)))
    plain, sites = lab.Lab(4), lab.Lab(4, per_uplink=2)
    for made in (plain, sites):
        made.shape(1e6, 0.0)
        made.shape(None, 0.0)
    limited = [line.split(" dev ")[1].split()[0] for line in said if " replace " in line]
    freed = [line.split(" dev ")[1].split()[0] for line in said if " del " in line]
    assert limited == freed
    assert sorted(limited[:8]) == sorted(["eth0"] * 4 + ["p0", "p1", "p2", "p3"])
    assert limited[8:] == ["u0", "c0", "u1", "c1"]
    said.clear()
    sites._join(1)
    assert any("set u1 master site1 up" in line for line in said)
    assert any("set c1 master br0 up" in line for line in said)
    assert [sites._bridge(i) for i in range(4)] == ["site0", "site0", "site1", "site1"]
    assert sites._far(1) == ["-s", f"{sites.address(2)},{sites.address(3)}"]
    assert sites._far(2) == ["-s", f"{sites.address(0)},{sites.address(1)}"]
    assert plain._far(1) == [] and {plain._bridge(i) for i in range(4)} == {"br0"}


def test_slow_link_reads_queues_from_netlink() -> None:
    """Numbers of parked packets are read from netlink."""

    def packet(number: int, extra: bytes = b"") -> bytes:
        inner = (
            struct.pack("=BBH", 0, 0, 0)
            + extra
            + struct.pack("=HH", 11, 1)
            + struct.pack(">IHB", number, 0x800, 0)
            + b"\0"
        )
        return struct.pack("=IHHII", 16 + len(inner), 3 << 8, 0, 0, 0) + inner

    mark = struct.pack("=HHI", 8, 3, 7)  # another attribute before it
    assert lab._numbers(packet(5) + packet(6, mark)) == [5, 6]
    assert lab._numbers(b"") == []
    # an acknowledgement
    assert lab._numbers(struct.pack("=IHHII", 20, 2, 0, 0, 0) + b"\0" * 4) == []


def cell(link: Link, rate: float, steps: int) -> slow_link.Cell:
    """Three repeats of 10 % apart on two islands that moved 1000 bytes a step."""
    made = slow_link.Cell(link, steps, 3)
    for factor in (0.9, 1.0, 1.1):
        one = {
            "seconds": 100 * steps / (rate * factor) * 2,
            "waiting": 0.1 * steps,
            "cpu": 0.05 * steps,
            "tokens": 100 * steps,
            "metered": 1000 * steps,
        }
        made.runs.append(
            [{**one, "tx": 1050 * steps}, {**one, "tx": 1050 * steps, "waiting": 0.2 * steps}]
        )
    return made


def test_slow_link_shortens_runs_of_equal_steps_only() -> None:
    """Only runs of equal steps are made shorter: a run of a part of a cycle would have an exchange
    too many or too few for its steps.
    """
    slow, args = Link(1e3, 0.02), argparse.Namespace(patience=30.0)
    for name, settings, steps in (("full", {}, 1), ("diloco", {"period": 5}, 5)):
        case = slow_link.Case(name, name, settings, 5)
        first, late = cell(Link(), 100.0, 5), slow_link.Cell(slow, 5, 3)
        slow_link._fits(case, late, first, args)
        assert late.steps == steps, name


def test_slow_link_rows_and_table() -> None:
    """Rows and the table have the numbers of the runs."""
    case, args = (
        slow_link.Case("full", "full", {"value_dtype": "bf16"}, 6),
        slow_link._parser().parse_args([]),
    )
    first, slow = cell(Link(), 1000.0, 6), cell(Link(1e7, 0.02), 10.0, 1)
    rows = [slow_link._row(case, c, first, 1.05, 7, args) for c in (first, slow)]
    assert [r["tokens_per_second"] for r in rows] == pytest.approx([1000, 10]) and rows[1][
        "ratio"
    ] == pytest.approx(0.01)
    assert [r["extrapolated"] for r in rows] == [False, True] and [r["link"] for r in rows] == [
        "none",
        "10Mbit",
    ]
    assert (
        rows[0]["exposed_seconds_per_step"] == pytest.approx(0.2)
        and rows[0]["bytes_per_step"] == 1000
    )
    assert rows[0]["spread"] == pytest.approx([900, 1100]) and rows[0][
        "interface_over_meter"
    ] == pytest.approx(1.05)
    assert rows[0]["cpu_seconds_per_step"] == pytest.approx(0.05)
    slow.lab = 0.1 * sum(max(a["seconds"] for a in run) for run in slow.runs)
    row = slow_link._row(case, slow, first, 1.05, 7, args)
    assert row["lab_share"] == pytest.approx(0.1)
    assert row["ratio_without_lab"] == pytest.approx(0.01 / 0.9)
    text = slow_link.show(rows)
    assert (
        "10*" in text
        and "1000 " in text
        and "* run for fewer steps" in text
        and "20.0% of 3" in text
    )
    assert "*" not in slow_link.show(rows[:1])


def test_slow_link_cell_beyond_the_patience() -> None:
    """A cell longer than the patience is left out or made shorter."""
    args = slow_link._parser().parse_args(["--patience", "60"])
    slow, long, short = Link(10e6, 0.02), cell(Link(), 1000.0, 120), cell(Link(), 1000.0, 6)
    for run in (*long.runs, *short.runs):
        for a in run:
            a["metered"] = 1e6 * a["tokens"] / 100  # 1 MB a step, 0.8 s at 10 Mbit/s
    full = slow_link.Case("full", "full")
    made = slow_link.Cell(slow, 120, 5)
    assert not slow_link._fits(full, made, long, args) and made.steps == 120
    made = slow_link.Cell(Link(100e6, 0.02), 120, 5)
    assert slow_link._fits(full, made, long, args)
    made = slow_link.Cell(Link(0.1e6, 0.02), 6, 5)
    assert slow_link._fits(full, made, short, args) and made.steps == 1


def test_slow_link_finished_file_is_shown(monkeypatch, capsys, tmp_path) -> None:
    """A finished file is shown without root, and another setting is refused."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    args, path = slow_link._parser().parse_args([]), tmp_path / "rows.json"
    case = slow_link.cases(args.period, args.delay)[0]
    row = slow_link._row(case, cell(Link(), 1000.0, 6), cell(Link(), 1000.0, 6), 1.05, 7, args)
    path.write_text(json.dumps({"settings": slow_link.facts(args, slow_link.NAMES), "rows": [row]}))
    status, out, err = call(monkeypatch, capsys, "--only", "full", "--json", str(path))
    assert not err and status == 0 and "full" in out and "1000" in out
    status, _, err = call(
        monkeypatch, capsys, "--only", "full", "--json", str(path), "--length", "64"
    )
    assert status == 2 and "other settings" in err
    status, _, err = call(monkeypatch, capsys, "--only", "demo", "--json", str(path))
    assert status == 2 and "needs root" in err  # not in the file: it would have to be measured


@pytest.mark.root
@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing() or "-")
def test_slow_link_small_run_in_the_lab(tmp_path) -> None:
    """A small run in the lab has two presets on two links; the interface has sent what the meter
    counted, and headers.
    """
    path = tmp_path / "rows.json"
    small = [
        "--only",
        "demo",
        "--links",
        "none,100Mbit",
        "--repeat",
        "1",
        "--layers",
        "1",
        "--length",
        "32",
        "--logs",
        str(tmp_path),
    ]
    words = [sys.executable, str(SCRIPT), *small, "--json", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250)
    if "NFQUEUE" in done.stderr or "netns" in done.stderr:
        pytest.skip(f"no lab in this container: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(r["delay"], r["link"]) for r in rows] == [
        (0, "none"),
        (0, "100Mbit"),
        (1, "none"),
        (1, "100Mbit"),
    ]
    for r in rows:
        assert (
            r["tokens_per_second"] > 0
            and r["exposed_seconds_per_step"] >= 0
            and not r["extrapolated"]
        )
        # messages are short here, and the small ones of the start count
        assert 1.0 < r["interface_over_meter_without_offload"] < 1.15
    # without a delay the round trip alone is that long
    assert rows[1]["exposed_seconds_per_step"] > 0.02
