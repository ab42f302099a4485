"""What the kernel does for TCP connections of ZeroMQ, what it knows of one, and how many
descriptors it allows for them.
"""

from __future__ import annotations

import array
import fcntl
import resource
import socket as sockets
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

_TCP_INFO: int = getattr(sockets, "TCP_INFO", -1)  # Linux has it
_LAST_DATA = struct.Struct("=52xI")  # of struct tcp_info: tcpi_last_data_recv, milliseconds

_LEAST_RTT = struct.Struct("=148xI")  # of the same: tcpi_min_rtt, microseconds
_UNKNOWN = (0, 2**32 - 1)  # what stands there before the first answer, and where it is not counted

_COUNTED = struct.Struct("=16xI40xI36xI52xI8xQQQ")  # of the same, the fields of `Counted`

NAT = 15
"""Seconds between signs of life on a quiet connection: they keep it open on the way."""

QUIET = 120
"""Seconds without an answer to them after which a quiet connection is closed. Who waits for a piece
has a timeout of its own.
"""


HANDSHAKE_MS = 2000
"""Milliseconds after which a listener closes a connection that has not shaken hands, whether it has
sent anything or not. libzmq's default is 30 s, in which strangers can use up all descriptors.
"""


def keep_alive(socket: Any) -> None:
    """Let the kernel send signs of life on the connections of a ZeroMQ socket. Before it is bound
    or connected.

    ZeroMQ's own heartbeats are not used: they can abort the process (libzmq 4.3.5, `Assertion
    failed: !_io_error`). Where a connection is reset while more has come than `rcvhwm` allows,
    libzmq keeps it until that is read. The next heartbeat finds it without a descriptor. That is
    what a process finds which was stopped until the others had closed their connections to it.
    """
    socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, NAT, NAT
    socket.tcp_keepalive_cnt = QUIET // NAT


def gather(descriptor: int, size: int) -> bool:
    """Let a TCP connection wake its reader only when `size` bytes are there (or it has closed); 1:
    at once, also for what is there already. Whether the kernel does so. At 100 Mbit/s a reader is
    else woken for every packet."""
    with suppress(OSError), _connection(descriptor) as made:
        made.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, size)
        return True
    return False


def stood(descriptor: int) -> float | None:
    """Seconds for which nothing has come on a TCP connection; 0 while something waits to be read. A
    piece that comes slowly counts as it comes, long before ZeroMQ gives it out. None where the
    kernel does not say: no Linux, or the connection has closed."""
    with suppress(OSError, struct.error), _connection(descriptor) as made:
        unread = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
        info = made.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _LAST_DATA.size)
        return 0.0 if unread[0] else float(_LAST_DATA.unpack(info)[0]) / 1e3
    return None


def least_round_trip(descriptor: int) -> float | None:
    """Seconds of the shortest round trip that the kernel has seen on a TCP connection in the last
    minutes. The kernel of the other side answers by itself, so busy processes make it no longer.
    None where the kernel does not tell: no Linux, one before 4.6, or the connection has closed."""
    with suppress(OSError, struct.error), _connection(descriptor) as made:
        info = made.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _LEAST_RTT.size)
        (found,) = _LEAST_RTT.unpack(info)
        return None if found in _UNKNOWN else float(found) / 1e6
    return None


class Counted(NamedTuple):
    """What the kernel counts of a TCP connection (`struct tcp_info` of linux/tcp.h).

    Attributes:
        mss: bytes of data that a packet carries at most. mtu: bytes of the largest packet that the
            kernel knows to pass.
        again: packets that were sent again. packets: with data that were sent.
        busy: seconds with data to send. held_there, held_here: of these, seconds that it waited for
            the receiver's window, and for room in its own send buffer.
    """

    mss: int
    mtu: int
    again: int
    packets: int
    busy: float
    held_there: float
    held_here: float


def counted(descriptor: int) -> Counted | None:
    """The counts of a TCP connection; None: no Linux, one before 4.10, or it has closed."""
    with suppress(OSError, struct.error), _connection(descriptor) as made:
        info = made.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _COUNTED.size)
        *numbers, busy, there, here = _COUNTED.unpack(info)
        return Counted._make((*numbers, busy / 1e6, there / 1e6, here / 1e6))
    return None


@contextmanager
def _connection(descriptor: int) -> Iterator[sockets.socket]:
    """A connection of ZeroMQ's, for questions to the kernel; OSError where there is none."""
    if _TCP_INFO < 0 or descriptor < 0:
        raise OSError("the kernel has no such connection, or does not tell")
    made = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, 0, descriptor)
    try:
        yield made
    finally:
        made.detach()  # it is ZeroMQ's


def allowed() -> int:
    """Descriptors that the hard limit allows this process; 2**31 where there is none."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**31 if hard == resource.RLIM_INFINITY else hard


def raise_to(wanted: int) -> int:
    """Raise the soft limit of descriptors to `wanted`, or as far as the hard limit allows.

    Returns:
        The soft limit; 2**31 where there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return 2**31 if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):  # a system with another limit above this one
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, allowed()), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
