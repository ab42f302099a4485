"""One run id for several starts: who opens an attempt, who joins it, who is refused; and what
islands say of themselves in the store.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_demo
from fsdp_demo import PeerLost, Topology
from fsdp_demo.errors import StoreSilent
from fsdp_demo.exchange import sending
from fsdp_demo.rendezvous import attempts, starting, stop_notices
from fsdp_demo.rendezvous.announcement import Rendezvous
from fsdp_demo.rendezvous.position import ShardPosition
from fsdp_demo.rendezvous.stop_notices import Presence
from fsdp_demo.store.client import StoreClient, WorldStore
from fsdp_demo.store.server import StoreServer

from ..support import threaded
from ..support.heard import heard
from ..support.inside import in_a_process, in_ranks
from ..support.refused import refusal
from ..support.stores import InThread

runs = itertools.count()


@pytest.fixture(autouse=True)
def quick(everywhere: Any) -> None:
    everywhere.setattr(starting, "BEAT", 0.2)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """One run for several calls of `run_ranks`, over the durable store."""
    name = {"ISLAND_RUN": f"attempts-{os.getpid()}-{next(runs)}"}
    served = InThread(StoreServer("127.0.0.1:0", tmp_path / "keys"))
    yield {**name, "ISLAND_ENDPOINT": served.endpoint}
    served.end()


def attach() -> fsdp_demo.Exchange:
    return fsdp_demo.attach(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1), "full")


def step(exchange: fsdp_demo.Exchange) -> None:
    for p in (q for group in exchange.optimizers[0].param_groups for q in group["params"]):
        p.grad = torch.ones_like(p)
    exchange.optimizers[0].step()


def trained() -> tuple[str, bool | None]:
    """A whole life; its attempt, and whether the islands are equal."""
    exchange = attach()
    step(exchange)
    exchange.finish()
    return exchange.topology.prefix(), exchange.digests_equal()


def of_run() -> StoreClient:
    """What this run has in the store."""
    return Topology.from_env().open_store().under(os.environ["ISLAND_RUN"])


def until_told(exchange: fsdp_demo.Exchange | None = None) -> None:
    """Wait for the word of another island, and train meanwhile."""
    store = of_run()
    while not store.get("told"):
        if exchange is not None:
            step(exchange)
        time.sleep(0.05)


# ---- attempts ----------------------------------------------------------------------------------


def test_attempt_refuses_a_multiprocessing_worker(tmp_path: Path) -> None:
    """A DataLoader worker by spawn or forkserver, of a script without a main guard, ends with an
    error that says so.
    """
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "if __name__ == '__main__':  # the others find the rest without a guard\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    worker.start()\n"
        "    worker.join()\n"
        "    sys.exit(worker.exitcode)\n"
        "import fsdp_demo\n"
        "fsdp_demo.Topology.from_env().prefix()\n"
    )
    place = {"ISLAND_COUNT": "2", "ISLAND_RANK": "0", "ISLAND_ENDPOINT": "127.0.0.1:9"}
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "this process was started by multiprocessing" in ended.stderr
    assert 'if __name__ == "__main__":' in ended.stderr


def joins(me: Any) -> str:
    return Topology.from_env().prefix().partition("/")[2]


def test_attempt_next_opens_after_a_death(run_ranks, env) -> None:
    """A start after a death opens the next attempt. Island 1 dies, island 0 misses it; then both
    are started again, as a supervisor does it, under the same run id. Twice.
    """

    def life(me: Any) -> str:
        exchange = attach()
        step(exchange)
        if me.island == 1:
            os._exit(9)  # as by SIGKILL: it says nothing
        if exchange.topology.elastic:
            step(exchange)  # alone
        else:
            with pytest.raises(PeerLost):
                step(exchange)
        Presence(exchange.topology).end("left")
        return exchange.topology.prefix()

    for number in range(2):
        outcomes = run_ranks(life, 2, 1, env=env, check=False)
        assert outcomes[0].value == f"{env['ISLAND_RUN']}/{number}", outcomes[0].error
        assert outcomes[1].status == 9

    assert run_ranks(trained, 2, 1, env=env) == [(f"{env['ISLAND_RUN']}/2", True)] * 2


@pytest.mark.parametrize("at_once", [True, False])
@in_ranks(2, 1, timeout=180)
def test_attempt_refuses_a_return_into_one_of_two_exchanges(me, env, at_once: bool) -> None:
    """An island that comes back does not join one of two exchanges: nothing tells which it means,
    as they may be alike.
    """
    again = (
        "from fsdp_demo.rendezvous import starting;"
        "from tests.rendezvous.test_run_attempts import attach;"
        f"starting.BEAT = {starting.BEAT}; attach(); print('joined')"
    )

    first = attach()
    step(first)
    if not at_once:
        first.finish()
    second = attach()
    step(second)
    if me.island == 0:
        return until_told()
    for exchange in (first, second):  # nobody answers here any more, as after a death
        exchange.detach()
    told = subprocess.run(
        [sys.executable, "-c", again], capture_output=True, text=True, timeout=150
    )
    of_run().set("told", "yes")
    assert (told.returncode, told.stdout) == (1, ""), told.stderr
    assert "its processes begin 2 exchanges" in told.stderr
    assert "#several-exchanges" in told.stderr


@in_ranks(2, 1)
def test_attempt_goes_on_where_an_island_is_cut_off(me, env) -> None:
    """An island that is started again while its links are cut, but not its way to the store, hears
    there that the others train: it does not end their attempt, and joins it.
    """
    if me.island == 1:
        assert threading.active_count() == 1  # a fork has no other threads
        if os.fork() == 0:  # its first life
            step(attach())
            os._exit(9)
        assert os.wait()[1] == 9 << 8
        attempts.ask_join_server = lambda *_: None  # nobody is reached
    exchange = attach()
    step(exchange)
    if me.island == 0:
        return until_told(exchange)
    of_run().set("told", "yes")
    assert exchange.newcomer and exchange.topology.prefix() == f"{env['ISLAND_RUN']}/0"


@in_ranks(3, 1, env={"ISLAND_SLOTS": "3", "ISLAND_COUNT": "2"})
def test_attempt_newcomer_has_one_exchange(me, env) -> None:
    """An island that joins a run under way may begin one exchange only."""
    while me.island == 2 and not of_run().get("0/begun"):
        time.sleep(0.05)
    exchange = attach()
    if me.island < 2:
        return until_told(exchange)
    refusal(attach, "its processes begin 2 exchanges")
    of_run().set("told", "yes")


def test_attempt_returning_island_does_not_join_its_old_one(run_ranks, env) -> None:
    """Island 0 is killed and restarted at once, while island 1 has not noticed: its old attempt is
    over. Island 1 comes back later.
    """

    def fn(me: Any) -> list[str]:
        store = Topology.from_env().open_store().under("test-" + env["ISLAND_RUN"])
        if me.island == 1:
            first = joins(me)
            store.set("here", "yes")
            store.get("joined")
            return [first]
        store.get("here")
        reader, writer = os.pipe()
        if os.fork() == 0:  # its first life
            os.write(writer, joins(me).encode())
            os._exit(9)
        first = os.read(reader, 9).decode()
        os.wait()
        again = joins(me)
        store.set("joined", "yes")
        return [first, again]

    assert run_ranks(fn, 2, 1, env=env) == [["0", "1"], ["0"]]
    assert run_ranks(joins, 1, 1, env={**env, "ISLAND_COUNT": "2", "ISLAND_RANK": "1"}) == ["1"]


def test_attempt_is_the_same_on_all_ranks(run_ranks, env) -> None:
    """All ranks of an island take part in one attempt."""

    def life(me: Any) -> str:
        torch.distributed.barrier()
        time.sleep(0.3 * (me.proc == 0))  # the others ask before rank 0 knows
        exchange = attach()
        step(exchange)
        return exchange.topology.prefix()

    for number in range(2):  # a life that nobody ends by a word is over when its processes are
        assert run_ranks(life, 2, 2, env=env) == [f"{env['ISLAND_RUN']}/{number}"] * 4


def test_attempt_refusal_reaches_all_ranks(run_ranks, env) -> None:
    """What rank 0 is refused all ranks of its island are."""

    def finish(me: Any) -> None:
        Presence(Topology.from_env()).end("finished")

    run_ranks(finish, 1, 1, env={**env, "ISLAND_COUNT": "2"})
    started = f"ISLAND_RUN={env['ISLAND_RUN']!r} was already started"
    told = started, "has finished", "set a new ISLAND_RUN on all islands"
    run_ranks(lambda: refusal(attach, *told), 2, 2, env=env)


def test_attempt_refuses_a_second_process_of_a_rank(run_ranks, env) -> None:
    """A second process with the same ISLAND_RANK is refused, and told where the first one runs."""

    def twin(me: Any) -> str:
        time.sleep(0.3 * me.island)
        try:
            Topology.from_env().prefix()
        except ValueError as error:
            of_run().set("told", "yes")
            return str(error)
        until_told()
        return "in"

    first, second = run_ranks(twin, 2, 1, env={**env, "ISLAND_RANK": "0"})
    assert "in" in (first, second)
    text = first if second == "in" else second
    assert (
        f"which still runs (island0 on {socket.gethostname()}): set a different ISLAND_RANK on "
        "each, or a new ISLAND_RUN on all islands"
    ) in text


@in_ranks(2, 1)
def test_attempt_holds_several_exchanges_in_turn(env) -> None:
    """One process has one attempt, in which a finished exchange may be followed by another."""
    for k in range(2):
        exchange = attach()
        step(exchange)
        exchange.finish()
        Presence(exchange.topology).end("finished")
        assert exchange.topology.meeting() == f"{env['ISLAND_RUN']}/0/{k}"


@in_ranks(2, 1)
def test_attempt_that_ends_tells_who_waits(me, env) -> None:
    """An island that waits in an attempt that ends gets an error that says so."""
    topology = Topology.from_env()
    if me.island == 1:
        time.sleep(0.5)
        return Presence(topology).end("left")
    told = "island0 waited for islands 1", "island 1 left", "start this island again"
    refusal(lambda: topology.join(ShardPosition()), *told, kind=PeerLost)


# ---- presence ----------------------------------------------------------------------------------


def test_presence_without_islands_has_no_thread() -> None:
    """Presence starts no thread where there are no islands."""
    before = threading.active_count()
    presence = Presence(Topology.from_env({"ISLAND_COUNT": "1"}))
    presence.start()
    presence.end("left")
    presence.close()
    assert threading.active_count() == before


# ---- what others write, and what is left behind ------------------------------------------------


@pytest.mark.parametrize(("note", "says"), [
    ("{", "Expecting property name"),
    ("[" * 60_000, "recursion"),
    ('{"name": "island1"}', "missing required field `host`"),
    (json.dumps({"name": "x", "host": "y", "shards": "1", "copies": 1}),
        "Expected `int`, got `str` - at `$.shards`"),
])  # fmt: skip
@in_ranks(1, 1, env={"ISLAND_COUNT": "2"})
def test_rendezvous_names_an_unreadable_note(env, note: str, says: str) -> None:
    """A note of another island that cannot be read is named by the error."""
    topology = Topology.from_env()
    key = f"{topology.prefix()}/0/join/1"
    topology.open_store().set(key, note)
    told = f"note {key}", ", which only the islands should reach, cannot be read", "of island 1"
    refusal(lambda: topology.join(ShardPosition()), *told, says)


def test_rendezvous_last_look_counts() -> None:
    """An island that comes at the last moment is not missed: the last look is as good as all before
    it, however late it ends.
    """
    topology = Topology("islands", 0, 2, endpoint="x:1", timeout=0.05)
    rendezvous = Rendezvous(topology, ShardPosition(), None)
    rendezvous._starters = (0, 1)
    fields = {"name": "n", "host": "h", "shards": 1, "copies": 1}

    class Slow(WorldStore):
        def get_all(self, keys: Sequence[str]) -> list[str]:
            time.sleep(0.1)
            return [json.dumps(fields) for _ in keys]

    assert rendezvous._gather(Slow(None, "x:1", 5.0)) == {0: fields, 1: fields}


def test_rendezvous_says_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the missing islands while a rank waits for them, not only at the deadline."""
    monkeypatch.setattr(starting, "NOTICE", 0.1)
    topology = Topology("islands", 0, 3, endpoint="x:1", run="r", timeout=0.4)
    rendezvous = Rendezvous(topology, ShardPosition(), None)
    rendezvous._starters = (0, 1, 2)
    store = WorldStore(dist.HashStore(), "x:1", 5.0)
    rendezvous.prefix = "0"
    rendezvous._announce(store.under(""))
    with pytest.raises(PeerLost, match=r"came 0 \(.+ on .+\); missing 1, 2"):
        rendezvous._gather(store)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == "waiting for islands 1, 2 of run 'r' at x:1, for 0 s more (ISLAND_TIMEOUT)"


