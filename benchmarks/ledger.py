"""The ledger of bytes beside the counters of the network interface. Needs Linux and root.

    sudo .venv/bin/python benchmarks/ledger.py --only demo,diloco

Islands are network namespaces that train (`training_island.py`). For each preset the bytes that
the ledger has by channel, of headers and of all else, their sum, what the meter has, and what the
interface has sent meanwhile. Packets are not joined (no offload). How many bytes the interface
counts around the payload of a packet is measured first, in a plain TCP transfer of a known size.
The interface's bytes less those of all packets are what TCP carried. What is left over the meter is
framing, heartbeats and votes of the transport, and packets that TCP sent again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.common import run_id  # noqa: E402
from benchmarks.network_lab import Islands, Lab, missing  # noqa: E402

SIZE = 20_000_000  # bytes of the plain transfer
SERVER = """
import socket
door = socket.create_server(("0.0.0.0", 9009))
print("open", flush=True)
peer, _ = door.accept()
while peer.recv(1 << 20):
    pass
peer.sendall(b"k")
"""
CLIENT = """
import socket, sys
def count(what):
    return int(open(f"/sys/class/net/eth0/statistics/tx_{what}").read())
peer = socket.create_connection((sys.argv[1], 9009))
sent, packets = count("bytes"), count("packets")
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(count("bytes") - sent, count("packets") - packets)
"""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("demo", {}),
    "full": ("full", {"value_dtype": "bf16"}),
    "diloco": ("diloco", {"period": 4}),
    "desloc": ("desloc", {"period": 2}),
    "streaming_diloco": ("streaming_diloco", {"period": 4, "layers": 2, "delay": 1}),
}


def head(lab: Lab) -> float:
    """Bytes that the interface counts around the payload of a packet, from a plain TCP transfer of
    a known size.
    """
    python = [sys.executable, "-c"]
    server = lab.popen(1, [*python, SERVER], stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    words = [*python, CLIENT, lab.address(1), str(SIZE)]
    said, _ = lab.popen(0, words, stdout=subprocess.PIPE, text=True).communicate()
    server.wait()
    sent, packets = map(int, said.split())
    return (sent - SIZE) / packets


def measure(islands: Islands, name: str, steps: int, around: float) -> dict[str, Any]:
    """What the first island has counted over `steps` steps. around: see `head`."""
    preset, settings = CASES[name]
    islands.lab.offload(False)
    islands.ask(do="attach", run=run_id(), method=preset, settings=settings)
    islands.lab.shape(100e6, 0.01)
    islands.ask(do="train", settle=0, steps=4)
    found = islands.ask(do="train", settle=0, steps=steps)[0]
    islands.lab.shape(None, 0.0)
    islands.ask(do="leave")
    rows = {k.removeprefix("row "): v for k, v in found.items() if k.startswith("row ")}
    return {
        "preset": preset,
        "settings": settings,
        "rows": rows,
        "setup": found["setup"],
        "meter": found["metered"],
        "interface": found["tx"],
        "packets": found["tx_packets"],
        "carried": round(found["tx"] - around * found["tx_packets"]),
    }


def show(found: dict[str, Any]) -> str:
    """One preset as a table."""
    total = sum(found["rows"].values()) + found["setup"]
    lines = [["bytes sent", found["preset"], "of the meter"]]
    entries = [
        *found["rows"].items(),
        ("questions outside the rows", found["setup"]),
        ("sum of the ledger", total),
        ("meter", found["meter"]),
        ("interface", found["interface"]),
        ("interface, less packet headers", found["carried"]),
    ]
    lines += [[name, f"{n:,}", f"{n / found['meter']:.4f}"] for name, n in entries]
    return table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES), metavar="A,B", help="presets")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="a multiple of the periods")
    parser.add_argument("--json", metavar="FILE", help="write the rows, too")
    args = parser.parse_args()
    if why := missing():
        sys.exit(f"ledger.py: {why}")
    lab, found = Lab(args.islands, "ledger"), []
    lab.up()
    try:
        with tempfile.TemporaryDirectory() as logs:
            lab.offload(False)
            lab.shape(100e6, 0.01)
            around = head(lab)
            print(f"{around:.2f} B around the payload of a packet, in a plain TCP transfer\n")
            islands = Islands(lab, (2, 128, 4), logs)
            for name in args.only.split(","):
                found.append(measure(islands, name, args.steps, around))
                print(show(found[-1]), end="\n\n", flush=True)
    finally:
        lab.down()
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
