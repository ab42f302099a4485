"""Runs the python blocks of a page, one after the other in one namespace: `python run_blocks.py <
blocks.json`, a process of its own.

Nothing outside this machine can be reached. The input is {"page": path, "blocks": [[line, code],
...]}; an error shows the page's line.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
from typing import Any


def refuse_network(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook."""
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    elif event == "socket.getaddrinfo":
        host = args[0]
    else:
        return
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost", socket.gethostname()):
        return
    try:
        if ipaddress.ip_address(host).is_loopback or ipaddress.ip_address(host).is_unspecified:
            return
    except ValueError:
        pass
    raise OSError(
        f"code in documents runs without a network, and asks for {host}: mark the block as not "
        "run, or change it"
    )


def main() -> None:
    told = json.load(sys.stdin)
    sys.addaudithook(refuse_network)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for path, line, code in told["blocks"]:
        exec(compile("\n" * (line - 1) + code, path, "exec"), namespace)
    if "fsdp_demo" not in sys.modules:
        return
    from fsdp_demo import Exchange

    for thing in list(namespace.values()):
        if isinstance(thing, Exchange):
            thing.detach()


if __name__ == "__main__":
    main()