@in_a_process
def test_connect_failure_leaves_no_thread() -> None:
    """A failure while connecting leaves no thread."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no control group")

    sending.IslandGroup = broken
    results = threaded.islands(
        lambda i, topology: sending.ExchangeConnections(
            topology, ShardPosition(), torch.device("cpu"), lambda: False
        )
    )
    assert [str(r) for r in results] == ["no control group"] * 2
    assert not [t for t in threading.enumerate() if t.name == "exchange"]


@in_ranks(1, 1, env={"ISLAND_COUNT": "2"})
def test_attempt_silent_store_is_said_once(env) -> None:
    """A store that stops answering is said once: the thread of the attempt tries again, and a job
    waits no longer than it may. Training goes on only where the islands have met.
    """
    lines, topology = heard(), Topology.from_env()
    Presence(topology).start()
    pulse = attempts.join(topology)
    assert pulse.ask(lambda at: None, 5.0)

    def silent(at: Any) -> None:
        raise StoreSilent("the store at X does not answer")

    assert [pulse.ask(silent, 5.0), pulse.ask(silent, 5.0)] == [False, False]
    assert pulse.ask(lambda at: None, 5.0) and not pulse.silent
    pulse.quiet()  # as when the islands have met
    assert not pulse.ask(silent, 5.0)
    before, after = (line for line in lines if "does not answer" in line)
    assert "does not answer; this island has not met the others: it waits" in before
    assert "does not answer; training goes on" in after


# ---- islands that come and go, and attempts ----------------------------------------------------


def test_attempt_restart_after_the_end_is_not_needed(run_ranks, env) -> None:
    """An island that was killed near the end of the run is started again by its supervisor when the
    others have finished: it is not needed. Without a supervisor it is an error.
    """

    run_ranks(trained, 2, 1, env=env)
    lives = lambda me: {**env, "ISLAND_ATTEMPT": str(me.island)}  # noqa: E731
    found = run_ranks(lambda me: attach() and None, 2, 2, env=lives, check=False)
    back = "has finished while island{} was away: it is not needed any more"
    assert [back.format(i // 2) in o.log for i, o in enumerate(found)] == [False] * 2 + [True] * 2
    texts = [o.log + (o.error or "") for o in found]
    for words in ("has finished (island", "set a new ISLAND_RUN"):
        assert [words in text for text in texts] == [True, True, False, False]
    assert [o.status for o in found[2:]] == [0, 0] and 0 not in [o.status for o in found[:2]]


@in_ranks(2, 1, env={"ISLAND_ATTEMPT": "1", "ISLAND_TIMEOUT": "2"})
def test_rendezvous_names_missing_islands_after_a_restart(me, env) -> None:
    """An island that was started again and cannot meet the others hears who is missing. Uncaught it
    ends the process with 75: tests/launch/test_statuses.py.
    """
    if me.island == 1:
        refusal(attach, "missing 0", kind=PeerLost)


def test_attempt_survivor_watches_the_store(run_ranks, env, everywhere) -> None:
    """An island that is left alone looks into the store. An older copy, which lacks the newest
    record of the members (who was lost would be a member still, there), is said once, and training
    goes on. An attempt that islands have ended that could not reach it ends it, too.
    """
    everywhere.setattr(stop_notices, "ASK", 0.1)
    older = f"the store at {env['ISLAND_ENDPOINT']} lacks record 1 of this run's members"

    def fn(me: Any) -> None:
        exchange = attach()
        step(exchange)
        if me.island == 1:
            os._exit(9)
        step(exchange)
        topology = exchange.topology
        store = topology.open_store()
        store.under(topology.meeting()).set("record/1", "")
        while older not in me.log.read_text():
            step(exchange)
            time.sleep(0.05)
        for _ in range(10):  # it would be said again by now
            step(exchange)
            time.sleep(0.1)
        store.under(topology.prefix()).set("ended", "1")
        time.sleep(20)

    found = run_ranks(fn, 2, 1, env=env, check=False, grace=15)[0]
    assert found.status == 75 and found.log.count(older) == 1, found.log
    assert "island 1 found none of this attempt's islands, and has begun another one" in found.log
