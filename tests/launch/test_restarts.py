"""Islands that are started again by themselves: by `--restarts` of `launch` and `rehearse`, and by
torchrun's own restarts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo.launch import __main__ as launch
from fsdp_demo.launch import processes, rehearse
from fsdp_demo.launch.processes import SITE, descendants, reserve_port, send
from fsdp_demo.launch.rehearsal import Rehearsal
from fsdp_demo.launch.rehearsal import command as launched
from fsdp_demo.launch.rehearse import Supervisor

from .rehearsals import ON_LINUX, WAIT, ended, lines_until, wait_until


@pytest.fixture
def island(monkeypatch, tmp_path: Path) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """What `supervise` starts; instead of a process each ends with the next number of STATUSES."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(self: Any, command: list[str], env: dict[str, str]) -> int:
        assert command[:3] == [sys.executable, "-m", "fsdp_demo.launch"]
        started.append((command[3:], env))
        return int(os.environ["STATUSES"].split()[len(started) - 1])

    monkeypatch.setattr(processes.Launcher, "run", run)
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(processes, "end_strays", lambda: None)
    monkeypatch.setenv("ISLAND_STATUS", str(tmp_path))
    yield started


@pytest.mark.parametrize(("statuses", "starts", "last"), [
    ("0", 1, 0), ("75 0", 2, 0), ("137 75 139", 3, 139), ("75 75 75", 3, 75), ("1", 1, 1),
    ("2", 1, 2), ("78", 1, 78), ("75 78", 2, 78),
])  # fmt: skip
def test_restarts_by_status(island, monkeypatch, tmp_path, statuses, starts, last: int) -> None:
    """An island is started again by the status that it ended with, with the words of `--resume-
    args`.
    """
    monkeypatch.setenv("STATUSES", statuses)
    words = ["--restarts", "2", "--resume-args=--resume auto", "torchrun", "train.py", "--lr", "1"]
    assert launch.main(words) == last
    again = ["--resume", "auto"]
    assert [w for w, _ in island] == [words[3:] + again * (n > 0) for n in range(starts)]
    for n, (_, env) in enumerate(island):
        assert env["ISLAND_ATTEMPT"] == str(n)
        assert env["ISLAND_STATUS"] == str(tmp_path / f"attempt{n}")


def test_restarts_of_rehearse_reach_launch() -> None:
    """`rehearse` hands `--restarts` and `--resume-args` on to `launch`."""
    script = (__file__, "--lr", "1")
    plan = Rehearsal(2, 1, script, "torchrun", restarts=3, resume_args="--resume auto")
    words = launched(plan, Path("/nowhere"), False)
    assert launch._parse(words[3:])[:2] == (3, ["--resume", "auto"])
    assert words[-3:] == [__file__, "--lr", "1"]
    plain = Rehearsal(2, 1, (__file__,), "torchrun")
    assert "--restarts" not in launched(plain, Path("/nowhere"), False)


@pytest.mark.parametrize(
    ("own", "worst"),
    [((75, 78), 78), ((78, 1), 78), ((137, 78), 78), ((75, 1), 1), ((75, 75), 75), ((0, 0), 0)],
)
def test_rehearse_status_78_is_the_worst(own: tuple[int, ...], worst: int) -> None:
    """Status 78 (somebody must decide) is the worst status of a rehearsal."""
    supervisor = Supervisor(Rehearsal(len(own), 1, (__file__,), "torchrun"), sys.stdout)
    supervisor.islands = supervisor.ended = [
        rehearse.RehearsedIsland(f"island{n}", None, status) for n, status in enumerate(own)
    ]  # type: ignore[arg-type]
    assert supervisor.verdict() == worst


def test_restarts_wrong_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong `--restarts`, and an unknown launcher, are refused."""
    for words, text in (
        (["--restarts", "-1", "torchrun", "x.py"], "--restarts -1: must be 0 or more"),
        (["foo", "x.py"], "command 'foo': expected accelerate, deepspeed, torchrun"),
        ([], "command none: expected"),
    ):
        with pytest.raises(SystemExit) as ended:
            launch.main(words)
        assert ended.value.code == 2 and text in capsys.readouterr().err


@ON_LINUX
@pytest.mark.timeout(300)
def test_restarts_not_after_a_signal_to_end(run_id: str, tmp_path: Path) -> None:
    """An island that is told to end is not restarted, and 75 stays 75."""
    script = tmp_path / "wait.py"
    act = "signal.signal(signal.SIGTERM, lambda *_: leave(75))\nprint('armed', flush=True)"
    script.write_text(WAIT.format(act=act))
    words = "-m fsdp_demo.launch --restarts 3 torchrun --nproc-per-node 1 --master-port 0"
    status = str(tmp_path / "status")
    env = os.environ | dict(ISLAND_RUN=run_id, ISLAND_RANK="0", ISLAND_STATUS=status)
    how = dict(env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen([sys.executable, *words.split(), str(script)], **how)
    lines_until(process, "armed", 1)
    process.send_signal(signal.SIGTERM)
    output = ended(process, 75)
    assert "restart" not in output, output


SLOW = """
import os, pathlib, signal, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1.2)
    pathlib.Path(os.environ["ISLAND_STATUS"], "rank0").write_text("75")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(300)
"""


@ON_LINUX
@pytest.mark.timeout(300)
def test_launch_told_twice_waits_for_ranks_that_save(tmp_path: Path) -> None:
    """A launcher that is told twice to end, as by Slurm, which tells all processes, and by the
    supervisor, waits for ranks that save, and ends with their status, 75.
    """
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    words = f"-m fsdp_demo.launch torchrun --standalone --nproc-per-node 1 {script} {tmp_path}"
    env = {name: value for name, value in os.environ.items() if name != "ISLAND_STATUS"}
    process = subprocess.Popen([sys.executable, *words.split()], env=env)
    try:
        wait_until((tmp_path / "ready").exists, 100)
        children = descendants(process.pid)
        send([process.pid, *children], signal.SIGTERM)
        for _ in range(4):
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 75
    finally:
        process.kill()
        process.wait()


def test_launch_forgets_statuses_of_an_earlier_start(tmp_path: Path) -> None:
    """A rank that torchrun has started again removes the statuses of starts before its own."""
    for name in ("rank0", "rank1.1", "rank2.2"):
        (tmp_path / name).touch()
    env = {**os.environ, "PYTHONPATH": str(SITE), "ISLAND_STATUS": str(tmp_path)}
    for start, left in (("0", 3), ("1", 2), ("2", 1)):
        env["TORCHELASTIC_RESTART_COUNT"] = start
        subprocess.run([sys.executable, "-c", ""], env=env, check=True)
        assert len(list(tmp_path.iterdir())) == left


def test_launch_single_rank_has_no_agent_store(tmp_path: Path) -> None:
    """Ranks that a script of a single rank starts by itself (`mp.spawn`) have its variables: with
    the launcher's store they would wait for ever for one that nobody serves.
    """
    script = tmp_path / "one.py"
    script.write_text(
        "import os, socket\n"
        "with socket.socket() as own:\n"
        "    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "    own.bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "    own.listen()\n"
        "print('found', os.environ['TORCHELASTIC_USE_AGENT_STORE'])\n"
    )
    words = [sys.executable, "-m", "fsdp_demo.launch", "torchrun", "--nproc-per-node", "1"]
    words += ["--master-port", str(reserve_port()), str(script)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "found False" in ended.stdout, ended.stderr
