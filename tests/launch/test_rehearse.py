"""`fsdp-demo rehearse`: islands on one machine, their statuses and their lines. Scripts here use
torch at most, not the library's core.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fsdp_demo import cli
from fsdp_demo.launch import torch_launcher
from fsdp_demo.launch.rehearsal import Rehearsal, devices
from fsdp_demo.launch.rehearsal import command as launched
from fsdp_demo.launch.rehearse import Console, Splitter

from ..support.stores import server_of
from .rehearsals import (
    ON_LINUX,
    WAIT,
    ended,
    lines_until,
    processes_of,
    rehearsal,
    store_of,
    wait_until,
    with_word,
)

# Every rank of every island meets in the store, so the store, the addresses and the counts are
# right if this ends.
MEET = """
import os, sys, time
import torch, torch.distributed as dist
from fsdp_demo import Topology
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
topology = Topology.from_env()
store = topology.open_store().under(topology.run)

def all_say(word):
    store.set(f"{word}/{topology.island}.{topology.rank}", "1")
    ranks = [(i, r) for i in range(topology.islands) for r in range(topology.world)]
    while not all(store.get_all([f"{word}/{i}.{r}" for i, r in ranks])):
        time.sleep(0.05)

all_say("here")
names = ("ISLAND_RANK", "ISLAND_NAME", "ISLAND_ADDRESS", "ISLAND_LINK", "RANK")
words = ["met", str(int(total)), *(os.environ[name] for name in names), *sys.argv[1:]]
sys.stdout.write(" ".join(words) + "\\n")  # in one piece: the launchers run ranks unbuffered, and ranks share a pipe
all_say("done")
dist.destroy_process_group()
"""  # noqa: E501

COME = """
import os, sys, time
from fsdp_demo import Topology
from fsdp_demo.errors import StoreSilent
topology = Topology.from_env()
store = topology.open_store().under(topology.run)
def come(where):
    store.set(f"{where}/{topology.island}", "here")
    while not all(store.get_all([f"{where}/{i}" for i in range(topology.islands)])):
        time.sleep(0.05)
come("ranks")
"""

MEET_DURABLE = f"""{COME}
sys.stdout.write(f"met {{topology.island}} {{store.identity().generation}}\\n")
come("done")
"""

OUTLIVE = f"""{COME}
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
assert store.identity().name == name and store.get("ranks/0")
sys.stdout.write(f"goes on {{store.identity().generation}}\\n")
come("done")
"""
TORCHRUN = ("--procs", "1", "--launcher", "torchrun")
GRACE = ("--launcher", "torchrun", "--grace", "0.5")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """A script with this text."""

    def written(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return written


def test_rehearse_by_accelerate_runs_every_rank(run_id: str, script) -> None:
    """`rehearse` by accelerate runs every rank of every island, with the link of its flags."""
    path = script(MEET)
    words = f"--procs 2 --link 100Mbit --rtt 40ms -- {path} --flag -- x"
    output = ended(rehearsal(run_id, path, *words.split()))
    ranks = [(island, rank) for island in range(2) for rank in range(2)]
    assert with_word(output, "met") == [
        f"[island{i}] met 2 {i} island{i} 127.0.0.1 100Mbit,40ms {r} --flag -- x" for i, r in ranks
    ], output


def test_rehearse_has_a_store_with_a_file(run_id, script, monkeypatch) -> None:
    """The store of a rehearsal has a file and the user's token."""
    monkeypatch.setenv("ISLAND_TOKEN", "a token that is long enough")
    output = ended(rehearsal(run_id, script(MEET_DURABLE), *TORCHRUN, "--cpu"))
    assert with_word(output, "met") == [f"[island{i}] met {i} 1" for i in range(2)], output
    assert "status 0 (island0 0, island1 0)" in output.splitlines()[-1]


@ON_LINUX
@pytest.mark.slow
def test_rehearse_restarts_its_store(run_id: str, script) -> None:
    """`rehearse` starts its store again on its file, and the islands go on."""
    process = rehearsal(run_id, script(OUTLIVE), *TORCHRUN, "--cpu")
    lines_until(process, "have met", 2)
    os.kill(server_of(store_of(process.pid)), signal.SIGKILL)
    output = ended(process)
    assert "fsdp-demo store: the server has ended (SIGKILL) and is started again on " in output
    assert with_word(output, "goes on") == [f"[island{i}] goes on 2" for i in range(2)], output


