"""The status of a script of one's own that ends by an error which nobody catches, line by line of
the table in docs/two-machines.md. The children of one process are the scripts: an import is dear.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PARENT = """
import gc, json, os, socket, sys
from pathlib import Path
import fsdp_demo.rendezvous.attempts, fsdp_demo.store.client, fsdp_demo.store.server
from fsdp_demo import Mismatch, PeerLost, Topology
from fsdp_demo.checkpoint.registry import CheckpointRegistry
from fsdp_demo.peers.votes import Ranks
from fsdp_demo.rendezvous.position import ShardPosition
from tests.support.durable import Durable

folder = Path(sys.argv[1])
stores = {"works": Durable(), "full": Durable(folder / "keys", room=40_000)}
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    nowhere = f"127.0.0.1:{probe.getsockname()[1]}"

def meet():
    Topology.from_env().join(ShardPosition())

def ends_by(error, **about):
    Topology.from_env()
    vars(error).update(about)
    raise error

def interactive():
    sys.ps1 = ">>> "
    ends_by(PeerLost("island 1"))

def one_of_two():
    topology = Topology.from_env()
    topology.prefix()
    if topology.island == 0:
        CheckpointRegistry(topology, Ranks(None, 0, 1)).meet({})

def finished():
    topology = Topology.from_env()
    store = topology.open_store()
    store.set(f"{topology.run}/attempt", "0")
    store.set(f"{topology.run}/0/finished", "1")
    meet()

def full():
    store = Topology.from_env().open_store()
    while True:
        store.set("large", "x" * 50_000)

CASES = {
    "lost": ("works", lambda: ends_by(PeerLost("island 1"))),
    "unsaved": ("works", lambda: ends_by(PeerLost("island 1"), unsaved=True)),
    "a bug": ("works", lambda: ends_by(RuntimeError("a bug"))),
    "unlike": ("works", lambda: ends_by(Mismatch("other steps"))),
    "interactive": ("works", interactive),
    "no store": (None, meet),
    "nobody came": ("works", meet),
    "no checkpoints": ("works", one_of_two),
    "full": ("full", full),
    "finished": ("works", finished),
}

def start(name, island=0):
    store, script = CASES[name]
    if child := os.fork():
        return child
    log = os.open(folder / f"{name}.{island}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ |= {
        "ISLAND_ENDPOINT": stores[store].endpoint if store else nowhere,
        "ISLAND_RUN": name.replace(" ", "-"),
        "ISLAND_RANK": str(island),
        "ISLAND_STATUS": str(folder / "told" / name),
    }
    script()
    sys.exit()

gc.freeze()  # what is here is not looked at anew at the end of each child
first = start("no checkpoints", island=1)
children = {name: start(name) for name in CASES}
ends = {name: os.waitpid(child, 0)[1] for name, child in children.items()}
os.waitpid(first, 0)
print(json.dumps({name: os.waitstatus_to_exitcode(end) for name, end in ends.items()}))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """By case: status, what it said, and what its launcher was told."""
    folder = tmp_path_factory.mktemp("statuses")
    env = {k: v for k, v in os.environ.items() if not k.startswith("ISLAND_")}
    env |= {"PYTHONPATH": str(ROOT), "ISLAND_COUNT": "2", "ISLAND_TIMEOUT": "2", "RANK": "0"}
    words, how = [sys.executable, "-c", PARENT, str(folder)], {"capture_output": True, "text": True}
    done = subprocess.run(words, env=env, timeout=60, **how)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    def told(name: str) -> str:
        return "".join(file.read_text() for file in (folder / "told" / name).glob("rank0"))

    return {
        name: (status, (folder / f"{name}.0").read_text(), told(name))
        for name, status in found.items()
    }


@pytest.mark.parametrize(("case", "text"), [
    ("lost", "PeerLost: island 1"),
    ("no store", "no store answers at ISLAND_ENDPOINT"),
    ("nobody came", "missing 1"),
    ("no checkpoints", "waited 2 s for 2 islands at"),
    ("full", "cannot write its file"),
])  # fmt: skip
def test_status_75_for_what_others_or_the_store_caused(ended, case: str, text: str) -> None:
    """An uncaught error that other islands or the store caused ends a script with 75."""
    status, said, told = ended[case]
    assert (status, told) == (75, "75") and text in said, said
    assert said.count("Traceback") == 1 and "sys.excepthook" not in said


def test_status_78_for_a_run_that_has_finished(ended) -> None:
    """A run that has finished and is started again under its name ends with 78 and one line."""
    status, said, told = ended["finished"]
    assert (status, told) == (78, "78") and "Traceback" not in said, said
    (line,) = [line for line in said.splitlines() if line]
    assert "has finished (island 1 said so): set a new ISLAND_RUN on all islands" in line


@pytest.mark.parametrize("case", ["unsaved", "a bug", "unlike", "interactive"])
def test_status_1_for_any_other_error(ended, case: str) -> None:
    """Any other uncaught error ends a script with 1."""
    status, said, told = ended[case]
    assert (status, told) == (1, "") and said.count("Traceback") == 1, said
