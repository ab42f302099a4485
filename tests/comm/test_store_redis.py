"""A redis as the store. Needs the module `redis` and the program `redis-server`, but for the first
tests.
"""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.comm.presence import Presence
from fsdp_demo.comm.store_client import connect
from fsdp_demo.errors import StoreSilent
from fsdp_demo.launch.processes import reserve_port

from .test_durable_store import conversation

PASSWORD = "a-password"


def test_without_the_module_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "fsdp_demo.comm.store_redis", raising=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ValueError, match='pip install "redis>=5"'),
    ):
        connect(f"redis://127.0.0.1:{server.getsockname()[1]}", 5.0, 5.0, 5.0)


def test_without_a_redis_it_says_what_to_start() -> None:
    with pytest.raises(
        StoreSilent,
        match="no store answers at ISLAND_ENDPOINT=redis://127.0.0.1:1/2 after 0.3 s: start "
        "redis there",
    ):
        connect("redis://127.0.0.1:1/2", 0.3, 5.0, 5.0, "secret")


class Redis:
    """A redis in a process of its own, with a file."""

    def __init__(self, folder: Path):
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("no redis-server here (apt install redis-server)")
        self.port = reserve_port()
        self._words = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(folder),
            "--requirepass",
            PASSWORD,
        ]
        self._words += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self, deadline: float = 10.0, number: int = 0, password: str = PASSWORD) -> Any:
        from fsdp_demo.comm.store_redis import RedisStore

        return RedisStore(f"redis://127.0.0.1:{self.port}/{number}", password, deadline)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Redis]:
    pytest.importorskip("redis")
    server = Redis(tmp_path)
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.kill()


def test_it_answers_as_the_durable_store_does(server: Redis, tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    from fsdp_demo.comm.store_zeromq import ZeroMQStore
    from fsdp_demo.launch.durable_store import DurableStore, InThread

    served = InThread(DurableStore("zmq://127.0.0.1:0", tmp_path / "keys"))
    expected = conversation(ZeroMQStore(served.endpoint))
    served.end()
    assert conversation(server.client()) == expected
    other = server.client(number=1)
    assert not other.check(["a"]) and other.identity().name != server.client().identity().name
    for ask in (lambda: other.add("text", 1), lambda: other.add("sum", 2**62)):
        other.set("text", "no number")
        other.set("sum", str(2**62))
        with pytest.raises(ValueError, match="refuses: .*(not an integer|overflow)"):
            ask()


def test_what_was_answered_is_there_after_a_kill_and_a_change_is_made_once(server: Redis) -> None:
    """Killed while questions are under way: each of them ends well, and counts once."""
    client = server.client(60.0)
    ends: list[int] = []

    def count() -> None:
        mine = server.client(60.0)
        for _ in range(100):
            mine.add("n", 1)
            time.sleep(0.005)
        ends.append(mine.add("n", 0))

    thread = threading.Thread(target=count)
    thread.start()
    first = client.identity()
    for n in range(2):
        client.set(f"k{n}", "v")
        time.sleep(0.2)
        server.kill()
        server.start()
        assert client.get(f"k{n}") == b"v"
    thread.join()
    assert ends == [100] and client.identity() == first


def test_a_frozen_redis_is_silent_and_answers_again(server: Redis) -> None:
    client = server.client(1.2)
    client.set("k", "v")
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreSilent, match="does not answer within 1.2 s"):
        client.add("n", 1)
    server.process.send_signal(signal.SIGCONT)
    client.deadline = 20.0
    assert client.get("k") == b"v"
    first = client.add("n", 1)
    assert first in (1, 2) and client.add("n", 0) == first


def test_a_redis_that_lost_what_it_held_is_noticed_before_it_is_changed(server: Redis) -> None:
    import redis

    client = server.client()
    client.set("epoch", "8")
    redis.Redis(port=server.port, password=PASSWORD).flushall()
    for ask in (lambda: client.compare_set("epoch", "", "8"), client.identity):
        with pytest.raises(StoreSilent, match="was made anew since, without what it held before"):
            ask()
    assert not server.client().check(["epoch"])


@pytest.mark.parametrize("password", ["", "another"])
def test_a_wrong_password_is_named(server: Redis, password: str) -> None:
    with pytest.raises(
        ValueError,
        match="refuses: .*; give its password in ISLAND_ENDPOINT=redis://:PASSWORD@HOST:PORT",
    ):
        server.client(password=password).check(["k"])


def test_one_that_may_forget_is_warned_of_once(
    server: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    from fsdp_demo.comm import store_redis

    caplog.set_level(logging.WARNING)
    for sync in ("always", "everysec"):
        monkeypatch.setattr(store_redis, "_warned", set())
        redis.Redis(port=server.port, password=PASSWORD).config_set("appendfsync", sync)
        for _ in range(2):
            server.client().check(["k"])
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        "may forget what it has answered when it ends (appendonly yes, appendfsync everysec): set "
        "appendonly yes"
    ) in said
    assert PASSWORD not in said


def test_islands_meet_over_it(server: Redis, run_ranks) -> None:
    pytest.importorskip("zmq")

    def fn(me: Any) -> tuple[bool | None, str]:
        exchange = fsdp_demo.attach(
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1), "full"
        )
        presence = Presence(exchange.topology)
        presence.tell_stop(me.island)
        together = presence.wait_for_stops(20.0)
        exchange.finish()
        return together, exchange.topology.endpoint

    endpoint = f"redis://127.0.0.1:{server.port}"
    env = {
        "ISLAND_ENDPOINT": endpoint.replace("//", f"//:{PASSWORD}@"),
        "ISLAND_TRANSPORT": "zeromq",
    }
    assert run_ranks(fn, 2, 1, env=env) == [(True, endpoint)] * 2
