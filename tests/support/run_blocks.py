"""Runs the python blocks of pages, each page in a process of its own: `python run_blocks.py MODULE
...` imports the modules that many pages need, once, and forks for every line of its input.

A line is {"blocks": [[path, line, code], ...], "folder": where they run, "log": where their output
goes}. The blocks of a page share one namespace, and an error shows the page's line. The answer is a
line with the exit status. Nothing outside this machine can be reached.
"""

from __future__ import annotations

import importlib
import ipaddress
import json
import os
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
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # deepspeed says something there at its import
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # a child has only the thread that forks, and the locks of the others as they were
    assert len(tasks := os.listdir("/proc/self/task")) == 1, f"{len(tasks)} threads, allowed is one"
    sys.addaudithook(refuse_network)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return run(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def run(told: dict[str, Any]) -> None:
    """The blocks of a page; the process ends as any other afterwards."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(told["folder"])
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