def test_rehearse_writes_one_launcher_file_per_island(tmp_path: Path) -> None:
    """Each island has a launcher's file of its own: none rewrites what another launcher reads."""
    plan = Rehearsal(2, 1, (__file__,), "accelerate")
    words = [launched(plan, tmp_path, False) for _ in range(2)]
    files = {each[each.index("--config_file") + 1] for each in words}
    assert len(files) == 2 and all("use_cpu: true" in Path(file).read_text() for file in files)


def test_rehearse_by_torchrun_runs_every_rank(run_id: str, script) -> None:
    """`rehearse` by torchrun runs every rank of every island."""
    names = ["ISLAND_RANK", "ISLAND_COUNT", "RANK", "WORLD_SIZE", "MASTER_ADDR"]
    said = f"'env ' + ' '.join(os.environ[name] for name in {names}) + '\\n'"
    path = script(f"import os, sys\nsys.stdout.write({said})\n")
    output = ended(rehearsal(run_id, path, "--procs", "2", "--launcher", "torchrun"))
    assert with_word(output, "env") == [
        f"[island{i}] env {i} 2 {rank} 2 127.0.0.1" for i in range(2) for rank in range(2)
    ], output


@pytest.mark.parametrize(
    "launcher", ["accelerate", "torchrun", pytest.param("deepspeed", marks=pytest.mark.slow)]
)
def test_rehearse_runs_a_module(run_id, tmp_path, monkeypatch, launcher: str) -> None:
    """`rehearse -- -m module` runs a module by each launcher."""
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
    output = ended(rehearsal(run_id, tmp_path, *words))
    ran = [f"[island{i}] ran pkg {i} ['--lr', '1']" for i in range(2)]
    assert with_word(output, "] ran") == ran, output


@ON_LINUX
def test_rehearse_status_78_ends_the_others(run_id: str, script) -> None:
    """An island that ends with 78 ends the others, and the rehearsal with 78."""
    act = (
        "signal.signal(signal.SIGTERM, lambda *_: leave(75))\nif island == '1' and rank == '1': "
        "time.sleep(1); leave(78)"
    )
    output = ended(rehearsal(run_id, script(WAIT.format(act=act)), "--procs", "2", *GRACE), 78)
    assert "[rehearse] island1 ended with status 78" in output
    assert "status 78 (island0 75, island1 78)" in output.splitlines()[-1]


@ON_LINUX
def test_rehearse_ctrl_c_ends_all_and_a_second_one_kills(run_id: str, script) -> None:
    """Ctrl-C ends all islands, and a second one kills them."""
    armed = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.stdout.write('told to "
        "end\\n'))\nprint('armed', flush=True)\ntime.sleep(60)"
    )
    process = rehearsal(run_id, script(WAIT.format(act=armed)), *TORCHRUN)
    lines_until(process, "] armed", 2)
    process.send_signal(signal.SIGINT)
    lines_until(process, "told to end", 2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    ended(process, 130, 30)


@ON_LINUX
@pytest.mark.slow
def test_rehearse_status_75_of_islands_that_save_and_leave(run_id: str, script) -> None:
    """Islands that save and leave make status 75."""
    path = script(WAIT.format(act="leave(75)"))
    output = ended(rehearsal(run_id, path, "--procs", "1", *GRACE), 75)
    assert "status 75 (island0 75, island1 75)" in output.splitlines()[-1]


@ON_LINUX
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rehearse", "launcher"])
def test_rehearse_leaves_nothing_when_a_parent_is_killed(victim, run_id, script) -> None:
    """No process is left when the rehearsal or a launcher is killed."""
    process = rehearsal(run_id, script(WAIT.format(act="")), "--procs", "2", *GRACE)
    lines_until(process, "] here", 4)
    if victim == "rehearse":
        process.kill()
        process.wait()
        wait_until(lambda: not processes_of(run_id), 20)
        return
    here = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(run_id)}
    launchers = [pid for pid, words in here.items() if b"fsdp_demo.launch" in words]
    os.kill(launchers[0], signal.SIGKILL)
    lines_until(process, "ended with status 137", 1)  # the other trains on
    process.send_signal(signal.SIGINT)
    ended(process, 137, 60)


