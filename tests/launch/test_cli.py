"""The command `fsdp-demo`: store, rehearse, presets, inspect (export: test_export.py). Scripts here
use torch at most, not the library's core."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fsdp_demo import cli
from fsdp_demo.comm.address import join_address, split_address
from fsdp_demo.errors import StoreSilent
from fsdp_demo.launch import rehearse, run
from fsdp_demo.launch.console import Console, Splitter
from fsdp_demo.launch.rehearsal import Rehearsal, devices
from fsdp_demo.launch.rehearsal import command as launched
from fsdp_demo.launch.rehearse import Supervisor
from fsdp_demo.launch.store import serve

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Every rank of every island meets in the store, so the store, the addresses and the counts are
# right if this ends.
MEET = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
host, port = os.environ["ISLAND_ENDPOINT"].rsplit(":", 1)
store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=60), wait_for_workers=False)
store = dist.PrefixStore(os.environ["ISLAND_RUN"], store)
store.add("ranks", 1)
while store.add("ranks", 0) < int(os.environ["ISLAND_COUNT"]) * dist.get_world_size():
    time.sleep(0.05)
names = ("ISLAND_RANK", "ISLAND_NAME", "ISLAND_ADDRESS", "ISLAND_LINK", "RANK")
words = ["met", str(int(total)), *(os.environ[name] for name in names), *sys.argv[1:]]
sys.stdout.write(" ".join(words) + "\\n")  # in one piece: the launchers run ranks unbuffered, and ranks share a pipe
store.add("done", 1)
while store.add("done", 0) < int(os.environ["ISLAND_COUNT"]) * dist.get_world_size():
    time.sleep(0.05)
dist.destroy_process_group()
"""  # noqa: E501

# The same over the durable store: by the library, for torch cannot speak to it.
MEET_DURABLE = """
import os, sys, time
from fsdp_demo import Topology
topology = Topology.from_env()
store = topology.open_store().under(topology.run)
store.add("ranks", 1)
while store.add("ranks", 0) < topology.islands:
    time.sleep(0.05)
sys.stdout.write(f"met {topology.island} {topology.endpoint.partition('1')[0]} {store.identity().generation}\\n")
store.add("done", 1)
while store.add("done", 0) < topology.islands:
    time.sleep(0.05)
"""  # noqa: E501

OUTLIVE = """
import os, sys, time
from fsdp_demo import Topology
from fsdp_demo.errors import StoreSilent
topology = Topology.from_env()
store = topology.open_store().under(topology.run)
store.add("ranks", 1)
while store.add("ranks", 0) < topology.islands:
    time.sleep(0.05)
name, generation = store.identity()
sys.stdout.write("have met\\n")
sys.stdout.flush()
while True:  # until it was started again
    try:
        if store.identity().generation > generation:
            break
    except StoreSilent:  # it takes its time on a busy machine
        pass
    time.sleep(0.2)
assert store.identity().name == name and store.add("ranks", 0) == topology.islands
sys.stdout.write(f"goes on {store.identity().generation}\\n")
store.add("done", 1)
while store.add("done", 0) < topology.islands:
    time.sleep(0.05)
"""

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


