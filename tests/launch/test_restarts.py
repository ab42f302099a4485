"""Islands that are started again by themselves: by `--restarts` of `launch` and `rehearse`, and by
torchrun's own restarts.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fsdp_demo import cli
from fsdp_demo.launch import rehearse, restarts
from fsdp_demo.launch import run as launch
from fsdp_demo.launch.processes import reserve_port
from fsdp_demo.launch.rehearsal import Rehearsal
from fsdp_demo.launch.rehearsal import command as launched
from fsdp_demo.launch.rehearse import Supervisor

from .rehearsals import ON_LINUX, WAIT, lines_until, rehearsal

# Trains 12 steps of a line with one number, and keeps it; rank 0 of island 1 is killed in its first
# life.
TRAIN = """
import os, pathlib, signal, sys
import torch, fsdp_demo
torch.set_num_threads(1)
if int(os.environ["WORLD_SIZE"]) > 1:
    torch.distributed.init_process_group("gloo")
start, folder = os.environ[sys.argv[1]], pathlib.Path(sys.argv[2])
kept = folder / ("kept" + os.environ["ISLAND_RANK"])
weight = torch.nn.Parameter(torch.zeros(3))
done = int(kept.read_text()) if "--resume" in sys.argv else 0
weight.data.fill_(float(done))
optimizer = torch.optim.SGD([weight], lr=1.0)
exchange = fsdp_demo.attach(optimizer, "full", clip=None)
exchange.step = done
with fsdp_demo.guard(exchange, lambda: kept.write_text(str(exchange.step))):
    while exchange.step < 12:
        if (start, os.environ["ISLAND_RANK"], exchange.step) == ("0", "1", 5):
            kept.write_text("5")
            os.kill(os.getpid(), signal.SIGKILL)
        weight.grad = torch.full((3,), -1.0)
        optimizer.step()
exchange.finish()
print(f"start {start} from {done} to {weight.tolist()[0]} {sys.argv[3:]}", flush=True)
"""


@pytest.fixture
def island(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """What `supervise` starts; instead of a process each ends with the next number of STATUSES."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(self: Any, words: list[str], env: dict[str, str]) -> int:
        started.append((list(words), env))
        return int(os.environ["STATUSES"].split()[len(started) - 1])

    monkeypatch.setattr(restarts._Island, "run", run)
    monkeypatch.setattr(restarts, "adopt_orphans", lambda: None)
    monkeypatch.setattr(restarts, "_end_strays", lambda: None)
    monkeypatch.setenv("ISLAND_STATUS", str(tmp_path))
    yield started


@pytest.mark.parametrize(
    ("statuses", "starts", "last"),
    [
        ("0", 1, 0),
        ("75 0", 2, 0),
        ("137 75 139", 3, 139),
        ("75 75 75", 3, 75),
        ("1", 1, 1),
        ("2", 1, 2),
        ("78", 1, 78),
        ("75 78", 2, 78),
    ],
)
def test_who_is_started_again(
    island, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: str, starts: int, last: int
) -> None:
    monkeypatch.setenv("STATUSES", statuses)
    words = ["--restarts", "2", "--resume-args=--resume auto", "torchrun", "train.py", "--lr", "1"]
    assert launch.main(words) == last
    assert [w for w, _ in island] == [
        words[3:] + ["--resume", "auto"] * (n > 0) for n in range(starts)
    ]
    assert [env["ISLAND_ATTEMPT"] for _, env in island] == [str(n) for n in range(starts)]
    assert [env["ISLAND_STATUS"] for _, env in island] == [
        str(tmp_path / f"attempt{n}") for n in range(starts)
    ]


def test_rehearse_hands_restarts_on() -> None:
    plan = Rehearsal(
        2, 1, (__file__, "--lr", "1"), "torchrun", restarts=3, resume_args="--resume auto"
    )
    words = launched(plan, Path("/nowhere"), False)
    assert launch._parse(words[3:])[:2] == (3, ["--resume", "auto"]) and words[-3:] == [
        __file__,
        "--lr",
        "1",
    ]
    assert "--restarts" not in launched(
        Rehearsal(2, 1, (__file__,), "torchrun"), Path("/nowhere"), False
    )


@pytest.mark.parametrize(
    ("own", "worst"),
    [((75, 78), 78), ((78, 1), 78), ((137, 78), 78), ((75, 1), 1), ((75, 75), 75), ((0, 0), 0)],
)
def test_somebody_must_decide_is_the_worst_status(own: tuple[int, ...], worst: int) -> None:
    supervisor = Supervisor(Rehearsal(len(own), 1, (__file__,), "torchrun"), sys.stdout)
    supervisor.islands = supervisor.ended = [
        rehearse.Island(f"island{n}", None, status) for n, status in enumerate(own)
    ]  # type: ignore[arg-type]
    assert supervisor.verdict() == worst


def failed(*codes: int, after: int = 0) -> ChildFailedError:
    failures = {rank: ProcessFailure(rank, 1, code, "none") for rank, code in enumerate(codes)}
    failures[len(codes) - 1].timestamp += after
    return ChildFailedError("script", failures)


def test_the_status_of_ranks_that_failed_together(tmp_path: Path) -> None:
    never = float("inf")
    assert launch.failed_status(failed(1, -9), None, never) == 137, (
        "rank 0 fell over the one that was killed"
    )
    assert launch.failed_status(failed(1, -9, after=30), None, never) == 1, (
        "killed by its launcher, because it did not end"
    )
    assert launch.failed_status(failed(1, -15), None, never) == 1
    assert (
        launch.failed_status(failed(1, 78), None, never)
        == launch.failed_status(failed(75, 78), None, never)
        == 78
    )


