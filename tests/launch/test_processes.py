"""Ports that a launcher gives to servers that start later."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from fsdp_demo.launch import processes
from fsdp_demo.launch.processes import reserve_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(sys.platform != "linux", reason="the range of Linux")
def test_reserve_port_is_given_to_nobody_else() -> None:
    """The port is none of those that outgoing connections get, and a server can listen on it."""
    port, lowest = reserve_port(), int(RANGE.read_text().split()[0])
    assert 20_000 <= port < lowest or lowest <= 20_000
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_reserve_port_where_outgoing_connections_get_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where outgoing connections get all ports it is one of theirs."""
    monkeypatch.setattr(processes, "_first_outgoing", lambda: 1024)
    assert reserve_port() >= 20_000


def test_reserve_port_of_another_machine() -> None:
    """An address that is not this machine's is an error, not an endless search."""
    with pytest.raises(OSError, match="no free TCP port from 20000 to .* on 192.0.2.1"):
        reserve_port("192.0.2.1")
