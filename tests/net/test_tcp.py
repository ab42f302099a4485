"""What the kernel knows of a TCP connection, and when it wakes a reader: long messages wake whoever
reads them seldom, as long as more is sure to come.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Any

import pytest
import torch

from fsdp_demo.net import tcp
from fsdp_demo.net.tcp import stood
from fsdp_demo.peers import connection
from fsdp_demo.peers.header import PAYLOAD

from ..support.elastic import Islands

pytestmark = pytest.mark.skipif(tcp._TCP_INFO < 0, reason="only Linux says so of a connection")


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def test_tcp_gather_wakes_at_the_size() -> None:
    """`tcp.gather` lets the kernel wake a reader at so many bytes, or at the end."""
    near, far = connected()
    with near, far, select.epoll() as waits:
        waits.register(far.fileno(), select.EPOLLIN | select.EPOLLET)
        assert tcp.gather(far.fileno(), 1000)
        near.sendall(bytes(999))
        assert waits.poll(0.1) == []
        assert tcp.stood(far.fileno()) == 0.0
        near.sendall(b"1")
        assert len(waits.poll(5.0)) == 1
        assert len(far.recv(5000)) == 1000
        near.sendall(bytes(10))
        assert waits.poll(0.1) == []
        assert tcp.gather(far.fileno(), 1)  # what is there is told at once
        assert len(waits.poll(5.0)) == 1
        assert len(far.recv(5000)) == 10
        assert tcp.gather(far.fileno(), 1000)
        near.close()  # so is the end
        assert len(waits.poll(5.0)) == 1
    assert not tcp.gather(-1, 1)


@pytest.mark.parametrize("megabytes", [1, 24])
def test_tcp_gather_long_message_but_for_its_end(
    run_ranks: Any, monkeypatch: pytest.MonkeyPatch, megabytes: int
) -> None:
    """A long message is gathered; the last setting of each connection is that each byte counts.
    Short messages change nothing.
    """

    def run() -> dict[int, list[int]]:
        told: dict[int, list[int]] = {}

        def note(descriptor: int, size: int) -> bool:
            told.setdefault(descriptor, []).append(size)
            return tcp.gather(descriptor, size)

        monkeypatch.setattr(connection, "gather", note)

        def work(line: Any) -> None:
            n = megabytes << 18
            for step in range(3):
                sent = [(torch.full((n,), float(line.slot + step)), "fp32")]
                body = torch.zeros(3, dtype=torch.uint8)
                got = line.exchange(
                    line.header(PAYLOAD, step), body, sent, lambda headers: [[1.0, 1.0]]
                )
                assert got.means[0].unique().tolist() == [0.5 + step]

        run = Islands(2)
        run.run(work)
        assert not [r for r in run.results.values() if isinstance(r, BaseException)]
        return told

    told = run_ranks(lambda me: run(), 1, 1, timeout=120)[0]
    if megabytes == 1:
        assert told == {}
    else:
        assert told and all(set(sizes) == {1, connection.GATHERED} for sizes in told.values())
        assert all(sizes[-1] == 1 for sizes in told.values())


def test_tcp_stood_says_how_long_a_connection_is_silent() -> None:
    """`tcp.stood` gives the seconds since something came, 0 while it waits to be read, and None for
    no connection.
    """
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    with server, near, far:
        if (since := stood(near.fileno())) is None:
            pytest.skip("this kernel does not say")
        assert since >= 0.0
        time.sleep(0.3)
        before = stood(near.fileno())
        assert before is not None and before >= 0.25
        far.send(b"x")
        ready = threading.Event()
        while stood(near.fileno()) != 0.0:  # it waits to be read
            ready.wait(0.01)
        near.recv(1)
        after = stood(near.fileno())
        assert after is not None and after < before
        assert near.fileno() >= 0, "it is still there"
    assert stood(-1) is None and stood(near.fileno()) is None
