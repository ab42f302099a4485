"""The benchmark beside other programs: what it says where there is no lab, its file and table, and
each comparison in two processes on loopback.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    hotpath,
    kept,
    peers,
    tables,
)
from benchmarks import network_lab as lab
from benchmarks.peers_twins import PEERS
from fsdp_demo import Link

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "peers.py"


def call(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str, str]:
    """Status, output and errors of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["peers.py", *words])
    status = 0
    try:
        peers.main()
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--peers", "full,dmo"], "--peers dmo: allowed are full, local_sgd, diloco, demo"),
        (["--links", "none,fast"], "link rate 'fast'"),
        (["--repeat", "3"], "even number"),
        (["--peers", "full"], "needs root"),
    ],
)
def test_peers_benchmark_wrong_words_are_one_line(monkeypatch, capsys, words, message) -> None:
    """Wrong words, and no lab, end the benchmark with one line."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status, _, err = call(monkeypatch, capsys, *words)
    assert status == 2 and message in err and len(err.splitlines()) == 1


def test_peers_benchmark_leaves_out_an_absent_program(monkeypatch, capsys) -> None:
    """A program that is not there is left out with a reason."""
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setattr(peers, "_measured", lambda todo, args: pytest.fail("nothing to measure"))
    status, _, err = call(monkeypatch, capsys, "--peers", "diloco")
    assert status == 0 and "diloco is not compared with torchft DiLoCo: " in err


def row(name: str, off: float = 0.0) -> dict[str, Any]:
    took = {
        True: [{"seconds": s, "cpu": s / 2} for s in (1.0, 3.0)],
        False: [{"seconds": 2.0, "cpu": 1.0}] * 2,
    }
    return peers._row(PEERS[name], Link(1e8, 0.02), took, off, 4)


def test_peers_benchmark_rows_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and both tables have the numbers of the runs."""
    rows = [row("full"), row("diloco", 3e-8), row("demo", 0.5)]
    assert rows[0]["seconds_ratio"] == 1.0 and rows[0]["cpu_range"] == [0.5, 1.5]
    assert [r["off"] for r in rows] == [0.0, 3e-8, None]
    text = peers.show(rows)
    assert "bit for bit" in text and "off by 3e-08" in text and "not comparable: int8" in text
    (tmp_path / "peers.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(kept, "FOLDERS", (tmp_path, *kept.FOLDERS))
    made = tables.TABLES["peers"]()
    assert made[1][:6] == ["`full`", "PyTorch DDP", "100 Mbit/s", "2.00", "2.00", "1.00 (0.50 to 1.50)"]  # fmt: skip  # noqa: E501
    assert [r[-1] for r in made[1:]] == [
        "bit for bit",
        "off by 3e-08",
        "no: int8 values",
    ]


def test_peers_benchmark_keeps_measured_cells(monkeypatch, capsys, tmp_path) -> None:
    """Cells in the file are not measured again."""
    path, seen = tmp_path / "rows.json", list[str]()
    args = peers._parser().parse_args([])
    shared = peers.facts(args, peers.NAMES)
    path.write_text(json.dumps({"settings": shared, "rows": [row("full")]}))
    words = ["--json", str(path), "--links", "100Mbit", "--peers"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status, out, _ = call(monkeypatch, capsys, *words, "full")
    assert status == 0 and "PyTorch DDP" in out

    def measured(cells: Any, _: Any) -> Iterator[dict[str, Any]]:
        for _, peer in cells:
            seen.append(peer.name)
            yield row(peer.name)

    monkeypatch.setattr(peers, "missing", lambda: "")
    monkeypatch.setattr(peers, "_measured", measured)
    status, _, _ = call(monkeypatch, capsys, *words, "full,demo")
    assert status == 0 and seen == ["demo"]
    assert [r["peer"] for r in json.loads(path.read_text())["rows"]] == ["full", "demo"]
    status, _, err = call(monkeypatch, capsys, *words, "full", "--period", "8")
    assert status == 2 and "other settings" in err


def test_peers_benchmark_turns() -> None:
    """Turns are an even number, and few where they take long."""
    args = SimpleNamespace(repeat=6, patience=50.0)
    assert [peers._repeats(s, args) for s in (1.0, 12.0, 16.0, 60.0)] == [6, 4, 2, 2]


def test_peers_benchmark_published_form_takes_any_shape() -> None:
    """The published form takes shapes that 64 does not divide: the transform and its inverse, and
    blocks of the largest divisor.
    """
    shapes = [(128, 64), (37 * 2, 320), (1, 320), (1, 7)]
    assert [hotpath.edge(n) for n in (320, 896, 74, 7, 259)] == [64, 64, 37, 7, 37]
    form = hotpath.Published(shapes, 4, "cpu")
    for shape in shapes:
        x = torch.randn(shape)
        c = form.forward(x)
        torch.testing.assert_close(form.backward(c, shape), x, atol=1e-5, rtol=1e-5)
        index, values = form.largest(c)
        assert index.shape[2] == 4
        kept = form.scattered(index, values, shape)
        assert int((kept != 0).sum()) == values.numel()


class Loopback:
    """In place of the lab: nodes are processes on this machine."""

    nodes = 2

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def shape(self, rate: float | None, delay: float) -> None:
        pass

    def popen(self, node: int, words: list[str], **options: Any) -> subprocess.Popen[Any]:
        if "env" in options:
            options["env"]["GLOO_SOCKET_IFNAME"] = "lo"
        return subprocess.Popen(words, **options)


def free_ports(count: int) -> int:
    """The first of so many."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return int(first)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_peers_benchmark_both_sides_train(name: str, tmp_path, monkeypatch) -> None:
    """Both sides train and end as equal as the table says: two steps and a period of each on a tiny
    model, in two processes.
    """
    if importlib.util.find_spec(PEERS[name].module.partition(".")[0]) is None:
        pytest.skip(PEERS[name].missing())
    monkeypatch.setattr(lab, "PORT", free_ports(6))
    args = peers._parser().parse_args(["--repeat", "2", "--patience", "0", "--period", "2"])
    monkeypatch.setattr(peers, "TURN", 0.0)
    pairs: Any = peers.Pairs(Loopback(), (1, 16, 1), str(tmp_path))  # type: ignore[arg-type]
    try:
        found = peers.measure(PEERS[name], pairs, Link(), args)
    finally:
        pairs.end()
    assert found["steps"] == PEERS[name].cycle(2) and found["repeats"] == 2
    assert found["off"] is None if PEERS[name].differs else found["off"] == 0.0
