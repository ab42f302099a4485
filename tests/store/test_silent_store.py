"""A store that is frozen, or not there: an error with a cure at the start, a warning later, and
never a hang.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdp_demo
from fsdp_demo import Topology
from fsdp_demo.checkpoint.registry import CheckpointRegistry
from fsdp_demo.errors import StoreSilent
from fsdp_demo.peers.votes import Ranks
from fsdp_demo.rendezvous import attempts, position
from fsdp_demo.rendezvous.position import ShardPosition
from fsdp_demo.rendezvous.stop_notices import Presence
from fsdp_demo.store.client import StoreClient

from ..support import stores
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.refused import refusal

runs = itertools.count()


@pytest.fixture(scope="module")
def process(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A store in a process of its own, and its endpoint."""
    file = tmp_path_factory.mktemp("store") / "port"
    words = ["store", "--bind", "127.0.0.1:0", "--file", str(file.with_name("keys")), "--quiet"]
    started = subprocess.Popen(
        [sys.executable, "-m", "fsdp_demo.cli", *words, "--port-file", str(file)]
    )
    try:
        while not file.exists():
            assert started.poll() is None
            time.sleep(0.05)
        yield started, f"127.0.0.1:{file.read_text().strip()}"
    finally:
        started.kill()
        started.wait()


@pytest.fixture
def env(process: tuple[subprocess.Popen[bytes], str]) -> Iterator[dict[str, str]]:
    """Variables that lead to it, and its server's process id in STORE. The server goes on when the
    test ends.
    """
    started, endpoint = process
    where = {"ISLAND_ENDPOINT": endpoint, "ISLAND_TIMEOUT": "1.5"}
    server = stores.server_of(started.pid)
    yield {**where, "ISLAND_RUN": f"silent-{next(runs)}", "STORE": str(server)}
    os.kill(server, signal.SIGCONT)


def freeze() -> None:
    """Stop the store, and wait until it stands still."""
    stores.freeze(int(os.environ["STORE"]))
    time.sleep(0.1)


@in_ranks(1, 1, env={"ISLAND_COUNT": "2", "ISLAND_TIMEOUT": "0.5"})
def test_store_frozen_at_the_start_is_an_error(env) -> None:
    """A frozen store is an error with a cure at the start of a run."""
    freeze()
    start = f"after 0.5 s: start there `fsdp-demo store --bind {env['ISLAND_ENDPOINT']}`"
    says = start, "hangs, or another program listens there)"
    for call in (
        lambda t: t.open_store(),
        lambda t: t.prefix(),
        lambda t: t.join(ShardPosition()),
        lambda t: CheckpointRegistry(t, Ranks(None, 0, 1)).meet({}),
    ):
        refusal(lambda: call(Topology.from_env()), *says, kind=StoreSilent)  # noqa: B023


@in_ranks(1, 1, env={"ISLAND_COUNT": "2"})
def test_store_frozen_while_islands_meet_is_an_error(env) -> None:
    """A store that freezes while islands meet is an error with a cure."""
    topology = Topology.from_env()
    topology.prefix()
    threading.Timer(0.4, freeze).start()
    says = "does not answer within 1.5 s: see whether the store still runs"
    again = "start all islands again"
    refusal(lambda: topology.join(ShardPosition()), says, again, kind=StoreSilent)


@in_ranks(2, 1, env={"ISLAND_TIMEOUT": "8"})
def test_store_frozen_training_goes_on(me, env) -> None:
    """Training goes on while the store is frozen: steps and finish() need it no more, words to the
    others wait only so long, and it is said once.
    """
    position.ANSWER = attempts.PATIENCE = 1.5
    lines, p = heard(), torch.nn.Parameter(torch.full((3,), float(me.island)))
    optimizer = torch.optim.SGD([p], lr=0.1)
    exchange = fsdp_demo.attach(optimizer, "full")
    registry = CheckpointRegistry(exchange.topology, Ranks(None, 0, 1))
    registry.meet({"held": [1]})
    presence = Presence(exchange.topology)
    presence.start()
    # its thread is connected
    assert attempts.join(exchange.topology).ask(lambda at: None, 20.0)
    for island in range(2):
        exchange.digests_equal()  # both are here
        if me.island == island == 0:
            freeze()
    presence.end("left")
    with pytest.raises(StoreSilent):
        registry.meet({"held": [2]})
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
    exchange.finish()
    said = [line for line in lines if "does not answer" in line or "no store answers" in line]
    assert exchange.step == 3 and len(said) == 1


EXIT = """
import os, signal, time
from fsdp_demo import Topology
from fsdp_demo.rendezvous.stop_notices import Presence
from fsdp_demo.store.client import StoreClient
for run in "ab":
    Presence(Topology.from_env({**os.environ, "ISLAND_RUN": run})).start()
presence = Presence(Topology.from_env())
presence.start()
os.kill(int(os.environ["STORE"]), signal.SIGSTOP)
time.sleep(0.5)
presence.end("left")
print("the end")
"""


def script(path: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("ISLAND_") and k != "TORCH_CPP_LOG_LEVEL"
    }
    clean |= {"ISLAND_COUNT": "2", "ISLAND_RANK": "0", "ISLAND_TIMEOUT": "1"}
    clean["PYTHONPATH"] = str(Path(__file__).parents[2])
    words, how = [sys.executable, str(path)], dict(capture_output=True, text=True, timeout=120)
    return subprocess.run(words, env={**clean, **env}, **how)


def test_store_frozen_process_ends(tmp_path: Path, env) -> None:
    """A process ends though its store is frozen."""
    done = script(tmp_path / "exit.py", EXIT, **env)
    assert done.returncode == 0 and "the end" in done.stdout, done.stderr
    assert "terminate called" not in done.stderr and "Fatal Python error" not in done.stderr


def test_store_absent_is_said_in_one_line(tmp_path: Path) -> None:
    """An absent store ends a process with 75 and one line of an error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        done = script(
            tmp_path / "none.py",
            "from fsdp_demo import Topology\nTopology.from_env().prefix()\n",
            ISLAND_ENDPOINT=endpoint,
        )
    assert done.returncode == 75
    assert f"no store answers at ISLAND_ENDPOINT={endpoint} after 1 s" in done.stderr
    assert "frame #" not in done.stderr and "Exception raised from" not in done.stderr
    assert done.stderr.count("Traceback") == 1


FILLED = """
from fsdp_demo.store.server import StoreServer, bound_memory
served = StoreServer("127.0.0.1:0", ":memory:", room=1 << 40)
print(bound_memory(64 << 20), served.port, flush=True)
served.serve_while(lambda: True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.slow
def test_store_filled_stays_within_its_memory() -> None:
    """A store that somebody fills takes no more than its bound of memory."""
    with subprocess.Popen([sys.executable, "-c", FILLED], stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            limit, port = map(int, one.stdout.readline().split())
            client = StoreClient(f"127.0.0.1:{port}", deadline=5.0)
            client.set("first", "kept")
            with pytest.raises(StoreSilent):
                for n in range(128):
                    client.set(f"value{n}", "x" * (1 << 20))
            status = Path(f"/proc/{one.pid}/status").read_text().splitlines()
            held = [int(line.split()[1]) for line in status if line.startswith("VmData")]
            assert not held or 1024 * held[0] <= limit
        finally:
            one.kill()
