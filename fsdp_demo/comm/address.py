"""Addresses of machines: host:port as text, and the address of this machine that others reach."""

from __future__ import annotations

import socket


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
        allowed = "ADDR:PORT such as 10.0.0.5:29500 or [fd00::1]:29500, port 0 to 65535 (0 picks a free one)"
        raise ValueError(f"address {text!r}: expected {allowed}")
    return (host[1:-1] if bracketed else host), number


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`.

    >>> join_address("fd00::1", 29500)
    '[fd00::1]:29500'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def route_to(endpoint: str) -> str:
    """The local address from which packets to the endpoint leave: right where a machine has several interfaces."""
    host, _, port = endpoint.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses a route, sends nothing
        return str(probe.getsockname()[0])