def test_wrong_restarts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["rehearse", "--islands", "2", "--procs", "1", "--restarts", "-1", "--", __file__])
        == 2
    )
    assert "--restarts -1: must be 0 or more" in capsys.readouterr().err
    for words, text in (
        (["--restarts", "-1", "torchrun", "x.py"], "--restarts -1: must be 0 or more"),
        (["foo", "x.py"], "launcher 'foo': expected accelerate, deepspeed, torchrun"),
        ([], "launcher none: expected"),
    ):
        with pytest.raises(SystemExit) as ended:
            launch.main(words)
        assert ended.value.code == 2 and text in capsys.readouterr().err


@ON_LINUX
@pytest.mark.timeout(300)
@pytest.mark.gloo
@pytest.mark.slow
def test_rehearse_restarts_islands_and_they_go_on(run_id: str, tmp_path: Path) -> None:
    """Island 1 is killed; island 0 saves and leaves; both come back and meet in a new attempt."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    options = [
        "--procs",
        "1",
        "--launcher",
        "torchrun",
        "--restarts",
        "2",
        "--resume-args=--resume now",
    ]
    process = rehearsal(
        run_id, script, *options, "--", str(script), "ISLAND_ATTEMPT", str(tmp_path)
    )
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    for n in range(2):
        assert f"[island{n}] start 1 from 5 to 12.0 ['--resume', 'now']" in output, output
    assert "[island0] fsdp_demo.launch: ended with status 75; restart 1 of 2" in output
    assert "[island1] fsdp_demo.launch: ended with status 137; restart 1 of 2" in output
    assert "status 0 (island0 0, island1 0)" in output.splitlines()[-1]


@ON_LINUX
@pytest.mark.timeout(300)
def test_an_island_that_is_told_to_end_is_not_restarted(run_id: str, tmp_path: Path) -> None:
    """And 75 stays 75."""
    script = tmp_path / "wait.py"
    script.write_text(
        WAIT.format(
            act="signal.signal(signal.SIGTERM, lambda *_: leave(75))\nprint('armed', flush=True)"
        )
    )
    words = [
        sys.executable,
        "-m",
        "fsdp_demo.launch",
        "--restarts",
        "3",
        "torchrun",
        "--nproc-per-node",
        "1",
        "--master-port",
        "0",
    ]
    env = {
        **os.environ,
        "ISLAND_RUN": run_id,
        "ISLAND_RANK": "0",
        "ISLAND_STATUS": str(tmp_path / "status"),
    }
    process = subprocess.Popen(
        [*words, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines_until(process, "armed", 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and "restart" not in output, output


@ON_LINUX
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_restarts_of_torchrun_itself(run_id: str, tmp_path: Path) -> None:
    """`torchrun --max-restarts` on two islands of two ranks: one rank is killed, both launchers
    start theirs again, and the run ends.
    """
    script = tmp_path / "train.py"
    script.write_text(
        TRAIN.replace('"--resume" in sys.argv', 'os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"')
    )
    port = tmp_path / "port"
    store = subprocess.Popen(
        [
            sys.executable,
            *shlex.split(f"-m fsdp_demo.cli store --bind 127.0.0.1:0 --quiet --port-file {port}"),
        ]
    )
    islands = []
    try:
        while not port.exists():
            assert store.poll() is None
        here = {
            "ISLAND_COUNT": "2",
            "ISLAND_ENDPOINT": f"127.0.0.1:{port.read_text().strip()}",
            "ISLAND_RUN": run_id,
        }
        for n in range(2):
            env = {
                **os.environ,
                **here,
                "ISLAND_RANK": str(n),
                "ISLAND_ADDRESS": "127.0.0.1",
                "ISLAND_STATUS": str(tmp_path / f"s{n}"),
            }
            words = shlex.split("torchrun --standalone --nproc-per-node 2 --max-restarts 2")
            command = [
                sys.executable,
                "-m",
                "fsdp_demo.launch",
                *words,
                str(script),
                "TORCHELASTIC_RESTART_COUNT",
                str(tmp_path),
            ]
            islands.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        outputs = [p.communicate(timeout=100)[0] for p in islands]
    finally:
        for process in [*islands, store]:
            process.kill()
            process.wait()
    assert [p.returncode for p in islands] == [0, 0], "\n".join(outputs)
    for output in outputs:
        assert output.count("start 1 from 5 to 12.0") == 2, output


SLOW = """
import pathlib, signal, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(2)
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(300)
"""


@ON_LINUX
@pytest.mark.timeout(300)
def test_a_launcher_that_is_told_twice_waits_for_ranks_that_save(tmp_path: Path) -> None:
    """As by Slurm, which tells all processes, and by the supervisor."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    words = [
        sys.executable,
        "-m",
        "fsdp_demo.launch",
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        "1",
        str(script),
        str(tmp_path),
    ]
    process = subprocess.Popen(words)
    try:
        end = time.monotonic() + 100
        while not (tmp_path / "ready").exists() and time.monotonic() < end:
            time.sleep(0.1)
        for _ in range(4):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        process.wait(100)
        assert (tmp_path / "saved").exists()
    finally:
        process.kill()
        process.wait()


def test_a_single_rank_is_promised_no_store(tmp_path: Path) -> None:
    """Ranks that its script starts by itself (`mp.spawn`) have its variables: with the launcher's
    store they would wait for ever for one that nobody serves.
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
