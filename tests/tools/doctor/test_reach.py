"""Who reaches whom, over loopback: a listener, a relay before it that holds one direction, ports
that are closed, strangers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from fsdp_demo.net.address import join_address, split_address
from fsdp_demo.tools.doctor import reach
from fsdp_demo.tools.doctor.measured import OK, OTHER, REFUSED, TIMEOUT, UNREACHABLE

from ...support.relay import Relay

SECRET = "of this test"
SOON = 0.5


@pytest.fixture
def listener() -> Iterator[reach.Listener]:
    made = reach.Listener(SECRET, 1, ["127.0.0.1", "127.0.0.2"], SOON)
    yield made
    made.close()


@pytest.fixture
def relay(listener) -> Iterator[Relay]:
    made = Relay(split_address(listener.ports[0])[1])
    yield made
    made.close()


def place(relay: Relay) -> str:
    return join_address(relay.address, relay.port)


def test_doctor_reach_both_ways(listener, relay) -> None:
    """Text passes both ways over a healthy link."""
    found = reach.reach(SECRET, 0, 1, [place(relay)], 5.0)
    assert found.state == OK and found.whole and found.packet is None
    assert (found.sender, found.receiver, found.address) == (0, 1, "127.0.0.1")


def test_doctor_reach_closed_port(listener) -> None:
    """A closed port is reported as refused."""
    listener.close()
    assert reach.reach(SECRET, 0, 1, listener.ports[:1], SOON).state == REFUSED


def test_doctor_reach_foreign_address() -> None:
    """A listener cannot listen at an address of another machine."""
    made = reach.Listener(SECRET, 1, ["192.0.2.1", "127.0.0.1"], SOON)  # RFC 5737: nobody has it
    try:
        assert made.ports[0] == "" and made.ports[1]
        found = reach.reach(SECRET, 0, 1, made.ports, SOON)
        assert (found.state, found.other) == (UNREACHABLE, "127.0.0.1")
    finally:
        made.close()


def test_doctor_reach_other_address(listener, relay) -> None:
    """Another address of the island that answers is found."""
    relay.cut()
    found = reach.reach(SECRET, 0, 1, [place(relay), listener.ports[1]], SOON)
    assert (found.state, found.other) == (REFUSED, "127.0.0.2")


def test_doctor_reach_timeout(relay) -> None:
    """Silence ends in a timeout."""
    relay.hold()
    assert reach.reach(SECRET, 0, 1, [place(relay)], SOON).state == TIMEOUT


@pytest.mark.parametrize("way", ["forth", "back"])
def test_doctor_reach_large_data_lost(relay, way) -> None:
    """One direction that loses large data is found. A greeting passes, 32 KiB do not: data of more
    than 1 KiB are dropped on the way.
    """

    def drop(data: bytes, forth: bool) -> bytes:
        return b"" if len(data) > 1024 and forth == (way == "forth") else data

    relay.change = drop
    found = reach.reach(SECRET, 0, 1, [place(relay)], SOON)
    assert found.state == OK and not found.whole
    assert (found.forth, found.back) == ((False, None) if way == "forth" else (True, False))
    assert found.packet == 0  # loopback's pieces are as large with any packet


def test_doctor_reach_largest_packet(monkeypatch) -> None:
    """The largest packet that passes is found."""
    for limit in (0, 576, 1300, 1420, 4096, 9000):
        monkeypatch.setattr(
            reach, "_try", lambda *a, limit=limit: (OK, a[-1] <= limit, a[-1] <= limit)
        )
        fits = [size for size in reach.PACKETS if size <= limit]
        assert reach.largest(SECRET, 1, "", SOON) == max(fits, default=0)


def test_doctor_reach_stranger_refused(listener) -> None:
    """A stranger gets no answer."""
    assert reach.reach("a guess", 0, 1, listener.ports[:1], SOON).state == OTHER
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" * 700, b"[]\n", b"{}\n"):
        with socket.create_connection(split_address(listener.ports[0]), timeout=5) as made:
            made.sendall(text)
            with contextlib.suppress(ConnectionResetError):  # of what it has not read
                assert made.recv(100) == b""
    assert reach.reach(SECRET, 0, 1, listener.ports[:1], 5.0).whole  # it still serves


def test_doctor_reach_other_island(listener) -> None:
    """Another island at the address is not taken for the right one."""
    assert reach.reach(SECRET, 0, 2, listener.ports[:1], SOON).state == OTHER


def test_doctor_reach_other_program() -> None:
    """Another program that answers is not taken for an island."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            made, _ = server.accept()
            with made:
                made.recv(100)
                made.sendall(json.dumps(["no island"]).encode() + b"\n")

        threading.Thread(target=answer, daemon=True).start()
        where = join_address(*server.getsockname())
        assert reach.reach(SECRET, 0, 1, [where], 5.0).state == OTHER
