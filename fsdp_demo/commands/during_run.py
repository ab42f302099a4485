"""The commands beside a run: `store` serves the store where its islands meet, `status` says which
islands take part and how far they are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ..errors import counted
from ..launch.command_line import USAGE_ERROR, Commands, option
from ..launch.processes import end_with_parent, shell_status
from ..store.client import Store

OPEN_FILES = 1 << 16  # descriptors: one for each connection of each rank of all islands

SIGNALS = {signal.SIGINT, signal.SIGTERM}

DEATHS, WITHIN = 5, 60.0  # so many deaths of the server within so many seconds end the store


def add_store(commands: Commands) -> None:
    """Add the parser of `fsdp-demo store`."""
    sub = commands.add_parser(
        "store",
        help="serve the store where islands meet, until stopped",
        example="fsdp-demo store --bind 10.0.0.1:29400",
        run=store,
    )
    option(
        sub,
        "--bind ADDR:PORT",
        "a private address of this machine; port 0 picks a free one",
        required=True,
    )
    option(
        sub,
        "--file PATH",
        "where it keeps its keys (default: fsdp_demo_store.sqlite in this folder)",
    )
    option(sub, "--port-file FILE", "write the port into this file when the store listens")
    option(sub, "--quiet", "do not print where it listens")


def store(args: argparse.Namespace) -> int:
    """Serve a store until SIGINT or SIGTERM, in a child process that is started again where it
    dies: libzmq aborts its process where there is no memory left, and a stranger can cause that.

    This process holds the listening socket. So the address stays, and clients wait there.
    """
    from ..rendezvous import environment
    from ..store.server import FILE, listen

    token, listener, deaths = environment.token(os.environ), listen(args.bind), list[float]()
    # Blocked in the server, too, before its threads start, which inherit it: both processes look
    # whether one of them is pending.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        while True:
            code = _serve_in_child(args, token, listener, first=not deaths)
            if code in (0, USAGE_ERROR) or SIGNALS & signal.sigpending():
                return max(code, 0)
            deaths = [*deaths[1 - DEATHS :], time.monotonic()]
            reason = signal.Signals(-code).name if code < 0 else f"status {code}"
            said = f"fsdp-demo store: the server has ended ({reason})"
            if len(deaths) == DEATHS and deaths[-1] - deaths[0] < WITHIN:
                _say(
                    f"{said}, {DEATHS} times within {WITHIN:g} s, and is not started again: see "
                    "what stands above; where strangers may cause it, set ISLAND_TOKEN"
                )
                return shell_status(code)
            _say(f"{said} and is started again on {args.file or FILE}")
    except BaseException:
        # whoever called main() in a process of its own goes on
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise


def _serve_in_child(
    args: argparse.Namespace, token: str, listener: socket.socket, first: bool
) -> int:
    """The exit code of one server; negative: the signal that has ended it. Raises RuntimeError:
    this process has other threads, and a fork would keep what they have locked.
    """
    if (threads := threading.active_count()) > 1:
        raise RuntimeError(
            f"this process has {threads} threads, and `fsdp-demo store` forks its server: start "
            "the command in a process of its own"
        )
    server = multiprocessing.get_context("fork").Process(
        target=serve, args=(args, token, listener, os.getpid(), first), daemon=True
    )
    server.start()
    while server.exitcode is None:
        server.join(0.2)
        if SIGNALS & signal.sigpending():
            server.terminate()
            server.join(3.0)
            server.kill()
    return server.exitcode


def serve(
    args: argparse.Namespace, token: str, listener: socket.socket, parent: int, first: bool
) -> None:
    """Serve until SIGINT or SIGTERM, which must be blocked, or until the parent process ends.
    Raises SystemExit: the file cannot be used; it has been said.
    """
    from ..files import in_one_piece
    from ..net.address import join_address
    from ..net.tcp import raise_to
    from ..store.server import FILE, StoreServer, bound_memory

    # what was answered is on the disk
    end_with_parent(signal.SIGKILL)
    try:
        served = StoreServer(listener, args.file or FILE, token)
        if args.port_file:
            # In one piece, so that who waits for the file never reads half a number.
            in_one_piece(Path(args.port_file), lambda part: part.write_text(f"{served.port}\n"))
    except (OSError, ValueError) as error:
        _say(f"fsdp-demo: error: {error}")
        sys.exit(USAGE_ERROR)
    bound_memory()
    raise_to(OPEN_FILES)
    for warning in served.warnings if first else ():
        _say(f"fsdp-demo store: WARNING: {warning}")
    listening = join_address(served.host, served.port)
    if first and not args.quiet:
        door = "with ISLAND_TOKEN" if token else "no ISLAND_TOKEN"
        print(
            f"store listening on {listening}, {door}, keys in {served.file}; on every island: "
            f"export ISLAND_ENDPOINT={served.endpoint}",
            flush=True,
        )
    served.serve_while(lambda: not SIGNALS & signal.sigpending() and os.getppid() == parent)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_status(commands: Commands) -> None:
    """Add the parser of `fsdp-demo status`."""
    sub = commands.add_parser(
        "status",
        help="say which islands take part in a run, and how far they are (ISLAND_ENDPOINT, "
        "ISLAND_RUN)",
        example="ISLAND_ENDPOINT=10.0.0.1:29400 ISLAND_RUN=first-try fsdp-demo status",
        run=status,
    )
    option(sub, "--json", "print one object")


def status(args: argparse.Namespace) -> int:
    """Say who the members of a run are and how far; 1 if nobody answers, unless it is finished."""
    from ..rendezvous.topology import Topology

    topology = Topology.from_env({"ISLAND_COUNT": "2", **os.environ, "ISLAND_RANK": "0"})
    found = members_of(topology.open_store(10.0), topology.run, topology.token)
    print(json.dumps(found, indent=2) if args.json else status_text(found))
    answered = any(not one.get("silent") for one in found["members"])
    return 0 if answered or found["state"] == "finished" else 1


def members_of(store: Store, run: str, token: str = "") -> dict[str, Any]:
    """The members of a run as the store knows them, each with what the listener of its first peer
    group says. The store is read only.

    Returns:
        `run`, `attempt`; `state` ("nobody has met", "members", "left", "finished"); `epoch`;
        `members`: per island its slot, life (how often its slot was started before), and from its
        listener step messages `launched` and `delivered`, `heard` (seconds since each other island
        was heard); or `silent` where the listener does not answer.

    Raises:
        StoreSilent: no answer. ValueError: what stands there cannot be read.
    """
    from ..elastic.store_session import newest
    from ..peers.join_messages import RankStatus
    from ..rendezvous.attempts import listeners

    attempt = store.get(f"{run}/attempt")
    found: dict[str, Any] = {"run": run, "attempt": attempt, "state": "nobody has met"}
    found |= {"epoch": None, "members": []}
    if not attempt:
        return found
    above = store.under(f"{run}/{attempt}")
    at = above.under(above.get("begun") or "0")
    record = newest(at)
    if record is None:
        return found
    found["state"] = (
        "finished" if above.get("finished") else "left" if above.get("ended") else "members"
    )
    found["epoch"] = record.epoch
    for member, answer in listeners(at, record.members, token):
        one: dict[str, Any] = {"slot": member.slot, "life": member.incarnation}
        says = (
            msgspec.structs.asdict(answer) if isinstance(answer, RankStatus) else {"silent": True}
        )
        found["members"].append({**one, **says})
    return found


def status_text(found: dict[str, Any]) -> str:
    """The result of `members_of` as lines of text."""
    head = f"run {found['run']}, attempt {found['attempt'] or '-'}: {found['state']}"
    if found["epoch"] is None:
        return head
    lines = [f"{head}; epoch {found['epoch']}, {counted(len(found['members']), 'island')}"]
    silent = {
        "finished": "has ended with the run",
        "left": "has ended before the end of the run, and can be started again",
    }.get(found["state"], "its listener does not answer")
    for one in found["members"]:
        name = f"  island {one['slot']}" + (f" (life {one['life']})" if one["life"] else "")
        if "heard" not in one:
            lines.append(f"{name}: {silent}")
            continue
        heard = ", ".join(f"{slot} {age:.1f} s ago" for slot, age in sorted(one["heard"].items()))
        joining_island = f"; {one['joining']} joins" if one.get("joining") else ""
        lines.append(
            f"{name}: {counted(one['delivered'], 'message')} delivered, "
            f"heard {heard or 'nobody'}{joining_island}"
        )
    return "\n".join(lines)
