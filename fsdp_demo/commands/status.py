"""`fsdp-demo status`: who takes part in a run, and how far they are."""

from __future__ import annotations

import argparse
import json
import os

from ..launch.command_line import Commands

EXAMPLE = "ISLAND_ENDPOINT=10.0.0.1:29400 ISLAND_RUN=first-try fsdp-demo status"


def add(commands: Commands) -> None:
    sub = commands.add_parser(
        "status",
        help="say which islands take part in a run, and how far they are (ISLAND_ENDPOINT, "
        "ISLAND_RUN)",
    )
    sub.example(EXAMPLE)
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
