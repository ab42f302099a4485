"""Starts `fsdp-demo rehearse` and finds its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# No torch, so that it starts at once. `act` is filled in per test.
WAIT = """
import os, signal, sys, time
island, rank = os.environ["ISLAND_RANK"], os.environ["RANK"]
def leave(status):
    with open(os.path.join(os.environ["ISLAND_STATUS"], "rank" + rank), "w") as file:
        file.write(str(status))
    os._exit(status)
sys.stdout.write("here\\n")
{act}
time.sleep(120)
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fsdp_demo.cli", *words]


def processes_of(run_id: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"ISLAND_RUN={run_id}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def rehearsal(run_id: str, script: Path, *words: str) -> subprocess.Popen[str]:
    full = command("rehearse", "--islands", "2", "--run", run_id, *words)
    full = full if "--" in words else [*full, "--", str(script)]
    # the variable is that of the rehearsal, too: what is forked shows that of its parent in /proc
    env = {**os.environ, "ISLAND_RUN": run_id}
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(full, env=env, **how)


def ended(process: subprocess.Popen[str], status: int = 0, timeout: float = 120) -> str:
    """What a process has said until its end with this status."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == status, output
    return output


def with_word(output: str, word: str) -> list[str]:
    """Sorted lines that have this word."""
    return sorted(line for line in output.splitlines() if word in line)


def store_of(parent: int) -> int:
    """The process of the store of a rehearsal."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"fsdp_demo.cli\0store" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("the rehearsal has no store")


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.05)


def lines_until(process: subprocess.Popen[str], text: str, times: int) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    while sum(text in line for line in lines) < times:
        line = process.stdout.readline()
        assert line, "ended too early:\n" + "".join(lines)
        lines.append(line)
    return lines


def killed_back_and_stopped(process: Any, run_id: str, script: str) -> None:
    """The rank of island 1 of a rehearsal with one restart is killed, and comes back. Then all are
    told to end, and have saved.
    """
    lines_until(process, "from step 0", 2)
    (rank,) = [
        pid
        for pid in processes_of(run_id)
        if b"ISLAND_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        and Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1] == script.encode()
    ]
    os.kill(rank, signal.SIGKILL)
    lines = lines_until(process, "island1 goes on from step", 1)
    assert any("ended with status 137; restart 1 of 1" in line for line in lines)
    time.sleep(2.0)  # who is told to end while it attaches has no checkpoint to save: 143
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 75, output