TOKEN = "a token that is long enough"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fsdp_demo.cli", *words]


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> Iterator[str]:
    """A run id by which every process of the test is found; none may be left at the end."""
    name = f"test-{os.getpid()}-{time.time_ns()}"
    yield name
    left = processes_of(name)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left behind: {left}"


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
    return subprocess.Popen(
        full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


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


# Rehearse


@pytest.mark.gloo
def test_rehearse_by_accelerate_runs_every_rank_of_every_island(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISLAND_TRANSPORT", "gloo")  # the script meets at torch's own store
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    words = (
        "--procs",
        "2",
        "--link",
        "100Mbit",
        "--rtt",
        "40ms",
        "--",
        str(script),
        "--flag",
        "--",
        "x",
    )
    process = rehearsal(run_id, script, *words)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    met = sorted(line for line in output.splitlines() if "met" in line)
    ranks = [(island, rank) for island in range(2) for rank in range(2)]
    assert met == [
        f"[island{i}] met 2 {i} island{i} 127.0.0.1 100Mbit,40ms {r} --flag -- x" for i, r in ranks
    ], output


def test_rehearse_over_zeromq_has_a_durable_store(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zmq")
    monkeypatch.setenv("ISLAND_TRANSPORT", "zeromq")
    monkeypatch.setenv("ISLAND_TOKEN", "a token that is long enough")
    script = tmp_path / "meet.py"
    script.write_text(MEET_DURABLE)
    process = rehearsal(run_id, script, "--procs", "1", "--launcher", "torchrun", "--cpu")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert sorted(line for line in output.splitlines() if "met" in line) == [
        f"[island{i}] met {i} zmq:// 1" for i in range(2)
    ], output
    assert "status 0 (island0 0, island1 0)" in output.splitlines()[-1]


@ON_LINUX
@pytest.mark.slow
def test_rehearse_starts_a_durable_store_again_and_the_islands_go_on(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zmq")
    monkeypatch.setenv("ISLAND_TRANSPORT", "zeromq")
    script = tmp_path / "outlive.py"
    script.write_text(OUTLIVE)
    process = rehearsal(run_id, script, "--procs", "1", "--launcher", "torchrun", "--cpu")
    before = lines_until(process, "have met", 2)
    os.kill(store_of(process.pid), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, "".join(before) + output
    assert "[rehearse] the store has ended; starting it again on its file" in output
    assert sorted(line for line in output.splitlines() if "goes on" in line) == [
        f"[island{i}] goes on 2" for i in range(2)
    ], output


def test_no_island_rewrites_what_another_launcher_reads(tmp_path: Path) -> None:
    plan = Rehearsal(2, 1, (__file__,), "accelerate")
    words = [launched(plan, tmp_path, False) for _ in range(2)]
    files = {each[each.index("--config_file") + 1] for each in words}
    assert len(files) == 2 and all("use_cpu: true" in Path(file).read_text() for file in files)


def test_a_store_that_ends_again_at_once_ends_the_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISLAND_TRANSPORT", "zeromq")
    supervisor, started = (
        Supervisor(Rehearsal(2, 1, (__file__,), "torchrun"), io.StringIO()),
        list[str](),
    )
    monkeypatch.setattr(supervisor, "launch_store", lambda bind, *words: started.append(bind))
    supervisor.endpoint = "zmq://127.0.0.1:7"
    supervisor.store_has_ended(100.0)
    assert (
        started == ["zmq://127.0.0.1:7"]
        and not supervisor.store_lost
        and supervisor.stop_at is None
    )
    supervisor.store_has_ended(100.0 + rehearse.BRIEF / 2)
    assert (
        len(started) == 1
        and supervisor.store_lost
        and supervisor.stop_at == 100.0 + rehearse.BRIEF / 2
    )
    supervisor.selector.close()
    # not `leave_nothing`, which ends all that this process has started
    shutil.rmtree(supervisor.folder)


def test_without_a_file_the_end_of_the_store_ends_the_islands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ISLAND_TRANSPORT", "gloo")
    supervisor = Supervisor(Rehearsal(2, 1, (__file__,), "torchrun"), io.StringIO())
    supervisor.store_has_ended(100.0)
    assert supervisor.store_lost and supervisor.stop_at == 100.0
    supervisor.selector.close()
    shutil.rmtree(supervisor.folder)


def test_rehearse_by_torchrun_runs_every_rank_of_every_island(run_id: str, tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    names = ["ISLAND_RANK", "ISLAND_COUNT", "RANK", "WORLD_SIZE", "MASTER_ADDR"]
    script.write_text(
        f"import os, sys\nsys.stdout.write('env ' + ' '.join(os.environ[name] for name in {names}) "
        "+ '\\n')\n"
    )
    process = rehearsal(run_id, script, "--procs", "2", "--launcher", "torchrun")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    said = sorted(line for line in output.splitlines() if "env" in line)
    assert said == [
        f"[island{i}] env {i} 2 {rank} 2 127.0.0.1" for i in range(2) for rank in range(2)
    ], output


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun", "deepspeed"])
def test_rehearse_runs_a_module(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    pytest.importorskip(launcher) if launcher != "torchrun" else None
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import os, sys\nfrom . import __name__ as package\n"
        "sys.stdout.write(f'ran {package} {os.environ[\"ISLAND_RANK\"]} {sys.argv[1:]}\\n')\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("--procs", "1", "--launcher", launcher, "--", "-m", "pkg.train", "--lr", "1")
    process = rehearsal(run_id, tmp_path, *words)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    said = sorted(line for line in output.splitlines() if "] ran" in line)
    assert said == [f"[island{i}] ran pkg {i} ['--lr', '1']" for i in range(2)], output


@ON_LINUX
@pytest.mark.gloo
def test_a_dying_island_ends_the_others_and_its_status_counts(run_id: str, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    act = (
        "signal.signal(signal.SIGTERM, lambda *_: leave(75))\nif island == '1' and rank == '1': "
        "time.sleep(1); sys.exit(3)"
    )
    script.write_text(WAIT.format(act=act))
    process = rehearsal(run_id, script, "--procs", "2", "--launcher", "torchrun", "--grace", "0.5")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    assert "[rehearse] island1 ended with status 3" in output
    assert "status 3 (island0 75, island1 3)" in output.splitlines()[-1]


@ON_LINUX
def test_ctrl_c_ends_all_and_a_second_one_kills(run_id: str, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    armed = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.stdout.write('told to "
        "end\\n'))\nprint('armed', flush=True)\ntime.sleep(60)"
    )
    script.write_text(WAIT.format(act=armed))
    process = rehearsal(run_id, script, "--procs", "1", "--launcher", "torchrun")
    lines_until(process, "] armed", 2)
    process.send_signal(signal.SIGINT)
    lines_until(process, "told to end", 2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output


@ON_LINUX
@pytest.mark.gloo
@pytest.mark.slow
def test_islands_that_save_and_leave_make_status_75(run_id: str, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    act = (
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), leave(75)))\nif island == '1': "
        "leave(75)"
    )
    script.write_text(WAIT.format(act=act))
    process = rehearsal(run_id, script, "--procs", "1", "--launcher", "torchrun", "--grace", "0.5")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "status 75 (island0 75, island1 75)" in output.splitlines()[-1]


@ON_LINUX
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rehearse", "launcher"])
def test_nothing_is_left_when_a_parent_is_killed(
    victim: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISLAND_TRANSPORT", "gloo")  # the others end when an island does
    script = tmp_path / "wait.py"
    script.write_text(WAIT.format(act=""))
    process = rehearsal(run_id, script, "--procs", "2", "--launcher", "torchrun", "--grace", "0.5")
    lines_until(process, "] here", 4)
    if victim == "rehearse":
        process.kill()
        process.wait()
        wait_until(lambda: not processes_of(run_id), 20)
        return
    launchers = [
        pid
        for pid in processes_of(run_id)
        if b"fsdp_demo.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(launchers[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 137, output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--islands", "0", "--procs", "1", "--", __file__], "--islands 0: must be 1 or more"),
        (["--islands", "2", "--procs", "-1", "--", __file__], "--procs -1: must be 1 or more"),
        (["--islands", "2", "--procs", "1"], "no script"),
        (
            ["--islands", "2", "--procs", "1", "--", "nowhere.py"],
            "script 'nowhere.py': no such file",
        ),
        (["--islands", "2", "--procs", "1", "--", "-m"], "-m : no such module"),
        (
            ["--islands", "2", "--procs", "1", "--", "-m", "nowhere.train"],
            "-m nowhere.train: no such module",
        ),
        (["--islands", "2", "--procs", "1", "--link", "fast", "--", __file__], "link rate 'fast'"),
        (["--islands", "2", "--procs", "1", "--rtt", "40", "--", __file__], "link round trip '40'"),
        (["--islands", "2", "--procs", "1", "--run", "a b", "--", __file__], "--run 'a b'"),
    ],
)
def test_rehearse_refuses_with_a_clear_text(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rehearse", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "visible", "procs", "expected"),
    [
        (0, None, 2, ["", ""]),
        (4, None, 2, ["0,1", "2,3"]),
        (4, "4,5,6,7", 2, ["4,5", "6,7"]),
        (1, None, 1, ["0", "0"]),
        (1, None, 2, ["", ""]),
        (3, None, 2, ["0,1", "0,1"]),
    ],
)
def test_gpus_are_split_over_islands(
    count: int,
    visible: str | None,
    procs: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fsdp_demo.launch.rehearsal.may_have_gpus", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices(Rehearsal(2, procs, (__file__,), "torchrun"))[0] == expected


# The launcher's status


def failed(*codes: int) -> ChildFailedError:
    return ChildFailedError(
        "script", {rank: ProcessFailure(rank, 1, code, "none") for rank, code in enumerate(codes)}
    )


def test_status_of_failed_ranks(tmp_path: Path) -> None:
    never = float("inf")
    assert run.failed_status(failed(3), str(tmp_path), never) == 3
    assert run.failed_status(failed(-9, -15), None, never) == 137
    assert run.failed_status(failed(75, 1), str(tmp_path), never) == 75
    assert run.failed_status(failed(1), str(tmp_path), never) == 1
    (tmp_path / "rank1").write_text("75\n")
    assert run.failed_status(failed(1, 75), str(tmp_path), never) == 75, (
        "rank 1 left first, rank 0 fell over it"
    )
    assert run.failed_status(failed(1, 75), str(tmp_path), time.time() - 60) == 1, (
        "rank 1 saved because it was told to end"
    )
    assert run.failed_status(failed(3, 75), str(tmp_path), never) == 3


# Output


def test_lines_arrive_whole_in_whatever_pieces_they_come() -> None:
    data = "α one\r\n 10%\r 20%\r\rtwo\nrest".encode()
    expected = [
        ("α one", False),
        (" 10%", True),
        (" 20%", True),
        ("", True),
        ("two", False),
        ("rest", False),
    ]
    for size in (1, 2, 3, 5, len(data)):
        splitter = Splitter()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        lines = [line for piece in pieces for line in splitter.feed(piece)]
        assert lines + splitter.feed(b"", final=True) == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_stays_below_the_lines_of_a_terminal() -> None:
    terminal = Terminal()
    console = Console(terminal)
    console.show("island0", " 10%", passing=True, first=True)
    console.show("island1", " 10%", passing=True)
    console.show("island1", "hello")
    console.show("island0", " 20%", passing=True, first=True)
    console.show("island0", "done")
    clear = "\r\x1b[K"
    assert (
        terminal.getvalue()
        == f"[island0] 10%{clear}[island1] hello\n[island0] 20%{clear}[island0] done\n"
    )


def test_a_progress_bar_does_not_fill_a_file() -> None:
    file = io.StringIO()
    console = Console(file)
    for percent in range(100):
        console.show("island0", f"{percent}%", passing=True, first=True)
    console.show("island0", "100%")
    assert file.getvalue() == "[island0] 0%\n[island0] 100%\n"


def test_a_name_that_a_line_has_already_is_not_written_twice() -> None:
    file = io.StringIO()
    console = Console(file)
    for text in ("[island0] preset demo", "[island1] elsewhere", "plain"):
        console.show("island0", text)
    written = "[island0] preset demo\n[island0] [island1] elsewhere\n[island0] plain\n"
    assert file.getvalue() == written


# Errors


def test_a_store_that_is_silent_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsdp_demo.comm.topology.Topology.open_store", refuse(StoreSilent("none")))
    monkeypatch.setenv("ISLAND_ENDPOINT", "zmq://127.0.0.1:1")
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "fsdp-demo: error: none\n"


def test_a_file_that_cannot_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = PermissionError(13, "Permission denied", "run")
    monkeypatch.setattr("fsdp_demo.checkpoint.inspect.inspect", refuse(broken))
    assert cli.main(["inspect", "run"]) == 1
    assert capsys.readouterr().err == "fsdp-demo: error: run: Permission denied\n"


def refuse(error: Exception) -> Callable[..., Any]:
    """A function that raises it."""

    def act(*_: Any, **__: Any) -> Any:
        raise error

    return act


# Store


def test_store_serves_until_stopped(tmp_path: Path) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM]
    files = [tmp_path / number.name for number in numbers]
    words = ["store", "--bind", "127.0.0.1:0", "--port-file"]
    stores = [
        subprocess.Popen(command(*words, str(file)), stdout=subprocess.PIPE, text=True)
        for file in files
    ]
    try:
        for process, file, number in zip(stores, files, numbers, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(file.read_text())
            assert line == (
                f"store listening on 127.0.0.1:{port}; on every island: export "
                f"ISLAND_ENDPOINT=127.0.0.1:{port}\n"
            )
            socket.create_connection(("127.0.0.1", port), 5).close()
            process.send_signal(number)
            assert process.wait(30) == 0
    finally:
        for process in stores:
            process.kill()


def test_a_durable_store_keeps_its_file_where_it_was_started(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    from fsdp_demo.comm.store_zeromq import ZeroMQStore

    found, token = [], "a token that is long enough"
    for _ in range(2):
        env = {
            **os.environ,
            "ISLAND_TOKEN": token,
            "PYTHONPATH": str(Path(cli.__file__).parents[1]),
        }
        words = command("store", "--bind", "zmq://127.0.0.1:0")
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                kept = f"keys in {tmp_path / 'fsdp_demo_store.sqlite'}"
                said = re.fullmatch(
                    rf"store listening on (127\.0\.0\.1:\d+), {re.escape(kept)}; .* export "
                    rf"ISLAND_ENDPOINT=(.+)\n",
                    line,
                )
                assert said and said[2] == f"zmq://{said[1]}", line
                client = ZeroMQStore(said[2], token)
                found.append((client.add("starts", 1), client.identity()))
                client.close()
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            finally:
                process.kill()
    assert [count for count, _ in found] == [1, 2] and [who.generation for _, who in found] == [
        1,
        2,
    ]
    assert found[0][1].name == found[1][1].name and [f.name for f in tmp_path.iterdir()] == [
        "fsdp_demo_store.sqlite"
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["127.0.0.1:0", "--file", "keys"],
            "this store keeps nothing in a file; take --bind zmq://127.0.0.1:0",
        ),
        (["zmq://127.0.0.1"], "address '127.0.0.1': expected ADDR:PORT"),
        (
            ["zmq://198.51.100.7:0", "--file", ":memory:"],
            "--bind zmq://198.51.100.7:0: cannot listen there: .*no such address",
        ),
        (
            ["zmq://127.0.0.1:0", "--file", "no/such/folder/keys"],
            "--file no/such/folder/keys: No such file or directory; take a file in a",
        ),
    ],
)
def test_a_durable_store_refuses_what_it_cannot_use(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zmq")
    assert cli.main(["store", "--bind", *words]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_short_token_and_an_open_door_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zmq")
    from fsdp_demo.launch.durable_store import DurableStore

    for token, warned in (("", 2), ("a token that is long enough", 1)):
        store = DurableStore("zmq://0.0.0.0:0", ":memory:", token)
        store.serve_while(lambda: False)  # closes it
        assert (
            len(store.warnings) == warned
            and "keeps nothing" in store.warnings[-1]
            and "0.0.0.0" not in store.endpoint
        )
    assert (
        "ISLAND_TOKEN is set, but this store lets everybody in"
        in serve("127.0.0.1:0", "a token").warnings[0]
    )
    monkeypatch.setenv("ISLAND_TOKEN", "short")
    for bind in ("zmq://127.0.0.1:0", "127.0.0.1:0"):
        assert cli.main(["store", "--bind", bind]) == 2
        assert "ISLAND_TOKEN has 5 characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "here", "status", "says"),
    [
        (TOKEN, "short", 2, "ISLAND_TOKEN has 5 characters, allowed are 16 or more"),
        (TOKEN, "another token, as long", 2, "must be the same at the store"),
        (TOKEN, "", 2, "must be the same at the store"),
        (TOKEN, TOKEN, 1, ""),
    ],
)
def test_status_ends_whatever_token_it_is_given(
    there: str, here: str, status: int, says: str, tmp_path: Path
) -> None:
    pytest.importorskip("zmq")
    from fsdp_demo.launch.durable_store import DurableStore, InThread

    served = InThread(DurableStore("zmq://127.0.0.1:0", tmp_path / "keys", there))
    env = {
        **os.environ,
        "ISLAND_ENDPOINT": served.endpoint,
        "ISLAND_RUN": "none",
        "ISLAND_TOKEN": here,
        "PYTHONPATH": str(Path(cli.__file__).parents[1]),
    }
    try:
        done = subprocess.run(
            command("status"), env=env, capture_output=True, text=True, timeout=120
        )
    finally:
        served.end()
    assert done.returncode == status and says in done.stderr, done.stderr
    assert "nobody has met" in done.stdout or status == 2


def listens_on(port: int) -> list[str]:
    """Local addresses (hexadecimal) that listen on a port, from /proc."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0]
        for row in rows
        if row[3] == "0A" and int(row[1].split(":")[1], 16) == port
    ]


@ON_LINUX
def test_store_listens_on_the_address_asked_for_and_no_other() -> None:
    served = serve("127.0.0.1:0")
    assert listens_on(served.port) == ["0100007F"]
    assert served.warnings == ()
    served.server.set("key", "value")
    with pytest.raises(
        ValueError, match="cannot listen there: Address already in use.*another port"
    ):
        serve(served.endpoint)


def test_store_on_every_address_says_so() -> None:
    served = serve("0.0.0.0:0")
    assert "every address" in served.warnings[0]
    assert split_address(served.endpoint)[1] == served.port and "0.0.0.0" not in served.endpoint


def test_store_warns_of_a_public_address() -> None:
    import ipaddress

    from fsdp_demo.launch import store

    (warning,) = store._warnings(ipaddress.ip_address("8.8.8.8"))
    assert "PUBLIC" in warning and "no passwords" in warning
    for private in ("127.0.0.1", "10.1.2.3", "192.168.1.5", "100.100.1.1", "fd00::1"):
        assert store._warnings(ipaddress.ip_address(private)) == (), private


@pytest.mark.parametrize(
    "bind",
    [
        "127.0.0.1",
        "127.0.0.1:",
        ":1",
        "127.0.0.1:70000",
        "::1:29500",
        "127.0.0.1:x",
        "",
        "no such name:1",
    ],
)
def test_store_refuses_wrong_addresses(bind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "--bind", bind]) == 2
    assert re.search(
        r"error: (address .* expected ADDR:PORT|--bind .* has no address)", capsys.readouterr().err
    )


def test_store_refuses_an_address_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "--bind", "198.51.100.7:0"]) == 2
    assert "no such address" in capsys.readouterr().err


def test_addresses_read_back() -> None:
    for text in ("10.0.0.5:29500", "[fd00::1]:29500", "host:0"):
        assert join_address(*split_address(text)) == text


# The rest


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from fsdp_demo.version import __version__

    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fsdp-demo {__version__}\n"


def test_presets_are_listed_and_printed_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    import fsdp_demo

    assert cli.main(["presets"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert (
        {line.split()[0] for line in listed}
        == set(fsdp_demo.presets())
        >= {"full", "demo", "diloco", "decoupled_momentum"}
    )
    assert all(len(line.split()) > 1 for line in listed)
    kinds = {line.split()[0]: line.split()[1] for line in listed}
    assert (kinds["full"], kinds["sign_loco"], kinds["desloc"]) == (
        "baseline",
        "recommended",
        "paper",
    )
    assert cli.main(["presets", "demo", "--yaml"]) == 0
    assert fsdp_demo.ExchangeConfig.from_yaml(capsys.readouterr().out) == fsdp_demo.preset("demo")
    assert cli.main(["presets", "diloko"]) == 2
    assert "diloco" in capsys.readouterr().err


# Inspect


def saved_run(rank) -> str:
    """Two islands; checkpoints after steps 3 (nothing under way) and 4 (a payload under way)."""
    from fsdp_demo import attach
    from fsdp_demo.checkpoint import save_exchange

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exchange = attach(
        optimizer,
        "diloco",
        model=model,
        period=2,
        **{"schedule.delay": 1, "codec.value_dtype": "bf16"},
    )
    for step in range(1, 5):
        model(torch.ones(1, 20)).sum().backward()
        exchange.report(tokens=7)
        optimizer.step()
        optimizer.zero_grad()
        if step > 2:
            save_exchange(
                rank.folder / "run" / f"island{rank.island}" / f"checkpoint-{step}" / "exchange",
                exchange,
            )
    exchange.finish()
    return str(rank.folder / "run")


@pytest.fixture
def run_folder(run_ranks) -> Path:
    return Path(run_ranks(saved_run, islands=2, procs=2)[0])


@pytest.fixture
def inspected(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[int, Any]]:
    """Exit status and the list that `--json` prints, or the error."""

    def call(folder: Path) -> tuple[int, Any]:
        status = cli.main(["inspect", "--json", str(folder)])
        said = capsys.readouterr()
        return status, json.loads(said.out) if said.out else said.err

    return call


def test_inspect_says_what_is_in_a_run(
    run_folder: Path, inspected, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = inspected(run_folder)
    assert status == 0 and [(f["step"], f["holds"]) for f in found] == [
        (step, {str(i): f"island{i}"}) for i in range(2) for step in (3, 4)
    ]
    one, late = found[0], found[1]
    assert (
        one["complete"]
        and one["problems"] == []
        and (one["preset"], one["islands"], one["topology"]) == ("diloco", 2, "islands")
    )
    assert one["settings"] == {
        "delta.schedule.sync_every": 2,
        "delta.schedule.delay": 1,
        "delta.codec.value_dtype": "bf16",
    }
    assert (one["shards"], one["copies"], one["parameters"], one["frozen"], one["tokens"]) == (
        1,
        2,
        910,
        30,
        2 * 3 * 7,
    )
    assert (
        one["states"] == {"delta": {"anchor": 910 * 4, "momentum": 910 * 4}}
        and one["in_flight"] == []
    )
    assert [(f["step"], f["channels"]) for f in late["in_flight"]] == [(3, ["delta"])] and late[
        "in_flight"
    ][0]["bytes"] > 0
    assert one["versions"]["format"] == 3 and one["bytes"] > 2 * 910 * 4
    assert cli.main(["inspect", str(run_folder)]) == 0
    text = capsys.readouterr().out
    for wanted in (
        "island1/checkpoint-4",
        "0 and 1 in the last exchange",
        "42, of island 0",
        "42, of island 1",
        "sync_every=2",
        "anchor 3.64 kB",
        "sent in step 3 by delta",
        "whole on all islands: 3 and 4",
    ):
        assert wanted in text, text


def described(step: int, island: int, islands: int, took: list[int] | None = None) -> Any:
    """What `inspect` says of one checkpoint, as far as `shared` reads it."""
    holds = {str(island): f"island{island}"}
    return {
        "step": step,
        "islands": islands,
        "holds": holds,
        "complete": True,
        "participants": list(range(islands)) if took is None else took,
    }


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([described(s, i, 2) for i in (0, 1) for s in (50, 100)], "on all islands: 50 and 100"),
        (  # a disk of its own
            [described(s, 0, 2) for s in (50, 100)],
            "the islands whose folders are here (island 0 of 2): 50 and 100\n"
            "the folders here say nothing of that of 1: look there, too",
        ),
        (  # an old folder of an island that was dropped
            [*(described(s, i, 2) for i in (0, 1) for s in (95, 100)), described(50, 2, 3)],
            "whole on all islands: 95 and 100",
        ),
        (
            [*(described(s, i, 3, [0, 1]) for i in (0, 1) for s in (95, 100)), described(50, 2, 3)],
            "whole on all islands: no step\nin step 100, the newest, took part: 0 and 1 of 3. With "
            "--resume auto the others take over from these; whole on these: 95 and 100",
        ),
    ],
)
def test_inspect_says_of_which_islands_a_step_is_whole(found: list[Any], says: str) -> None:
    from fsdp_demo.checkpoint.inspect import shared

    assert shared(found).endswith(says), shared(found)


def test_inspect_tells_a_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_demo.checkpoint import inspect

    monkeypatch.setattr(inspect, "text", lambda info: str(info.get("chosen_because", "-")))
    reasons = [{"chosen_because": why} for why in ("", "fast", "fast", "slow", "fast")]
    assert inspect.texts([{}, *reasons]).split("\n\n") == [
        *("-", "", "fast", "as above"),
        *("slow", "as above"),
    ]


def test_inspect_says_what_is_missing_or_damaged(
    run_folder: Path, inspected, capsys: pytest.CaptureFixture[str]
) -> None:
    exchange = run_folder / "island0" / "checkpoint-3" / "exchange"
    tensors = exchange / "rank1.safetensors"
    good = tensors.read_bytes()
    tensors.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    status, (found,) = inspected(exchange.parent)
    assert (
        status == 1
        and not found["complete"]
        and found["problems"] == [f"{tensors} is damaged, its checksum does not fit"]
    )
    tensors.write_bytes(good)
    (exchange / "rank1.json").unlink()
    status, (found,) = inspected(exchange)
    assert (
        status == 1
        and found["problems"] == ["island 0 lacks the part of rank 1"]
        and found["step"] == 3
    )
    (exchange / "rank0.json").write_text("{")
    status, error = inspected(exchange.parent)
    assert (
        status == 2
        and "rank0.json is damaged" in error
        and error.startswith("fsdp-demo: error: ")
        and error.count("\n") == 1
    )
    assert cli.main(["inspect", str(run_folder)]) == 1
    text = capsys.readouterr().out
    assert "NOT READABLE: " in text and "whole on all islands: 4" in text


def test_inspect_checks_the_files_that_a_manifest_names(run_folder: Path, inspected) -> None:
    folder = run_folder / "island0" / "checkpoint-3"
    (folder / "model.bin").write_bytes(b"123")
    (folder / "manifest.json").write_text(
        json.dumps({"version": 1, "files": {"model.bin": {"bytes": 3, "crc32": 0x884863D2}}})
    )
    assert inspected(folder)[0] == 0
    (folder / "model.bin").write_bytes(b"124")
    status, (found,) = inspected(folder)
    assert status == 1 and found["problems"] == [
        f"{folder / 'model.bin'} is damaged, its checksum does not fit"
    ]
    (folder / "model.bin").unlink()
    assert inspected(folder)[1][0]["problems"] == [f"{folder / 'model.bin'} is missing"]


@pytest.mark.parametrize("make, says", [(False, "no such folder"), (True, "holds no checkpoint")])
def test_inspect_refuses_other_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: bool, says: str
) -> None:
    folder = tmp_path / "run"
    if make:
        (folder / "island0").mkdir(parents=True)
        (folder / ".checkpoint-4.part").mkdir()
    assert cli.main(["inspect", str(folder)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
