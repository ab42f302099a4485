"""Each fault that `fsdp-demo doctor` names, provoked once between two islands in a network lab. Needs
Linux and root.

    python recipes/benchmarks/doctor_lab.py --json docs/figures/doctor.json   # all, some ten minutes
    python recipes/benchmarks/doctor_lab.py --only mtu-black-hole,none

Islands are network namespaces (`slow_link_lab.py`). For each fault the lab is built anew, the fault
is put into it, `fsdp-demo doctor` runs on both nodes, and its findings are compared with the fault.
The status is 1 where one was not named.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from report import table  # noqa: E402
from slow_link_lab import PORT, Lab, LabError, missing  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240.0  # seconds that one examination may take


class FaultyLab(Lab):
    """Two nodes, and what can be broken between them."""

    def __init__(self) -> None:
        super().__init__(2, "doctor")

    def node(self, node: int, *words: str) -> None:
        """Run a command on a node."""
        self._in(self._space(node), *words)

    def both(self, *words: str) -> None:
        """Run a command on both nodes."""
        for node in range(self.nodes):
            self.node(node, *words)

    def port(self, node: int, *words: str) -> None:
        """`ip link set` for the hub's end of a node's cable."""
        self._in(self.hub, "ip", "link", "set", f"p{node}", *words)

    def upload(self, node: int, rate: float) -> None:
        """Another rate for what one node sends."""
        bucket = ("tbf", "rate", f"{rate:.0f}bit", "burst", "64kb", "latency", "50ms")
        self.node(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *bucket)

    def refuse(self, node: int) -> None:
        """Let a node drop connections to all its ports but the store's."""
        rule = ("-i", "eth0", "-p", "tcp", "--syn", "!", "--dport", str(PORT), "-j", "DROP")
        self.node(node, "iptables", "-w", "-A", "INPUT", *rule)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        finding: that must be named; "" where nothing is wrong. about: words that must stand in it.
        says: what is done, for the table.
        put: does it. rate, delay: of the link, in bit/s and in seconds one way.
        address: island 1's ISLAND_ADDRESS, where it is not that of its node.
        words: further ones of the command, by island.
    """

    finding: str
    says: str
    put: Callable[[FaultyLab], None] = lambda lab: None
    about: str = ""
    rate: float | None = 400e6
    delay: float = 0.005
    address: str = ""
    words: tuple[tuple[str, ...], ...] = ((), ())


def _black_hole(lab: FaultyLab) -> None:
    lab.offload(False)
    lab.port(1, "mtu", "1300")  # a bridge drops what is larger, and says nothing


def _window(lab: FaultyLab) -> None:
    lab.both("sysctl", "-qw", "net.ipv4.tcp_wmem=4096 16384 131072")


def _idle(lab: FaultyLab) -> None:
    lab.both("sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
    lab.both("sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=1")


def _loss(lab: FaultyLab) -> None:
    lab.offload(False)
    drop = ("-m", "statistic", "--mode", "random", "--probability", "0.05", "-j", "DROP")
    lab.node(1, "iptables", "-w", "-A", "INPUT", "-i", "eth0", "-p", "tcp", *drop)


def _wall(lab: FaultyLab) -> None:
    lab.refuse(0)
    lab.refuse(1)


def _second_interface(lab: FaultyLab) -> None:
    lab.node(1, "ip", "link", "add", "inner0", "type", "veth", "peer", "name", "inner1")
    lab.node(1, "ip", "addr", "add", "192.168.77.2/24", "dev", "inner0")
    lab.node(1, "ip", "link", "set", "inner0", "up")


FAULTS = {
    "none": Fault("", "a link of 400 Mbit/s and 10 ms, without a fault"),
    "one-sided-firewall": Fault(
        "one-sided-firewall",
        "node 0 drops new connections to all ports but the store's",
        lambda lab: lab.refuse(0),
        "island 1 (island1) cannot connect to island 0 (island0)",
    ),
    "unreachable": Fault("unreachable", "both nodes drop them", _wall),
    "wrong-interface": Fault(
        "wrong-interface",
        "island 1 names the address of an interface that leads nowhere",
        _second_interface,
        "island 1 (island1) names the address 192.168.77.2",
        address="192.168.77.2",
    ),
    "mtu-black-hole": Fault(
        "mtu-black-hole",
        "the switch drops packets of more than 1300 bytes",
        _black_hole,
        "1280 bytes pass",
    ),
    "port-100-mbit": Fault("port-100-mbit", "both cables at 100 Mbit/s", rate=100e6, delay=0.002),
    "window-limited": Fault(
        "window-limited",
        "50 ms, and a send buffer of 128 KiB at most",
        _window,
        delay=0.025,
    ),
    "slow-start-after-idle": Fault(
        "slow-start-after-idle",
        "40 ms, and the congestion control Reno instead of BBR",
        _idle,
        delay=0.02,
    ),
    "packet-loss": Fault(
        "packet-loss", "node 1 loses 5 % of the packets that come", _loss, "to island 1"
    ),
    "unequal-links": Fault(
        "unequal-links",
        "node 1 sends at 20 Mbit/s, node 0 at 400",
        lambda lab: lab.upload(1, 20e6),
        "from island 1 (island1) to island 0",
    ),
    "unequal-islands": Fault(
        "unequal-islands",
        "the islands are told step times of 0.30 and 0.45 s (--step-time)",
        about="0.45 s on island 1 (island1) and",
        words=(("--step-time", "0.30"), ("--step-time", "0.45")),
    ),
}


def examine(fault: Fault, seconds: float) -> dict[str, Any]:
    """Build the lab with a fault and run the command; what it wrote, with its statuses."""
    lab = FaultyLab()
    lab.up()
    try:
        lab.shape(fault.rate, fault.delay)
        fault.put(lab)
        with tempfile.TemporaryDirectory() as folder:
            return _run(lab, fault, seconds, Path(folder))
    finally:
        lab.down()


def _ahead() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, -10)  # of what else runs on this machine


def _run(lab: FaultyLab, fault: Fault, seconds: float, folder: Path) -> dict[str, Any]:
    endpoint = f"zmq://{lab.address(0)}:{PORT}"
    command = [sys.executable, "-m", "fsdp_demo.cli"]
    store = [*command, "store", "--bind", endpoint, "--file", str(folder / "store"), "--quiet"]
    serving = lab.popen(0, store)
    started, islands = time.monotonic(), []
    try:
        for i in range(lab.nodes):
            env = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "ISLAND_ENDPOINT": endpoint,
                "ISLAND_COUNT": str(lab.nodes),
                "ISLAND_RANK": str(i),
                "ISLAND_ADDRESS": fault.address if i and fault.address else lab.address(i),
                "ISLAND_TIMEOUT": "120",
                "OMP_NUM_THREADS": "1",
            }
            words = [*command, "doctor", "--seconds", str(seconds), "--no-disk", *fault.words[i]]
            words += ["--json", str(folder / "doctor.json")]
            islands.append(
                lab.popen(
                    i,
                    words,
                    env=env,
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=_ahead,
                )
            )
        said = [island.communicate(timeout=LIMIT)[0] for island in islands]
    finally:
        for process in [*islands, serving]:
            process.kill()
            process.wait()
    if not (folder / "doctor.json").exists():
        raise LabError(f"doctor wrote nothing: {said[0].strip() or said[1].strip()}")
    found = json.loads((folder / "doctor.json").read_text())
    found["statuses"] = [island.returncode for island in islands]
    found["alike"] = _findings(said[0]) == _findings(said[1])
    found["seconds"] = time.monotonic() - started
    return dict(found)


def _findings(text: str) -> str:
    return text.partition("\nFindings\n")[2]


def row(name: str, fault: Fault, found: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    names = [one["name"] for one in found["findings"]]
    right = [f for f in found["findings"] if f["name"] == fault.finding]
    says = next((f["says"] for f in right if fault.about in f["says"]), "")
    return {
        "fault": name,
        "done": fault.says,
        "wanted": fault.finding,
        "named": bool(says) if fault.finding else not names,
        "others": sorted({one for one in names if one != fault.finding}),
        "says": says,
        "status": max(found["statuses"]),
        "alike": found["alike"],
        "seconds": round(found["seconds"], 1),
        "link": found["link"],
    }


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    head = ["fault", "done", "named", "others", "status", "says"]
    cells = [
        [
            r["fault"],
            r["done"],
            "yes" if r["named"] else "NO",
            ", ".join(r["others"]) or "-",
            str(r["status"]),
            r["says"] or "-",
        ]
        for r in rows
    ]
    return table([head, *cells])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="FAULTS", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--seconds", type=float, default=12.0, help="for the links (default: 12)")
    parser.add_argument("--json", metavar="FILE", help="write the rows into this file")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"--only {', '.join(unknown)}: allowed are {', '.join(FAULTS)}")
    if why := missing():
        parser.error(why)
    rows, started = [], time.monotonic()
    for name in names:
        rows.append(row(name, FAULTS[name], examine(FAULTS[name], args.seconds)))
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if args.json:  # what is there stays there if the next one fails
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(show(rows))
    return int(not all(r["named"] and r["alike"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