@pytest.mark.parametrize(("words", "text"), [
    (f"--islands 0 --procs 1 -- {__file__}", "--islands 0: must be 1 or more"),
    (f"--islands 2 --procs -1 -- {__file__}", "--procs -1: must be 1 or more"),
    (f"--islands 2 --procs 1 --restarts -1 -- {__file__}", "--restarts -1: must be 0 or more"),
    ("--islands 2 --procs 1", "no script"),
    ("--islands 2 --procs 1 -- nowhere.py", "script 'nowhere.py': no such file"),
    ("--islands 2 --procs 1 -- -m", "-m : no such module"),
    ("--islands 2 --procs 1 -- -m nowhere.train", "-m nowhere.train: no such module"),
    (f"--islands 2 --procs 1 --link fast -- {__file__}", "link rate 'fast'"),
    (f"--islands 2 --procs 1 --rtt 40 -- {__file__}", "link round trip '40'"),
    (f"--islands 2 --procs 1 --run 'a b' -- {__file__}", "--run 'a b'"),
])  # fmt: skip
def test_rehearse_refuses_wrong_flags(words: str, text, capsys) -> None:
    """`rehearse` refuses wrong flags with a clear text."""
    assert cli.main(["rehearse", *shlex.split(words)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("count", "visible", "procs", "expected"), [
    (0, None, 2, ["", ""]), (4, None, 2, ["0,1", "2,3"]), (4, "4,5,6,7", 2, ["4,5", "6,7"]),
    (1, None, 1, ["0", "0"]), (1, None, 2, ["", ""]), (3, None, 2, ["0,1", "0,1"]),
])  # fmt: skip
def test_rehearse_splits_gpus_over_islands(count, visible, procs, expected, monkeypatch) -> None:
    """The visible GPUs are split over the islands, or shared where they do not suffice."""
    monkeypatch.setattr("fsdp_demo.launch.rehearsal.may_have_gpus", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices(Rehearsal(2, procs, (__file__,), "torchrun"))[0] == expected


def failed(*codes: int, after: int = 0) -> ChildFailedError:
    """Ranks that failed with these, the last one `after` seconds later."""
    failures = {rank: ProcessFailure(rank, 1, code, "none") for rank, code in enumerate(codes)}
    failures[len(codes) - 1].timestamp += after
    return ChildFailedError("script", failures)


def test_launch_status_of_failed_ranks(tmp_path: Path) -> None:
    """The status of an island is that of the rank that failed first; of ranks that failed together
    a kill or a status with a meaning counts.
    """
    status, here = torch_launcher.failed_status, str(tmp_path)
    assert status(failed(3), here, []) == 3
    assert status(failed(-9, -15), None, []) == 137
    assert status(failed(75, 1), here, []) == 75
    assert status(failed(1), here, []) == 1
    (tmp_path / "rank1").write_text("75\n")
    assert status(failed(1, 75), here, []) == 75, "rank 1 left first, rank 0 fell over it"
    told = failed(1, 75)
    told.failures[0].timestamp = int(time.time()) - 61
    ending = status(told, here, [time.time() - 60])
    assert ending == 1, "rank 1 saved because it was told to end"
    earlier = status(told, here, [time.time() - 90])
    assert earlier == 75, "ranks of an earlier start were told then"
    assert status(failed(3, 75), here, []) == 3
    assert status(failed(1, -9), None, []) == 137, "rank 0 fell over the one that was killed"
    late = status(failed(1, -9, after=30), None, [])
    assert late == 1, "killed by its launcher, because it did not end"
    assert status(failed(1, -15), None, []) == 1
    assert status(failed(1, 78), None, []) == status(failed(75, 78), None, []) == 78


def test_rehearse_splitter_keeps_lines_whole() -> None:
    """Lines of output arrive whole in whatever pieces they come."""
    data = "α one\r\n 10%\r 20%\r\rtwo\nrest".encode()
    expected = [
        ("α one", False), (" 10%", True), (" 20%", True), ("", True), ("two", False),
        ("rest", False),
    ]  # fmt: skip
    for size in (1, 2, 3, 5, len(data)):
        splitter = Splitter()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        lines = [line for piece in pieces for line in splitter.feed(piece)]
        assert lines + splitter.feed(b"", final=True) == expected


def test_rehearse_console_progress_bar() -> None:
    """A progress bar is a line now and then, of the first island alone."""
    file = io.StringIO()
    console = Console(file)
    for percent in range(100):
        console.show("island0", f"{percent}%", passing=True, first=True)
        console.show("island1", f"{percent}%", passing=True)
    console.show("island0", "100%")
    assert file.getvalue() == "[island0] 0%\n[island0] 100%\n"


def test_rehearse_console_writes_a_name_once() -> None:
    """A name that a line has already is not written twice."""
    file = io.StringIO()
    console = Console(file)
    for text in ("[island0] preset demo", "[island1] elsewhere", "plain"):
        console.show("island0", text)
    written = "[island0] preset demo\n[island0] [island1] elsewhere\n[island0] plain\n"
    assert file.getvalue() == written
