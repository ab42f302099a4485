"""Every program of recipes/ that measures, compares or studies, once, at its smallest: it ends with
status 0, and its table has figures. Whoever adds a program adds a line here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "recipes"
FIGURE = r"([0-9][0-9.,]*)"
"""A figure of a table, in a group: it must be above zero."""


@dataclass(frozen=True)
class Smoke:
    """One run of a script.

    Attributes:
        script: below recipes/. words: its arguments; FOLDER is an empty folder.
        says: patterns of what it prints, each of which must be found.
        ranks: (islands, processes of each) that run it; with one it has no variables of a launcher.
        needs: a package without which it is left out.
    """

    script: str
    words: str
    says: tuple[str, ...]
    ranks: tuple[int, int] = (1, 1)
    needs: str = ""


def figures(start: str, count: int = 1) -> str:
    """A line that begins so, with so many figures behind it."""
    return rf"(?m)^ *{start}" + rf" +{FIGURE}" * count


LAYER = "--hidden 256 --shards 1 --repeat 1"
SMOKES = [
    Smoke(
        "benchmarks/chaos.py",
        "--preset diloco --islands 2 --events 1 --kinds kill_island --gap 1 --no-undisturbed "
        "--save-every 0",
        (
            f"all +1 +1 +[0-9.]+ +1 +{FIGURE} +0",  # survived; lost, back, none not back
            f"compared at {FIGURE} steps, 0 differ",
        ),
    ),
    Smoke(
        "benchmarks/checkpoint.py",
        "--model tiny --repeat 1",
        ("save, s +load, s +size", figures("ours: all", 2), figures("ours, async: blocked")),
    ),
    Smoke("benchmarks/codec.py", f"{LAYER} --training 2", (figures("k8, ours", 5),)),
    Smoke(
        "benchmarks/come_back.py", "--kill 0 --steps 1 --out FOLDER", (f"'cpu': {FIGURE}",), (2, 1)
    ),
    Smoke("benchmarks/decode.py", f"{LAYER} --replicas 2 32", (figures("32", 3),)),
    Smoke(
        "benchmarks/idle.py",
        "--steps 1 --tensors 10",
        ("tensors +median, us", figures("1 +10", 2), figures("2 +100", 2)),
    ),
    Smoke(
        "benchmarks/link.py",
        "--sizes 1000 --repeat 1 --connections 1",
        ("exchange +bytes", figures("gather +1000 +1", 2), figures("reduce +1000 +1", 2)),
        (2, 1),
    ),
    Smoke(
        "benchmarks/lora.py",
        "--steps 2 --base-steps 1 --seeds 1 --ranks 2 --out FOLDER",
        (f'"method": "full".*"loss": {FIGURE}', f'"A": "frozen", "loss": {FIGURE}'),
        (2, 1),
        needs="peft",
    ),
    Smoke(
        "benchmarks/muon.py",
        "--hidden 64 --layers 1 --repeat 1",
        ("ms per step", figures("MuonAdamW's", 3)),
        (1, 2),
    ),
    Smoke(
        "benchmarks/number_formats.py",
        "--elements 8192 --repeat 1",
        ("code +value", figures("int8", 5)),
    ),
    Smoke(
        "benchmarks/planner_times.py",
        "--steps 4 --width 64 --layers 1",
        (f"ns per value in the training thread, +{FIGURE} ns per byte sent",),
        (2, 1),
    ),
    Smoke(
        "benchmarks/positions.py",
        "--topk 32 --training 2 --repeat 1",
        ("k +bits +Rice", figures("32", 5)),
    ),
    Smoke(
        "benchmarks/resumed.py",
        "--presets demo --seeds 1 --stop 2 --after 1",
        ("preset +steps after +whole", figures("demo +1")),
    ),
    Smoke(
        "benchmarks/scale.py",
        "--turn 1 --sizes 1 --tensors 2 --replicas 2 --hidden 256 --repeat 1",
        ("elements", figures("1 M elements", 2), figures("2 replicas", 2), "against size: "),
    ),
    Smoke(
        "benchmarks/scale_islands.py",
        "--loopback --islands 2 --steps 4 --pad 0",
        ("islands +start, s", figures("2", 3)),
    ),
    Smoke(
        "benchmarks/slow_link_predict.py",
        f"--offline {ROOT}/docs/figures/slow_link.json",
        (f"{FIGURE} of 29 cells within 20%",),
    ),
    Smoke(
        "benchmarks/step.py",
        "--steps 2 --only demo --worlds 1 --layers 1 --length 16",
        ("model +preset +tensors", figures(".* demo", 2)),
    ),
    Smoke(
        "benchmarks/trace_exchange.py",
        "--model tiny --steps 6 --warm-up 1 --out FOLDER",
        (f"island 1: .*send {FIGURE} ms", r"trace\.svg"),
        (2, 1),
    ),
    Smoke(
        "benchmarks/zero.py",
        "--model tiny --stages 3 --batch 1 --repeat 1",
        ("elements of a rank", figures("ZeRO-3", 2)),
        needs="deepspeed",
    ),
    Smoke(
        "compare.py",
        "FOLDER one two",
        ("preset +validation loss", figures("two", 2)),
    ),
    Smoke(
        "study/study.py",
        "--table first --only 'full bf16' --seeds 1 --steps 1 --eager --no-pictures "
        "--output FOLDER",
        (f"first 1/1: .*: {FIGURE}, ", "method +seeds +loss", figures("full bf16 +1")),
    ),
    Smoke(
        "study/study.py",
        "--table first --list --output FOLDER",
        ("reported +full bf16 +[01]/1 ", "table first: [0-9]+ runs are missing"),
    ),
]
ASKED = {
    "benchmarks/doctor_lab.py": "root and network namespaces",
    "benchmarks/gpu.py": "an NVIDIA GPU",
    "benchmarks/ledger.py": "root and network namespaces",
    "benchmarks/peers.py": "root and network namespaces",
    "benchmarks/slow_link.py": "root and network namespaces",
    "doctor.py": "two machines",
}
"""Programs that are only asked for their help, and what else they need."""

ELSEWHERE = {
    "benchmarks/bytes.py": "exchange/test_plan.py",
    "benchmarks/memory.py": "exchange/test_memory.py",
    "benchmarks/published_bytes.py": "exchange/test_plan.py",
    "check.py": "recipes/test_check.py",
    "prepare_data.py": "recipes/test_prepare_data.py",
    "pretrain.py": "recipes/test_pretrain.py",
    "pretrain_deepspeed.py": "recipes/test_pretrain_saves.py",
    "pretrain_trainer.py": "recipes/test_wrong_use.py",
    "start.py": "recipes/test_start.py",
}
"""Programs that a test of the usual run starts, and its file."""

STARTED = {"chaos_island.py", "network_lab.py", "peers_twins.py", "training_island.py", "alike.py"}
"""Files with a program that another of these programs starts."""


def played(rank: Any, script: str, words: list[str]) -> tuple[Any, str]:
    """Status and output of a script that is run as a program, in this process."""
    if rank.islands == rank.procs == 1:
        launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for name in [n for n in os.environ if n.startswith("ISLAND_") or n in launcher]:
            del os.environ[name]
    path = RECIPES / script
    sys.argv, sys.path[0] = [str(path), *words], str(path.parent)
    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0  # type: ignore[assignment]
    return status, out.getvalue()


@pytest.mark.parametrize("smoke", SMOKES, ids=lambda smoke: Path(smoke.script).stem)
def test_program_prints_its_table(
    smoke: Smoke, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Each program ends with 0 and prints its table, with figures."""
    if smoke.needs and importlib.util.find_spec(smoke.needs) is None:
        pytest.skip(f"needs {smoke.needs}")
    for name in ("one", "two"):  # of compare.py
        (tmp_path / name).mkdir()
        numbers = {"loss_end": 2.5, "bytes_sent_per_island": 10, "ratio": 4.0}
        numbers |= {"tokens_per_second": 100.0, "wait_share": 0.1}
        (tmp_path / name / "summary.json").write_text(json.dumps({**numbers, "preset": "demo"}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {"TORCHELASTIC_RUN_ID": "smoke", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [word.replace("FOLDER", str(tmp_path)) for word in shlex.split(smoke.words)]
    env = torchrun if smoke.ranks[1] > 1 else None
    found = run_ranks(
        played, *smoke.ranks, timeout=250, group=False, env=env, args=(smoke.script, words)
    )
    assert all(status == 0 for status, _ in found), found
    out = "\n".join(out for _, out in found)
    for says in smoke.says:
        match = re.search(says, out)
        assert match, f"no {says!r} in:\n{out}"
        assert all(float(g.replace(",", "").rstrip(".")) > 0 for g in match.groups()), match


@pytest.mark.parametrize("script", ASKED)
def test_program_is_asked_for_its_help(script: str, run_ranks: Callable[..., Any]) -> None:
    """What needs another machine than this is imported whole, and says its options."""
    ((status, out),) = run_ranks(played, 1, 1, args=(script, ["--help"]))
    assert status == 0 and out.startswith("usage: ")


def test_programs_are_all_started() -> None:
    """Every program of recipes/ is started by a test of the usual run."""
    folders = (RECIPES, RECIPES / "benchmarks", RECIPES / "study")
    files = [path for folder in folders for path in folder.glob("*.py")]
    programs = {p for p in files if "__main__" in p.read_text() and p.name not in STARTED}
    known = {smoke.script for smoke in SMOKES} | {*ASKED} | {*ELSEWHERE}
    assert {str(p.relative_to(RECIPES)) for p in programs} == known
    for script, test in ELSEWHERE.items():
        assert Path(script).stem in (ROOT / "tests" / test).read_text(), script
