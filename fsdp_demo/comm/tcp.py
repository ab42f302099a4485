"""What the kernel does for a TCP connection of ZeroMQ, and what it knows of one."""

from __future__ import annotations

from typing import Any

NAT = 15
"""Seconds between signs of life on a quiet connection: they keep it open on the way."""

QUIET = 120
"""Seconds without an answer to them after which a quiet connection is closed. Who waits for a piece has a timeout of its own."""


def keep_alive(socket: Any) -> None:
    """Let the kernel send signs of life on the connections of a ZeroMQ socket. Before it is bound or connected.

    ZeroMQ's own heartbeats are not used: they can abort the process (libzmq 4.3.5, `Assertion failed: !_io_error`). Where a connection is
    reset while more has come than `rcvhwm` allows, libzmq keeps it until that is read. The next heartbeat finds it without a descriptor.
    That is what a process finds which was stopped until the others had closed their connections to it.
    """
    socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, NAT, NAT
    socket.tcp_keepalive_cnt = QUIET // NAT
