"""What each island pays for the number of islands: CPU time and packets of a step, descriptors of a
process, connections to each peer; and whether one that is killed comes back.

    sudo .venv/bin/python benchmarks/scale_islands.py --islands 8 16 24 32 48

Islands train a tiny model with the preset `demo`, each in a network namespace of its own
(`network_lab.py`; Linux and root; `--loopback`: all on addresses of the loopback interface). They
are forked from one process, so that 48 of them fit into one machine. CPU time is that of the whole
process, user and system. It is taken over the second half of the steps, so it does not depend on
what else the machine does, as seconds of the clock would. Then the last island is killed and
started again, and the others go on until it has taken part.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.network_lab import PORT, Lab, LabError, command, missing  # noqa: E402
from fsdp_demo import attach, preset  # noqa: E402
from fsdp_demo.elastic import connect, newcomer  # noqa: E402, F401
from fsdp_demo.peers import zeromq  # noqa: E402, F401

LIMIT = 600.0  # seconds that an experiment may take
HEADS = {
    "islands": "islands",
    "start": "start, s",
    "cpu": "CPU ms per step",
    "per_peer": "CPU ms per step and peer",
    "packets": "packets per step and peer",
    "connections": "connections to each peer",
    "descriptors": "descriptors",
    "start_cpu": "CPU s to start",
    "store_cpu": "CPU s of the store",
    "back": "back after, s",
    "back_descriptors": "descriptors of who came back",
}


def train(slot: int, args: argparse.Namespace, folder: Path) -> None:
    """One island, until it is killed."""
    began = time.process_time()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exchange = attach(optimizer, preset("demo"), model=model)
    told = {"attached": time.time(), "start_cpu": time.process_time() - began}
    generator, counted, before = torch.Generator().manual_seed(slot), args.steps // 2, _now()
    done = folder / f"done-{slot}-{os.environ['ISLAND_ATTEMPT']}"
    while True:
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if exchange.step == counted:
            before = _now()
        if exchange.step >= args.steps and _connections(exchange) and not done.exists():
            steps = max(args.steps - counted, 1)
            told |= {k: (v - before[k]) / steps for k, v in _now().items()}
            told |= {"descriptors": len(os.listdir("/proc/self/fd")), "step": exchange.step}
            told["connections"] = _connections(exchange)
            _write(done, told)
        time.sleep(args.pad)


def _now() -> dict[str, float]:
    """CPU seconds of this process, and packets that have left its namespace; 0 without one."""
    sent = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        sent += int(counts.split()[9]) if name.strip() == "eth0" else 0
    return {"cpu": time.process_time(), "packets": sent}


def _connections(exchange: Any) -> int:
    """To each peer, for messages; 0 while this island follows and takes no part."""
    peers = exchange._peers
    if peers._driver is None or peers.following is not None:
        return 0
    return max((len(wires) for wires in peers._driver.connections.values()), default=0)


def _write(path: Path, what: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.rename(path)


def introduce(lab: Lab) -> None:
    """Tell all nodes where the others are. What they would find out has room for 1,024 entries on a
    whole machine (net.ipv4.neigh.default.gc_thresh3), which 33 islands fill."""
    for i in range(lab.nodes):
        hardware = ("address", f"02:00:00:00:00:{i:02x}")
        command("ip", "-n", lab._space(i), "link", "set", "eth0", *hardware)
    for i in range(lab.nodes):
        lines = [
            f"neigh replace {lab.address(j)} lladdr 02:00:00:00:00:{j:02x} dev eth0 nud permanent"
            for j in range(lab.nodes)
            if j != i
        ]
        words = ["ip", "-n", lab._space(i), "-batch", "-"]
        subprocess.run(words, input="\n".join(lines), text=True, check=True)


class Experiment:
    """So many islands and their store."""

    def __init__(self, count: int, args: argparse.Namespace, folder: Path):
        self.count, self.args, self.folder = count, args, folder
        self.lab = None if args.loopback else Lab(count, "islands")
        self.pids: dict[int, int] = {}
        self.store: subprocess.Popen[bytes] | None = None

    def address(self, slot: int) -> str:
        return f"127.0.3.{slot + 1}" if self.lab is None else self.lab.address(slot)

    def begin(self) -> None:
        if self.lab is not None:
            self.lab.up()
            introduce(self.lab)
        self.endpoint = f"{self.address(0)}:{PORT}"
        words = [sys.executable, "-m", "fsdp_demo.cli", "store", "--bind", self.endpoint]
        words += ["--file", str(self.folder / "store"), "--quiet"]
        log = (self.folder / "store.log").open("wb")
        if self.lab is None:
            self.store = subprocess.Popen(words, stdout=log, stderr=log)
        else:
            self.store = self.lab.popen(0, words, stdout=log, stderr=log)
        self.started = time.time()
        for slot in range(self.count):
            self.start(slot, 0)

    def start(self, slot: int, attempt: int) -> None:
        """Fork an island into its namespace."""
        pid = os.fork()
        if pid:
            self.pids[slot] = pid
            return
        status = 1
        try:
            self._become(slot, attempt)
            train(slot, self.args, self.folder)
            status = 0
        except BaseException:
            logging.exception("island %d", slot)
        finally:
            os._exit(status)

    def _become(self, slot: int, attempt: int) -> None:
        log = os.open(self.folder / f"island{slot}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for end in (1, 2):
            os.dup2(log, end)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
        if self.lab is not None:
            space = os.open(f"/run/netns/{self.lab._space(slot)}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(space, 0):
                raise OSError(ctypes.get_errno(), "setns")
            os.close(space)
        if self.args.descriptors:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.args.descriptors, hard))
        os.environ |= {
            "ISLAND_COUNT": str(self.count),
            "ISLAND_RANK": str(slot),
            "ISLAND_NAME": f"island{slot}",
            "ISLAND_RUN": "scale",
            "ISLAND_ENDPOINT": self.endpoint,
            "ISLAND_ADDRESS": self.address(slot),
            "ISLAND_TIMEOUT": "300",
            "ISLAND_DEAD": "30",
            "ISLAND_ATTEMPT": str(attempt),
        }

    def wait(self, name: str) -> dict[str, Any]:
        """What an island has written."""
        end = time.monotonic() + LIMIT
        while not (path := self.folder / name).exists():
            for slot, pid in list(self.pids.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self.pids[slot]
                    log = (self.folder / f"island{slot}.log").read_text().splitlines()
                    raise LabError(f"island {slot} ended: {' / '.join(log[-3:])}")
            if time.monotonic() > end:
                raise LabError(f"{name} did not come within {LIMIT:g} s ({self.folder})")
            time.sleep(0.1)
        return dict(json.loads(path.read_text()))

    def measure(self) -> dict[str, Any]:
        """The row of this number of islands."""
        self.begin()
        seen = [self.wait(f"done-{slot}-0") for slot in range(self.count)]
        assert self.store is not None
        store_cpu = cpu_of(self.store.pid)
        mean = {k: sum(s[k] for s in seen) / self.count for k in ("cpu", "packets", "start_cpu")}
        row: dict[str, Any] = {
            "islands": self.count,
            "start": max(s["attached"] for s in seen) - self.started,
            "cpu": 1e3 * mean["cpu"],
            "per_peer": 1e3 * mean["cpu"] / (self.count - 1),
            "packets": mean["packets"] / (self.count - 1),
            "connections": max(s["connections"] for s in seen),
            "descriptors": max(s["descriptors"] for s in seen),
            "start_cpu": mean["start_cpu"],
            "store_cpu": store_cpu,
        }
        if self.args.back:
            row |= self._back()
        return row

    def _back(self) -> dict[str, Any]:
        """Kill the last island, start it again, and wait until it has taken part."""
        slot = self.count - 1
        pid = self.pids.pop(slot)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        began = time.time()
        self.start(slot, 1)
        seen = self.wait(f"done-{slot}-1")
        return {"back": seen["attached"] - began, "back_descriptors": seen["descriptors"]}

    def end(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if self.store is not None:
            self.store.kill()
            self.store.wait()
        if self.lab is not None:
            self.lab.down()


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--islands", type=int, nargs="+", default=[8, 16, 24, 32, 48])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pad", type=float, default=0.1, help="seconds between two steps")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no root")
    parser.add_argument("--back", action="store_true", help="kill one, and let it come back")
    parser.add_argument("--descriptors", type=int, default=0, help="soft limit of the islands")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    if not args.loopback and (why := missing()):
        sys.exit(f"{why}; --loopback needs neither")
    torch.set_num_threads(1)
    rows = []
    for count in args.islands:
        with ExitStack() as around:
            folder = Path(around.enter_context(tempfile.TemporaryDirectory()))
            experiment = Experiment(count, args, folder)
            around.callback(experiment.end)
            rows.append(experiment.measure())
            print(json.dumps(rows[-1]), flush=True)
    keys = [k for k in HEADS if k in rows[0]]
    body = [[f"{r[k]:.3g}" for k in keys] for r in rows]
    print(table([[HEADS[k] for k in keys], *body]))
    if args.json:
        args.json.write_text(json.dumps({"steps": args.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
