"""The commands beside a run: `store` serves the store where its islands meet, `status` says which
islands take part and how far they are.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from ..launch.command_line import Commands

OPEN_FILES = 1 << 16  # descriptors: one for each connection of each rank of all islands


def add_store(commands: Commands) -> None:
    """Add the parser of `fsdp-demo store`."""
    sub = commands.add_parser("store", help="serve the store where islands meet, until stopped")
    sub.example("fsdp-demo store --bind 10.0.0.1:29400")
    sub.add_argument(
        "--bind",
        required=True,
        metavar="ADDR:PORT",
        help="a private address of this machine; port 0 picks a free one",
    )
    sub.add_argument(
        "--file",
        metavar="PATH",
        help="where it keeps its keys (default: fsdp_demo_store.sqlite in this folder)",
    )
    sub.add_argument(
        "--port-file", metavar="FILE", help="write the port into this file when the store listens"
    )
    sub.add_argument("--quiet", action="store_true", help="do not print where it listens")
    sub.set_defaults(run_command=store)


def store(args: argparse.Namespace) -> int:
    """Serve a store until SIGINT or SIGTERM."""
    from ..elastic import descriptors
    from ..files import in_one_piece
    from ..net.address import join_address
    from ..rendezvous import environment
    from ..store.server import FILE, StoreServer, bound_memory

    # Blocked before the store starts its threads, which inherit it: the signals wait for `sigwait`
    # below.
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        served = StoreServer(args.bind, args.file or FILE, environment.token(os.environ))
    except BaseException:
        # whoever called main() in a process of its own goes on
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    bound_memory()
    descriptors.raise_to(OPEN_FILES)
    for warning in served.warnings:
        print(f"fsdp-demo store: WARNING: {warning}", file=sys.stderr, flush=True)
    if args.port_file:
        # In one piece, so that who waits for the file never reads half a number.
        in_one_piece(Path(args.port_file), lambda part: part.write_text(f"{served.port}\n"))
    listening = join_address(served.host, served.port)
    if not args.quiet:
        print(
            f"store listening on {listening}, keys in {served.file}; on every island: export "
            f"ISLAND_ENDPOINT={served.endpoint}",
            flush=True,
        )
    served.serve_until(signals)
    return 0


def add_status(commands: Commands) -> None:
    """Add the parser of `fsdp-demo status`."""
    sub = commands.add_parser(
        "status",
        help="say which islands take part in a run, and how far they are (ISLAND_ENDPOINT, "
        "ISLAND_RUN)",
    )
    sub.example("ISLAND_ENDPOINT=10.0.0.1:29400 ISLAND_RUN=first-try fsdp-demo status")
    sub.add_argument("--json", action="store_true", help="print one object")
    sub.set_defaults(run_command=status)


def status(args: argparse.Namespace) -> int:
    """Say who the members of a run are and how far they are; 1 if nobody answers."""
    from ..rendezvous.run_status import members, text
    from ..rendezvous.topology import Topology

    topology = Topology.from_env({"ISLAND_COUNT": "2", **os.environ, "ISLAND_RANK": "0"})
    found = members(topology.open_store(10.0), topology.run, topology.token)
    print(json.dumps(found, indent=2) if args.json else text(found))
    return 0 if any(not one.get("silent") for one in found["members"]) else 1
