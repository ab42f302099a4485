"""`fsdp-demo store` and `fsdp-demo status`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp_demo import cli
from fsdp_demo.net.address import join_address, split_address
from fsdp_demo.store.client import StoreClient
from fsdp_demo.store.server import StoreServer

from ..support.stores import InThread, server_of
from .rehearsals import ON_LINUX, command, wait_until

TOKEN = "a token that is long enough"


def test_store_command_serves_until_stopped(tmp_path: Path) -> None:
    """`fsdp-demo store` serves until it is stopped by SIGINT or SIGTERM."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    files = [tmp_path / number.name for number in numbers]
    words = ["store", "--bind", "127.0.0.1:0", "--file", ":memory:", "--port-file"]
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # it keeps nothing
    stores = [subprocess.Popen(command(*words, str(file)), **how) for file in files]
    try:
        for process, file, number in zip(stores, files, numbers, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(file.read_text())
            assert line == (
                f"store listening on 127.0.0.1:{port}, no ISLAND_TOKEN, keys in :memory:; on every "
                f"island: export ISLAND_ENDPOINT=127.0.0.1:{port}\n"
            )
            socket.create_connection(("127.0.0.1", port), 5).close()
            process.send_signal(number)
            assert process.wait(30) == 0
    finally:
        for process in stores:
            process.kill()


def test_store_command_keeps_its_file_where_it_was_started(tmp_path: Path) -> None:
    """The store keeps its file in the folder in which it was started."""
    found, token = [], "a token that is long enough"
    for _ in range(2):
        env = os.environ | {"ISLAND_TOKEN": token, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
        words = command("store", "--bind", "127.0.0.1:0")
        how = dict(stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
        with subprocess.Popen(words, **how) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                kept = f"with ISLAND_TOKEN, keys in {tmp_path / 'fsdp_demo_store.sqlite'}"
                listens = rf"store listening on (127\.0\.0\.1:\d+), {re.escape(kept)}; "
                said = re.fullmatch(listens + r".* export ISLAND_ENDPOINT=(.+)\n", line)
                assert said and said[2] == said[1], line
                client = StoreClient(said[2], token)
                before = client.get("starts")
                client.set("starts", before + "x")
                found.append((client.get("starts"), client.identity()))
                client.close()
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            finally:
                process.kill()
    assert [count for count, _ in found] == ["x", "xx"]
    assert [who.generation for _, who in found] == [1, 2]
    assert found[0][1].name == found[1][1].name
    assert [f.name for f in tmp_path.iterdir()] == ["fsdp_demo_store.sqlite"]


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`fsdp-demo store`, which listens, and its endpoint."""
    words, how = command("store", "--bind", "127.0.0.1:0", *words), {"text": True}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip().rpartition("=")[2]
        finally:
            process.kill()


@ON_LINUX
def test_store_command_restarts_a_killed_server(tmp_path: Path) -> None:
    """By whatever signal, between questions and within them: no answer is lost or given twice. In
    the end it is too often.
    """
    names = ["n0", "n1", "n2"]

    def count(key: str) -> None:
        client = StoreClient(endpoint, deadline=60.0)
        for n in range(60):
            assert client.compare_set(key, str(n) if n else "", str(n + 1)) == str(n + 1)
            time.sleep(0.01)
        client.close()

    with serving("--file", str(tmp_path / "keys")) as (process, endpoint):
        with ThreadPoolExecutor(3) as pool:
            ends = pool.map(count, names)
            for number in (signal.SIGKILL, signal.SIGABRT) * 2:
                time.sleep(0.3)
                os.kill(server_of(process.pid), number)
            list(ends)
        client = StoreClient(endpoint, deadline=60.0)
        assert client.get_all(names) == ["60", "60", "60"]
        assert client.identity().generation == 5
        # it forks, so it has no second thread, in C neither
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1
        client.close()
        os.kill(server_of(process.pid), signal.SIGSEGV)
        assert process.wait(30) == 128 + signal.SIGSEGV
        assert process.stderr is not None
        *again, last = process.stderr.read().splitlines()
        again = [line for line in again if "fsdp-demo store" in line]
        assert [line[: line.index(" and ")] for line in again] == [
            f"fsdp-demo store: the server has ended ({name})" for name in ("SIGKILL", "SIGABRT") * 2
        ]
        assert "(SIGSEGV), 5 times within 60 s, and is not started again: see" in last


@ON_LINUX
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("frozen", [False, True])
def test_store_command_leaves_no_server_behind(tmp_path, number: signal.Signals, frozen) -> None:
    """No server outlives `fsdp-demo store`, also where the server is frozen."""
    with serving("--file", str(tmp_path / "keys")) as (process, endpoint):
        server = server_of(process.pid)
        if frozen:
            os.kill(server, signal.SIGSTOP)
        process.send_signal(number)
        assert process.wait(30) == (-number if number == signal.SIGKILL else 0)

        def address_and_file_are_free() -> bool:
            # a dead server's threads end one by one, and the last one closes what they share
            try:
                StoreServer(endpoint, tmp_path / "keys").serve_while(lambda: False)
            except ValueError:
                return False
            return True

        wait_until(address_and_file_are_free, 10)


def test_store_command_refused_file_ends_it() -> None:
    """A server that refuses its file is not started again."""
    with serving("--file", "no/such/folder/keys") as (process, _):
        assert process.wait(30) == 2 and process.stderr is not None
        assert process.stderr.read() == (
            "fsdp-demo: error: --file no/such/folder/keys: No such file or directory; take a file "
            "in a folder that exists, can be written and is not full\n"
        )


def test_store_command_warns_of_open_address_and_short_token(monkeypatch, capsys) -> None:
    """An open address without a token is warned of, and a short token is refused."""
    for token, warned in (("", 2), ("a token that is long enough", 1)):
        store = StoreServer("0.0.0.0:0", ":memory:", token)
        store.serve_while(lambda: False)  # closes it
        assert len(store.warnings) == warned
        assert "keeps nothing" in store.warnings[-1]
        assert "0.0.0.0" not in store.endpoint
    monkeypatch.setenv("ISLAND_TOKEN", "short")
    for bind in ("127.0.0.1:0", "zmq://127.0.0.1:0"):
        assert cli.main(["store", "--bind", bind]) == 2
        assert "ISLAND_TOKEN has 5 characters" in capsys.readouterr().err


@pytest.mark.parametrize(("there", "here", "status", "says"), [
    (TOKEN, "short", 2, "ISLAND_TOKEN has 5 characters, allowed are 16 or more"),
    (TOKEN, "another token, as long", 2, "must be the same at the store"),
    (TOKEN, "", 2, "must be the same at the store"),
    (TOKEN, TOKEN, 1, ""),
])  # fmt: skip
def test_status_command_ends_whatever_token_it_is_given(
    there: str, here: str, status: int, says: str, tmp_path: Path
) -> None:
    """`fsdp-demo status` ends whatever token it is given."""
    served = InThread(StoreServer("127.0.0.1:0", tmp_path / "keys", there))
    env = {"ISLAND_ENDPOINT": served.endpoint, "ISLAND_RUN": "none", "ISLAND_TOKEN": here}
    env = {**os.environ, **env, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    how = {"capture_output": True, "text": True, "timeout": 120}
    try:
        done = subprocess.run(command("status"), env=env, **how)
    finally:
        served.end()
    assert done.returncode == status and says in done.stderr, done.stderr
    assert "nobody has met" in done.stdout or status == 2


def listens_on(port: int) -> list[str]:
    """Local addresses (hexadecimal) that listen on a port, from /proc."""
    text = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in text for line in table.splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [address for address, at in ends if int(at, 16) == port]


@ON_LINUX
def test_store_command_listens_on_its_address_only(tmp_path: Path) -> None:
    """A store listens on the address asked for and no other."""
    served = StoreServer("127.0.0.1:0", tmp_path / "keys")
    assert listens_on(served.port) == ["0100007F"]
    assert served.warnings == []
    taken = "cannot listen there: Address already in use.*another port"
    with pytest.raises(ValueError, match=taken):
        StoreServer(served.endpoint, tmp_path / "others")
    served.serve_while(lambda: False)  # closes it


def test_store_command_warns_of_public_addresses() -> None:
    """A store warns of open and of public addresses, and of no private ones."""
    import ipaddress

    from fsdp_demo.store.server import _open_to

    (warning,) = _open_to(ipaddress.ip_address("0.0.0.0"), "")
    assert "every address" in warning
    (warning,) = _open_to(ipaddress.ip_address("8.8.8.8"), "")
    assert "PUBLIC" in warning and "without ISLAND_TOKEN" in warning
    assert _open_to(ipaddress.ip_address("8.8.8.8"), TOKEN) == []
    for private in ("127.0.0.1", "10.1.2.3", "192.168.1.5", "100.100.1.1", "fd00::1"):
        assert _open_to(ipaddress.ip_address(private), "") == [], private


ADDRESS = r"error: (address .* expected ADDR:PORT|--bind .* has no address)"


@pytest.mark.parametrize(("bind", "says"), [
    *((b, ADDRESS) for b in ("127.0.0.1:", ":1", "127.0.0.1:70000", "::1:29500", "127.0.0.1:x")),
    *((b, ADDRESS) for b in ("", "no such name:1")),
    ("127.0.0.1", "address '127.0.0.1': expected ADDR:PORT"),
    ("198.51.100.7:0", "--bind 198.51.100.7:0: cannot listen there: .*no such address"),
])  # fmt: skip
def test_store_command_refuses_wrong_addresses(bind: str, says: str, capsys) -> None:
    """A wrong `--bind`, or the address of another machine, is refused."""
    assert cli.main(["store", "--bind", bind, "--file", ":memory:"]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_store_addresses_read_back() -> None:
    """Addresses read back from their text."""
    for text in ("10.0.0.5:29500", "[fd00::1]:29500", "host:0"):
        assert join_address(*split_address(text)) == text
