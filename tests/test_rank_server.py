"""The rank server and the markers: one thread at a fork, patches and stores that reach the ranks,
and who may start a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fsdp_demo.store.client import StoreClient

from .support import guard, kinds, ranks, stores, threads
from .support.inside import in_a_process, in_ranks

LIMIT = 1  # patched below


def test_rank_server_fork_names_a_second_thread():
    """A fork with a second thread is an error that names it."""
    ready = threading.Event()
    thread = threading.Thread(target=ready.wait, name="second", daemon=True)
    thread.start()
    try:
        assert len(threads.names()) >= 2
        with pytest.raises(
            AssertionError, match=r"the test forks with \d+ threads, besides its own: "
        ):
            threads.assert_one("the test")
        guard.alone(None)
        with pytest.raises(AssertionError, match="this process forks with"):
            os.fork()
    finally:
        ready.set()
        thread.join()


def test_rank_server_has_one_thread_with_datasets(run_ranks):
    """The server has one thread though it has imported datasets."""

    def loaded(me):
        import datasets  # noqa: F401

        return os.getppid(), "datasets" in sys.modules

    pytest.importorskip("datasets")
    first = run_ranks(loaded, 1, 1)
    assert run_ranks(lambda: len(threads.names()), 1, 1) == [1]
    assert first[0][0] != os.getpid() and first[0][1]


def test_rank_server_passes_patches_and_environment(run_ranks, everywhere, monkeypatch, tmp_path):
    """Patches, environment and folder reach the ranks."""
    everywhere.setattr(sys.modules[__name__], "LIMIT", 2)
    everywhere.setattr("fsdp_demo.rendezvous.starting", "BEAT", 0.25)
    monkeypatch.setenv("SOME_WORD", "here")
    monkeypatch.chdir(tmp_path)

    def seen():
        from fsdp_demo.rendezvous import starting

        return LIMIT, starting.BEAT, os.environ["SOME_WORD"], os.getcwd()

    assert run_ranks(seen, 1, 2) == [(2, 0.25, "here", str(tmp_path))] * 2 and LIMIT == 2


def test_rank_server_passes_nested_functions(run_ranks):
    """Nested functions and classes travel to the ranks."""

    class Local:
        def __init__(self, n):
            self.n = n

    def twice(n):
        return Local(n).n * 2 if n < 3 else twice(n - 1)

    assert run_ranks(lambda me: twice(me.rank + 2), 2, 1) == [4, 4]
    with pytest.raises(TypeError, match="does not travel to them .* holds no fixture of pytest"):
        rows = (n for n in range(3))
        run_ranks(lambda: next(rows), 1, 1)


def test_rank_server_run_id_keeps_its_store(run_ranks):
    """A run id keeps its store for the next call; the drawn ones meet in another."""

    def count():
        store = StoreClient(os.environ["ISLAND_ENDPOINT"]).under(os.environ["ISLAND_RUN"])
        store.set("calls", store.get("calls") + "x")
        return len(store.get("calls")), os.environ["ISLAND_ENDPOINT"]

    env = {"ISLAND_RUN": "the same"}
    found = [run_ranks(count, 1, 1, env=e)[0] for e in (env, None, env, None)]
    assert [calls for calls, _ in found] == [1, 1, 2, 1]
    assert found[0][1] == found[2][1] != found[1][1]


@in_a_process
def test_rank_server_shared_store_made_anew_where_it_died():
    """The store that calls share is made anew where its process died."""
    made = stores.Stores(close=[])
    found = [made.endpoint(stores.SHARED) for _ in range(2)]
    pid, _ = made._held[stores.SHARED]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    found.append(made.endpoint(stores.SHARED))
    made.end_all()
    assert found[0] == found[1] != found[2]


def test_rank_server_death_is_named_and_replaced(run_ranks, rank_server):
    """A server that died is named and replaced."""
    with pytest.raises(RuntimeError, match="the rank server died"):
        run_ranks(lambda: os.kill(os.getppid(), signal.SIGKILL), 1, 1)
    assert run_ranks(lambda me: me.rank, 2, 1) == [0, 1]


@in_ranks(1, 2)
def test_rank_server_leaves_no_mesh_of_its_own(me):
    """What torch makes of a shard knows this rank's place, whatever the server did before."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    fully_shard(model, mesh=me.mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    for p in model.parameters():
        for made in (p, p.detach(), optimizer.state[p]["exp_avg"]):
            assert made.device_mesh.get_coordinate() == (me.proc,)


SESSION = """
import sys
from pathlib import Path
from tests.support.client import RankServer
from tests.support.ranks import Call, Job, Rank, pack

folder = Path(sys.argv[1])

def forever(me):
    import os, time

    (me.folder / "rank").write_text(str(os.getpid()))
    time.sleep(600)

server = RankServer(Path.cwd(), folder / "log")
job = pack(Job(forever, (), None, [], None))
server.run(Call([Rank(0, 0, 1, 1, 0, folder)], job, {"ISLAND_COUNT": "1"}, "store", 500, 5))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into /proc")
def test_rank_server_ranks_die_with_the_test_process(tmp_path):
    """Ranks die with the test process."""
    process = subprocess.Popen([sys.executable, "-c", SESSION, str(tmp_path)], cwd=kinds.ROOT)
    while not (tmp_path / "rank").exists() or not (tmp_path / "rank").read_text():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    rank = int((tmp_path / "rank").read_text())
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while _lives(rank):
        assert time.monotonic() < end
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- markers -------------------------------------------------------------------------------------


def _starts_by_a_helper():
    return Helper().go()


class Helper:
    def go(self):
        return subprocess.run(["true"])


def test_markers_launch_is_found_through_helpers():
    """A test that starts a process is found through its helpers."""
    assert kinds._launches(_starts_by_a_helper)
    assert not kinds._launches(test_rank_server_passes_nested_functions)


def test_markers_process_without_marker_is_an_error():
    """A process of a test without a marker is an error."""
    guard.alone("some test")
    try:
        with pytest.raises(
            pytest.fail.Exception, match="some test starts a process .* but has no marker"
        ):
            getattr(sys.modules["subprocess"], "ru" + "n")(["true"])
    finally:
        guard.alone(None)


def test_rank_server_passes_modules_by_name():
    """Modules travel by name."""
    job = ranks.unpack(ranks.pack(ranks.Job(_starts_by_a_helper, (kinds,), None, [], None)))
    assert job.args == (kinds,) and job.fn is _starts_by_a_helper
