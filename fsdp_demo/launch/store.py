"""The store: the meeting point of the islands, a `torch.distributed.TCPStore` in a process of its
own.

It holds a few keys (who came, addresses, the run specification) and no data of the training. It
knows no passwords: whoever reaches the port can read and write every key, so it should listen on
one private address, not on all. `TCPStore` takes values of 8 MiB at most, and as many of them as
come: `bound_memory` limits what they can take in all. `TCPStore` by itself listens on every address
of the machine, whatever host it is given; here it gets a socket that is already bound
(`master_listen_fd`), so that the address asked for is the address used.
"""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comm.address import join_address, split_address

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BACKLOG = 4096
"""Connections that may wait to be accepted: every rank of every island connects at about the same
moment.
"""

MEMORY = 512 << 20
"""Bytes that the keys of a store may take: those of a run are a few hundred each."""


@dataclass(frozen=True)
class Served:
    """A store that is being served, as long as this object lives.

    Attributes:
        server: keeps the server alive.
        host, port: what it listens on; the port is the real one where 0 was asked for.
        endpoint: the text for `ISLAND_ENDPOINT`; for a wildcard address, this machine's address on
            its default route.
        warnings: sentences that a user must see.
        file: where it keeps its keys: nowhere.
    """

    server: TCPStore
    host: str
    port: int
    endpoint: str
    warnings: tuple[str, ...]
    file: str = ""

    def serve_until(self, signals: set[signal.Signals]) -> None:
        """Return when one of these signals comes, which must be blocked."""
        signal.sigwait(signals)


def serve(bind: str, token: str = "") -> Served:
    """Serve a store on exactly one address.

    Args:
        bind: `ADDR:PORT`; ADDR is an address or name of this machine (`0.0.0.0` or `[::]`: all),
            PORT 0 picks a free one.
        token: ISLAND_TOKEN, of which this store knows nothing: a warning.

    Raises:
        ValueError: the text is no address, the name is unknown, or the address cannot be listened
            on.
    """
    # late: the durable store, which uses this module, starts without torch
    from torch.distributed import TCPStore

    family, target = resolved(bind, *split_address(bind))
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"--bind {bind}: cannot listen there: {error.strerror or error}{cure(error.errno)}"
        ) from None
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    # The server's own client connects to the host given here; the descriptor belongs to the server
    # from now on.
    own = ("::1" if address.version == 6 else "127.0.0.1") if address.is_unspecified else host
    server = TCPStore(
        own,
        port,
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return Served(
        server, host, port, reached_at(address, port), _warnings(address) + _useless(token)
    )


def resolved(bind: str, name: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Family and address to bind to.

    Raises:
        ValueError: the name is unknown.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(
            f"--bind {bind}: the name {name!r} has no address ({error.strerror or error})"
        ) from None
    return family, target


def bound_memory(more: int = MEMORY) -> int | None:
    """Let this process, which should do nothing but serve, take `more` bytes of memory than it has
    now (Linux); the limit, if there is one.

    A store that somebody fills ends then, and training goes on without it; otherwise the machine's
    memory would end, and with it all else.
    """
    if not sys.platform.startswith("linux"):
        return None
    import resource

    try:
        now = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmData")
        )
        limit = 1024 * int(now.split()[1]) + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (OSError, ValueError, StopIteration):
        # a container without /proc, or with a lower limit of its own
        return None
    return limit


def cure(number: int | None) -> str:
    """What to do where an address cannot be listened on."""
    if number == errno.EADDRINUSE:
        return (
            ". Another store may still run there (ss -ltnp shows who); stop it or take another port"
        )
    if number == errno.EADDRNOTAVAIL:
        return ". This machine has no such address (ip -brief address lists those it has)"
    if number == errno.EACCES:
        return ". Ports under 1024 need root; take a higher one"
    return ""


def _warnings(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[str, ...]:
    no_passwords = "The store and the exchange have no passwords and no encryption"
    if address.is_unspecified:
        return (
            f"{address} is every address of this machine. {no_passwords}: bind to one private "
            "address where you can",
        )
    if address.is_global:
        cure = (
            "bind to a private address (a VPN such as WireGuard gives one) or close the port to "
            "everybody else"
        )
        return (
            f"{address} is a PUBLIC address. {no_passwords}: whoever reaches it can read, change "
            f"and end the run; {cure}",
        )
    return ()


def _useless(token: str) -> tuple[str, ...]:
    said = (
        "ISLAND_TOKEN is set, but this store lets everybody in who reaches it: --bind "
        "zmq://ADDR:PORT asks for the token"
    )
    return (said,) if token else ()


def reached_at(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    """host:port for the islands; for a wildcard address, this machine's address on its default
    route.
    """
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    return join_address(_default_route(family) if address.is_unspecified else str(address), port)


def _default_route(family: socket.AddressFamily) -> str:
    """This machine's address on its default route (no packet is sent), or its name where there is
    no route.
    """
    # addresses reserved for documentation
    elsewhere = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
