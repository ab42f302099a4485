"""Addresses of machines: host:port as text, and the address of this machine that others reach. Also
the keys that protect connections between them (`Keys`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import socket
import struct
from collections.abc import Collection
from typing import Any, NamedTuple

ENDPOINT = "host:port of the store, as `fsdp-demo store` prints it"

_SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface


def split_address(text: str) -> tuple[str, int]:
    """`"10.0.0.5:29500"` -> `("10.0.0.5", 29500)`; IPv6 in brackets: `"[fd00::1]:29500"`.

    Raises:
        ValueError: no port, a port outside 0..65535, or IPv6 without brackets.

    >>> split_address("[fd00::1]:29500")
    ('fd00::1', 29500)
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not colon or not host or not 0 <= number <= 65535 or (":" in host and not bracketed):
        allowed = (
            "ADDR:PORT such as 10.0.0.5:29500 or [fd00::1]:29500, port 0 to 65535 (0 picks a free "
            "one)"
        )
        raise ValueError(f"address {text!r}: expected {allowed}")
    return (host[1:-1] if bracketed else host), number


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`.

    >>> join_address("fd00::1", 29500)
    '[fd00::1]:29500'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Endpoint(NamedTuple):
    """Where a store is: the host without brackets, and the port."""

    host: str
    port: int

    def __str__(self) -> str:
        return join_address(self.host, self.port)


def split_endpoint(text: str) -> Endpoint:
    """`"[fd00::1]:29500"` -> `Endpoint("fd00::1", 29500)`; "zmq://" may stand before it.

    Raises:
        ValueError: another scheme, no host, or no port within 1..65535.

    >>> split_endpoint("10.0.0.5:29500")
    Endpoint(host='10.0.0.5', port=29500)
    """
    host, port = "", 0
    with contextlib.suppress(ValueError):
        host, port = split_address(text.removeprefix("zmq://"))
    if not port:
        raise ValueError(f"{text!r} must be {ENDPOINT}")
    return Endpoint(host, port)


def is_public(host: str) -> bool:
    """Whether a name or address leads to the open internet; False where it has no address.

    >>> [is_public(host) for host in ("10.0.0.5", "100.100.1.1", "fd00::1", "127.0.0.1", "8.8.8.8")]
    [False, False, False, False, True]
    """
    try:
        found = {
            str(target[0]) for *_, target in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        }
    except (OSError, UnicodeError):
        return False
    return any(ipaddress.ip_address(address.partition("%")[0]).is_global for address in found)


def route_to(endpoint: str) -> str:
    """The local address from which packets to the endpoint leave, where there are several, too."""
    place = split_endpoint(endpoint)
    family, _, _, _, target = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses a route, sends nothing
        return str(probe.getsockname()[0])


def interface_addresses(names: Collection[str]) -> list[tuple[str, str]]:
    """(interface, address) of each of these interfaces, as Linux tells them: one address of IPv4
    each, then all of IPv6. An interface without an address is left out.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in names:
            with contextlib.suppress(OSError):  # it has none
                packed = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, packed)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="utf-8") as lines:
        every = [(fields[-1], bytes.fromhex(fields[0])) for fields in map(str.split, lines)]
        found += [(n, socket.inet_ntop(socket.AF_INET6, a)) for n, a in every if n in names]
    return found


SHORTEST = 16  # characters of a token
STRETCH = 1 << 14  # work of one guess of a token, the n of scrypt: 40 ms and 16 MiB


class Keys:
    """The pair of keys of ZeroMQ's CURVE that all ranks of a run derive from its token
    (ISLAND_TOKEN).

    The side that listens proves by the secret half who it is. The public half is never sent, so
    whoever knows it has the token. The side that connects takes a fresh pair each time. The token
    is stretched (scrypt), so guesses are dear; it should be random all the same, such as
    `openssl rand -hex 32`.

    Attributes:
        mark: what the islands compare before they connect, so that different tokens are told apart
            at once. It says nothing of the keys.
    """

    def __init__(self, token: str, run: str):
        import zmq
        from zmq.utils import z85

        check(token)
        made = hashlib.scrypt(
            token.encode(), salt=f"fsdp_demo line {run}".encode(), n=STRETCH, r=8, p=1, dklen=40
        )
        self._zmq, self._secret, self.mark = zmq, z85.encode(made[:32]), made[32:].hex()
        self._public = zmq.curve_public(self._secret)

    def listen(self, socket: Any) -> None:
        """Let a socket accept only who has the token. Before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.curve_publickey = self._public

    def connect(self, socket: Any) -> None:
        """Let a socket connect only to who has the token. Before it connects."""
        socket.curve_serverkey = self._public
        socket.curve_publickey, socket.curve_secretkey = self._zmq.curve_keypair()


def check(token: str) -> str:
    """The token, if it is long enough. Raises ValueError: it is short."""
    if len(token) < SHORTEST:
        raise ValueError(
            f"ISLAND_TOKEN has {len(token)} characters, allowed are {SHORTEST} or more: take "
            "`openssl rand -hex 32`"
        )
    return token
