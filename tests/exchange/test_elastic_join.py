"""A run begins with fewer islands than there may be, and others join it: real processes over
ZeroMQ, and all end with the same bits.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.elastic import join_server
from fsdp_demo.elastic.notes import Ready, Sign
from fsdp_demo.peers import bulk_stream

from ..support.two_layers import step
from .test_survivors import Small, loss, optimizer_for

CASES = {"full": preset("full"), "diloco": preset("diloco", period=3, momentum_warmup=0)}
# most have switched, at step 5 of `must_match`'s 50, when the third comes
CASES["sel_sync"] = preset("sel_sync", check_every=2, window=2, delta=0.05, at_most=8)
CASES["switch"] = preset("sign_loco", period=3, switch=0.1, **{"schedule.delay": 1})

MORE = 12
"""Steps that all take together."""


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def grown(me: Any, case: str, late: int, full: tuple[int, ...], moment: str = "") -> Any:
    """Train until the islands `full` have come and `MORE` steps longer. The one that is late comes
    when the others have taken a few steps; with a `moment` island 0 dies as its donor.
    """
    begun, end = me.folder / "begun", me.folder / "end"
    if moment and me.island == 0:
        dies_as_a_donor(moment, me.folder / "died")
    if me.island == late:
        wait_for(begun)
    model = Small()
    optimizer = optimizer_for(case, model)
    exchange = fsdp_demo.attach(optimizer, CASES[case], model=model, must_match={"steps": 50})
    first, topology = exchange.step, exchange.topology
    slots = exchange.peers.slots
    while not end.exists() or exchange.step < int(end.read_text()):
        step(optimizer, loss(model, topology.island, exchange.step))
        if exchange.step == 4:
            begun.touch()
        if me.island == full[0] and not end.exists():
            time.sleep(0.02)
            if exchange.peers.slots == full:
                part = me.folder / f"part{os.getpid()}"
                part.write_text(str(exchange.step + MORE))
                part.rename(end)
    exchange.finish()
    values = [p.detach().clone() for p in model.parameters()]
    parts = topology.starters, topology.islands, topology.count
    told = exchange.step, values, parts, exchange.newcomer, exchange.timeline()
    return first, slots, exchange.digests_equal(), *told


def agree(found: list[Any]) -> None:
    assert all(f[2] for f in found) and len({f[3] for f in found}) == 1
    for f in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(f[4], found[0][4], strict=True))
    since = max(f[0] for f in found)
    steps = [[sent.step for sent in f[7] if sent.step >= since] for f in found]
    assert steps[0] and all(own == steps[0] for own in steps)


@pytest.mark.parametrize(
    ("case", "procs"), [("full", 1), ("diloco", 1), ("full", 2), ("switch", 1), ("sel_sync", 1)]
)
def test_elastic_third_island_joins(run_ranks, case: str, procs: int) -> None:
    """A run begins with two of three islands, and the third joins it."""

    def env(me: Any) -> dict[str, str]:
        return dict(ISLAND_MIN="2", ISLAND_TIMEOUT="40" if me.island == 1 else "5")

    found = run_ranks(grown, 3, procs, timeout=120, env=env, args=(case, 1, (0, 1, 2)))
    agree([found[i * procs] for i in range(3)])
    one, two, three = found[0], found[procs], found[2 * procs]
    assert one[1] == three[1] == (0, 2) and one[0] == three[0] == 0 and two[0] >= 4
    assert all(f[5] == ((0, 2), 3, 3) for f in found)


@pytest.mark.parametrize("early", [False, True])
def test_elastic_island_beyond_count_joins(run_ranks, early: bool) -> None:
    """An island beyond ISLAND_COUNT joins, while the others train or before they do (then it
    waits).
    """

    def env(me: Any) -> dict[str, str]:
        if early and me.island == 2:
            (me.folder / "begun").touch()
        return {"ISLAND_COUNT": "2", "ISLAND_SLOTS": "3"}

    found = run_ranks(grown, 3, 1, timeout=120, env=env, args=("full", 2, (0, 1, 2)))
    agree(found)
    assert found[0][1] == found[1][1] == (0, 1) and found[2][0] > 0
    assert all(f[5] == ((0, 1), 3, 2) for f in found)


def test_elastic_run_of_one_grows(run_ranks) -> None:
    """A run of one island grows when another one joins."""
    env = {"ISLAND_COUNT": "1", "ISLAND_SLOTS": "2"}
    found = run_ranks(grown, 2, 1, timeout=120, env=env, args=("full", 1, (0, 1)))
    agree(found)
    assert found[0][1] == (0,) and found[1][0] >= 4


def dies_as_a_donor(moment: str, died: Path) -> None:
    """This process hands half a snapshot over and is killed, or some steps or messages later, with
    all of its island: then `died` is there. It plans no join."""

    def end() -> None:
        wait_for(died)
        os._exit(9)

    threading.Thread(target=end, daemon=True).start()
    put, read, seen = bulk_stream.put, join_server.read_note, list[str]()

    def half(poller: Any, wire: Any, head: bulk_stream.ItemHead, parts: Any) -> None:
        seen.append(head.item)
        if moment == head.item == "snapshot":
            put(SimpleNamespace(lock=poller.lock, nudge=lambda wire: None), wire, head, parts)
            wire._queue.pop()  # its last part
            poller.nudge(wire)
        else:
            put(poller, wire, head, parts)
        if seen.count(moment) == (1 if moment == "snapshot" else 3):
            threading.Timer(0.3, died.touch).start()

    bulk_stream.put = half
    join_server.read_note = lambda note: Sign() if isinstance(read(note), Ready) else read(note)


@pytest.mark.parametrize(("case", "procs", "moment"), [
    ("full", 1, "snapshot"), ("full", 1, "tick"), ("diloco", 1, "snapshot"),
    ("diloco", 1, "message"), ("full", 2, "tick"),
])  # fmt: skip
def test_elastic_newcomer_changes_donor(run_ranks, case: str, procs: int, moment: str) -> None:
    """A newcomer whose donor dies takes another one, in the same process and without the first
    snapshot.
    """
    env = {"ISLAND_COUNT": "2", "ISLAND_SLOTS": "3"}
    more: dict[str, Any] = {"timeout": 120, "env": env, "check": False, "grace": 60.0}
    outcomes = run_ranks(grown, 3, procs, args=(case, 2, (1, 2), moment), **more)
    assert 9 in [o.status for o in outcomes[:procs]]
    logs = [o.log for o in outcomes]
    one, two = (outcomes[procs * i].value for i in (1, 2))
    assert one and two and "another island is asked for its state" in logs[2 * procs], logs
    agree([one, two])
    assert not one[6] and two[6] and two[0] >= 4
