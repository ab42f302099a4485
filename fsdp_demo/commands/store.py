"""`fsdp-demo store`: serve the store where islands meet."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from ..launch.command_line import Commands

EXAMPLE = "fsdp-demo store --bind 10.0.0.1:29400"

OPEN_FILES = 1 << 16  # descriptors: one for each connection of each rank of all islands

BIND_HELP = "a private address of this machine; port 0 picks a free one"


def add(commands: Commands) -> None:
    sub = commands.add_parser("store", help="serve the store where islands meet, until stopped")
    sub.example(EXAMPLE)
    sub.add_argument("--bind", required=True, metavar="ADDR:PORT", help=BIND_HELP)
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
