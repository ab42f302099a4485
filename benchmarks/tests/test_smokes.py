"""Every program of benchmarks/ once, at its smallest: it ends with status 0, and its table has
figures. Whoever adds a program adds a line here. The usual run of the tests has this file, but for
the slow ones.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import played

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
FIGURE = r"([0-9][0-9.,]*)"
"""A figure of a table, in a group: it must be above zero."""


@dataclass(frozen=True)
class Smoke:
    """One run of a script.

    Attributes:
        script: below benchmarks/. words: its arguments; FOLDER is an empty folder.
        says: patterns of what it prints, each of which must be found.
        ranks: (islands, processes of each) that run it; with one it has no variables of a launcher.
        needs: a package without which it is left out. slow: it takes over five seconds of a core.
    """

    script: str
    words: str
    says: tuple[str, ...]
    ranks: tuple[int, int] = (1, 1)
    needs: str = ""
    slow: bool = False


def figures(start: str, count: int = 1) -> str:
    """A line that begins so, with so many figures behind it."""
    return rf"(?m)^ *{start}" + rf" +{FIGURE}" * count


LAYER = "--hidden 256 --shards 1 --repeat 1"
SMOKES = [
    Smoke(
        "bytes.py",
        "--model tiny --islands 2 --exchange demo --set topk=16",
        ("demo --set topk=16: tiny", r"(?m)^demo .* ([0-9.]+) kB"),
    ),
    Smoke(
        "chaos.py",
        "--preset diloco --islands 2 --events 1 --kinds kill_island --gap 1 --no-undisturbed "
        "--save-every 0",
        (
            f"all +1 +1 +[0-9.]+ +1 +{FIGURE} +0",  # survived; lost, back, none not back
            f"compared at {FIGURE} steps, 0 differ",
        ),
        slow=True,  # the tests of test_chaos.py have its parts
    ),
    Smoke(
        "checkpoint.py",
        "--model tiny --repeat 1",
        ("save, s +load, s +size", figures("ours: all", 2), figures("ours, async: blocked")),
    ),
    Smoke("codec.py", f"{LAYER} --training 2", (figures("k8, ours", 5),)),
    Smoke("come_back.py", "--kill 0 --steps 1 --out FOLDER", (f"'cpu': {FIGURE}",), (2, 1)),
    Smoke("decode.py", f"{LAYER} --replicas 2 32", (figures("32", 3),)),
    Smoke(
        "drop.py",
        "--drawn --steps 4 --every 2 --micro 4 --limit 0.2 --seeds 1",
        ("loss at equal time", figures("alike +0 +published", 6), figures("one slow +0 +exact", 6)),
        (2, 1),
        slow=True,
    ),
    Smoke(
        "idle.py",
        "--steps 1 --tensors 10",
        ("tensors +median, us", figures("1 +10", 2), figures("2 +100", 2)),
        slow=True,
    ),
    Smoke(
        "link.py",
        "--sizes 1000 --repeat 1 --connections 1",
        ("exchange +bytes", figures("gather +1000 +1", 2), figures("reduce +1000 +1", 2)),
        (2, 1),
    ),
    Smoke(
        "lora.py",
        "--steps 2 --base-steps 1 --seeds 1 --ranks 2 --out FOLDER",
        (f'"method": "full".*"loss": {FIGURE}', f'"A": "frozen", "loss": {FIGURE}'),
        (2, 1),
        needs="peft",
        slow=True,
    ),
    Smoke(
        "memory.py",
        "--model tiny --islands 2 --shards 1",
        ("Memory of the presets", rf"(?m)^diloco +AdamW +{FIGURE} "),
    ),
    Smoke(
        "muon.py",
        "--hidden 64 --layers 1 --repeat 1",
        ("ms per step", figures("MuonAdamW's", 3)),
        (1, 2),
    ),
    Smoke(
        "number_formats.py",
        "--elements 8192 --repeat 1",
        ("code +value", figures("int8", 5)),
    ),
    Smoke(
        "planner_times.py",
        "--steps 4 --width 64 --layers 1",
        (f"ns per value in the training thread, +{FIGURE} ns per byte sent",),
        (2, 1),
    ),
    Smoke(
        "positions.py",
        "--topk 32 --training 2 --repeat 1",
        ("k +bits +Rice", figures("32", 5)),
    ),
    Smoke("published_bytes.py", "", ("Published figures", rf"DeMo 300M.* {FIGURE} MB ")),
    Smoke(
        "resumed.py",
        "--presets demo --seeds 1 --stop 2 --after 1",
        ("preset +steps after +whole", figures("demo +1")),
    ),
    Smoke(
        "scale.py",
        "--turn 1 --sizes 1 --tensors 2 --replicas 2 --hidden 256 --repeat 1",
        ("elements", figures("1 M elements", 2), figures("2 replicas", 2), "against size: "),
    ),
    Smoke(
        "scale_islands.py",
        "--loopback --islands 2 --steps 4 --pad 0",
        ("islands +start, s", figures("2", 3)),
    ),
    Smoke(
        "slow_link_predict.py",
        f"--offline {ROOT}/docs/figures/slow_link.json",
        (f"{FIGURE} of 29 cells within 20%",),
    ),
    Smoke(
        "step.py",
        "--steps 2 --only demo --worlds 1 --layers 1 --length 16",
        ("model +preset +tensors", figures(".* demo", 2)),
    ),
    Smoke("tables.py", "", ("table: study-main", rf"`demo`, 100 events \| {FIGURE} of 100")),
    Smoke(
        "trace_exchange.py",
        "--model tiny --steps 6 --warm-up 1 --out FOLDER",
        (f"island 1: .*send {FIGURE} ms", r"trace\.svg"),
        (2, 1),
    ),
    Smoke(
        "unlike.py",
        "--rounds 3 --seeds 1 --pause 0.01 --held-out 1 --batch 1 --length 16 --only sign_loco",
        (f'"by_speed".*"tokens": {FIGURE}', f'"equal".*"loss": {FIGURE}'),
        (3, 1),
    ),
    Smoke(
        "zero.py",
        "--model tiny --stages 3 --batch 1 --repeat 1",
        ("elements of a rank", figures("ZeRO-3", 2)),
        needs="deepspeed",
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
    "doctor_lab.py": "root and network namespaces",
    "gpu.py": "an NVIDIA GPU",
    "ledger.py": "root and network namespaces",
    "peers.py": "root and network namespaces",
    "slow_link.py": "root and network namespaces",
}
"""Programs that are only asked for their help, and what else they need."""

STARTED = {"chaos_island.py", "network_lab.py", "peers_twins.py", "training_island.py", "alike.py"}
"""Files with a program that another of these programs starts."""


@pytest.mark.parametrize(
    "smoke", [
        pytest.param(s, id=Path(s.script).stem, marks=[pytest.mark.slow] if s.slow else [])
        for s in SMOKES
    ],
)  # fmt: skip
def test_program_prints_its_table(
    smoke: Smoke, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Each program ends with 0 and prints its table, with figures."""
    if smoke.needs and importlib.util.find_spec(smoke.needs) is None:
        pytest.skip(f"needs {smoke.needs}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {"TORCHELASTIC_RUN_ID": "smoke", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [word.replace("FOLDER", str(tmp_path)) for word in shlex.split(smoke.words)]
    env = torchrun if smoke.ranks[1] > 1 else None
    found = run_ranks(
        played,
        *smoke.ranks,
        timeout=250,
        group=False,
        env=env,
        args=(BENCHMARKS / smoke.script, words),
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
    ((status, out),) = run_ranks(played, 1, 1, args=(BENCHMARKS / script, ["--help"]))
    assert status == 0 and out.startswith("usage: ")


def test_programs_are_all_started() -> None:
    """Every program of benchmarks/ is started by a test of this file."""
    files = [path for folder in ("", "study") for path in (BENCHMARKS / folder).glob("*.py")]
    programs = {p for p in files if "__main__" in p.read_text() and p.name not in STARTED}
    known = {smoke.script for smoke in SMOKES} | {*ASKED}
    assert {str(p.relative_to(BENCHMARKS)) for p in programs} == known
