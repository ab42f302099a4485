"""A small network on one Linux machine: nodes that are network namespaces, cables of any rate and
delay between them. Needs root.

    lab = Lab(nodes=2)
    lab.up()
    lab.shape(rate=100e6, delay=0.010)      # every cable, both directions; again at any time, also while something runs
    lab.popen(0, ["ping", "-c", "3", lab.address(1)])
    lab.down()

All cables end in a bridge in a namespace of its own, so taking the lab down is deleting namespaces,
and nothing of the machine's own network is touched. With `per_uplink` the nodes of a site end in a
bridge of the site, and one cable of the site, its uplink, joins it to the others. Rate and delay are
then those of the uplinks: within a site nothing is limited. The rate is a token bucket (`tc tbf`) at both
ends of a cable. The delay is a queue of the kernel (NFQUEUE) at the receiving node, from which a
small loop of this file lets packets go when they are due: many kernels lack netem, packets are
neither copied nor cut, and at the sender they would count against TCP's limit of what may wait
there. (`ping` shows half of it: it reads the time at which the interface got the answer.)
"""  # noqa: E501

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NETWORK = "10.78.0."
QUEUE = 9
PORT = 29500  # of the store
SILENCE = 900  # seconds after which an island that does not answer has failed
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "iptables": "iptables", "ethtool": "ethtool"}


class LabError(RuntimeError):
    """The lab could not be built; the message says what was tried."""


def missing() -> str:
    """Why there can be no lab here, as a sentence; empty if there can."""
    if not sys.platform.startswith("linux"):
        return f"the network lab needs Linux (network namespaces), this is {sys.platform}"
    if os.geteuid():
        return (
            "the network lab needs root (it makes network namespaces): run it with sudo, or in a "
            "container with --privileged"
        )
    absent = sorted(
        {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    )
    return (
        f"the network lab needs {', '.join(absent)}: apt-get install {' '.join(absent)}"
        if absent
        else ""
    )


def command(*words: str, check: bool = True) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise LabError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Lab:
    """Nodes 0 ... n - 1 and their cables.

    Args:
        name: first part of the namespaces' names; labs of different names may live side by side.
        per_uplink: neighbouring nodes that are one site, behind one uplink; 1: each has its own.
    """

    def __init__(self, nodes: int, name: str = "slowlink", per_uplink: int = 1):
        self.nodes, self.name, self.poller = nodes, name, f"{name}-hub"
        self.per_uplink = per_uplink
        self._lines: dict[int, subprocess.Popen[bytes]] = {}
        self._delay = 0.0

    def address(self, node: int) -> str:
        return f"{NETWORK}{node + 1}"

    def up(self) -> None:
        """Build it; what an earlier one of this name left behind goes first."""
        self.down()
        command("ip", "netns", "add", self.poller)
        self._in(self.poller, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self.poller, "ip", "link", "set", "br0", "up")
        for site in self._sites():
            self._join(site)
        for i in range(self.nodes):
            space, port = self._space(i), f"p{i}"
            command("ip", "netns", "add", space)
            self._in(
                self.poller,
                "ip",
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            self._in(self.poller, "ip", "link", "set", port, "master", self._bridge(i), "up")
            self._in(space, "ip", "link", "set", "lo", "up")
            self._in(space, "ip", "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            self._in(space, "ip", "link", "set", "eth0", "up")
            # as network cards do: what arrives together is acknowledged together
            self._in(space, "ethtool", "-K", "eth0", "gro", "on")
            self._in(self.poller, "ethtool", "-K", port, "gro", "on")

    def _sites(self) -> range:
        """Sites with a bridge of their own; none where each node has its own uplink."""
        return range(-(-self.nodes // self.per_uplink) if self.per_uplink > 1 else 0)

    def _bridge(self, node: int) -> str:
        return f"site{node // self.per_uplink}" if self.per_uplink > 1 else "br0"

    def _join(self, site: int) -> None:
        """The bridge of a site and its uplink, whose ends are `u` at the site and `c`."""
        bridge, ends = f"site{site}", (f"u{site}", f"c{site}")
        self._in(self.poller, "ip", "link", "add", bridge, "type", "bridge")
        self._in(self.poller, "ip", "link", "set", bridge, "up")
        pair = ("type", "veth", "peer", "name", ends[1])
        self._in(self.poller, "ip", "link", "add", ends[0], *pair)
        for end, master in zip(ends, (bridge, "br0"), strict=True):
            self._in(self.poller, "ip", "link", "set", end, "master", master, "up")

    def _ends(self) -> list[tuple[str, str]]:
        """(namespace, device) of both ends of every cable that has the rate."""
        if self.per_uplink > 1:
            return [(self.poller, f"{end}{site}") for site in self._sites() for end in "uc"]
        ends = [((self._space(i), "eth0"), (self.poller, f"p{i}")) for i in range(self.nodes)]
        return [end for pair in ends for end in pair]

    def _far(self, node: int) -> list[str]:
        """Words of iptables for packets from other sites; none where each node is a site."""
        if self.per_uplink == 1:
            return []
        site = node // self.per_uplink
        others = [i for i in range(self.nodes) if i // self.per_uplink != site]
        return ["-s", ",".join(self.address(i) for i in others)]

    def uplink_bytes(self) -> list[int]:
        """Bytes that have left each site through its uplink; none without shared uplinks."""
        counts = "/sys/class/net/u{}/statistics/tx_bytes"
        return [int(self._in(self.poller, "cat", counts.format(site))) for site in self._sites()]

    def down(self) -> None:
        """End what runs in the lab and delete it; no error if there is none."""
        found = [
            line.split()[0]
            for line in command("ip", "netns", "list", check=False).splitlines()
            if line.strip()
        ]
        for space in found:
            if space == self.poller or space.removeprefix(f"{self.name}-").isdigit():
                for number in (signal.SIGTERM, signal.SIGKILL):
                    pids = command("ip", "netns", "pids", space, check=False).split()
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(pid), number)
                    time.sleep(0.2 if pids else 0)
                command("ip", "netns", "del", space, check=False)
        for line in self._lines.values():
            line.wait()
        self._lines.clear()
        self._delay = 0.0

    def shape(self, rate: float | None, delay: float) -> None:
        """Give all cables `rate` bits per second in each direction (None: not limited) and `delay`
        seconds one way; with shared uplinks, give it to these.

        TCP remembers what a link was like: connections that were made before a change creep for
        seconds (BBR by its smallest round trip, Reno by its threshold)."""
        for space, device in self._ends():
            if rate is None:
                self._in(space, "tc", "qdisc", "del", "dev", device, "root", check=False)
            else:
                # 50 ms of queue, as a modest router has; the burst lets one tick of the timer
                # pass at the wanted rate
                bucket = ("tbf", "rate", f"{rate:.0f}bit", "burst", "64kb", "latency", "50ms")
                self._in(space, "tc", "qdisc", "replace", "dev", device, "root", *bucket)
        if delay != self._delay:
            for i in range(self.nodes):
                self._hold(i, delay)
        self._delay = delay

    def _hold(self, node: int, delay: float) -> None:
        space = self._space(node)
        rule = (
            "-i",
            "eth0",
            *self._far(node),
            "-j",
            "NFQUEUE",
            "--queue-num",
            str(QUEUE),
            "--queue-bypass",
        )
        self._in(space, "iptables", "-w", "-t", "mangle", "-F", "PREROUTING")
        old = self._lines.pop(node, None)
        if old is not None:
            time.sleep(0.1)  # what it holds is let go first
            old.terminate()
            old.wait()
        if delay:
            words = [
                "ip",
                "netns",
                "exec",
                space,
                sys.executable,
                str(Path(__file__).resolve()),
                str(delay),
            ]
            line = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
            assert line.stdout is not None
            if line.stdout.readline() != b"ready\n":
                raise LabError(
                    f"the delay line of node {node} did not start: does the kernel have NFQUEUE?"
                )
            self._lines[node] = line
            self._in(space, "iptables", "-w", "-t", "mangle", "-A", "PREROUTING", *rule)

    def seconds(self) -> float:
        """CPU time that the delay lines have taken, per node: on a machine with few cores it is
        missing elsewhere.
        """
        ticks = 0
        for line in self._lines.values():
            fields = Path(f"/proc/{line.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK") / self.nodes

    def offload(self, on: bool) -> None:
        """Whether packets leave in aggregates of up to 64 KiB with one header, or each with its
        own, as on a wire.
        """
        for i in range(self.nodes):
            for space, device in ((self._space(i), "eth0"), (self.poller, f"p{i}")):
                state = "on" if on else "off"
                self._in(space, "ethtool", "-K", device, "tso", state, "gso", state)

    def popen(self, node: int, words: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a node."""
        return subprocess.Popen(["ip", "netns", "exec", self._space(node), *words], **options)

    def _space(self, node: int) -> str:
        return f"{self.name}-{node}"

    @staticmethod
    def _in(space: str, *words: str, check: bool = True) -> str:
        return command("ip", "netns", "exec", space, *words, check=check)


# ---- the islands -------------------------------------------------------------------------------


class Islands:
    """Processes of `training_island.py` on a lab's nodes, and the store on node 0.

    Args:
        shape: rows, tokens per row and layers of what they train.
        logs: folder of what they say.

    Attributes:
        script: what they run, a file beside this one and its first words.
    """

    script: tuple[str, ...] = ("training_island.py",)

    def __init__(self, lab: Lab, shape: tuple[int, int, int], logs: str):
        self.lab, self.logs = lab, Path(logs)
        self.logs.mkdir(parents=True, exist_ok=True)
        store = [
            sys.executable,
            "-m",
            "fsdp_demo.cli",
            "store",
            "--bind",
            f"{lab.address(0)}:{PORT}",
        ]
        self.store = lab.popen(0, store, stdout=subprocess.DEVNULL, stderr=self._log("store"))
        self.all = [self._start(i, shape) for i in range(lab.nodes)]

    def _log(self, name: str) -> Any:
        return open(self.logs / f"{name}.log", "w")

    def _start(self, i: int, shape: tuple[int, int, int]) -> subprocess.Popen[Any]:
        env = dict(
            os.environ,
            ISLAND_RANK=str(i),
            ISLAND_COUNT=str(self.lab.nodes),
            ISLAND_ADDRESS=self.lab.address(i),
        )
        env |= {
            "ISLAND_ENDPOINT": f"{self.lab.address(0)}:{PORT}",
            "ISLAND_NAME": f"island{i}",
            "ISLAND_TIMEOUT": str(SILENCE),
        }
        env |= {
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        script = Path(__file__).resolve().parent / self.script[0]
        words = [sys.executable, str(script), *self.script[1:], *map(str, shape)]
        return self.lab.popen(
            i,
            words,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log(f"island{i}"),
            text=True,
        )

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Tell all islands to do something; their answers."""
        for island in self.all:
            island.stdin.write(json.dumps(order) + "\n")
            island.stdin.flush()
        return [self._answer(i) for i in range(len(self.all))]

    def _answer(self, i: int) -> dict[str, Any]:
        ready, _, _ = select.select([self.all[i].stdout], [], [], SILENCE)
        line = self.all[i].stdout.readline() if ready else ""
        if not line:
            log = (self.logs / f"island{i}.log").read_text().strip().splitlines()
            raise LabError(
                f"island {i} {'ended' if ready else 'does not answer'}: "
                f"{log[-1] if log else 'no word'} ({self.logs})"
            )
        return json.loads(line)

    def end(self) -> None:
        for island in self.all:
            island.stdin.close()
        for process in [*self.all, self.store]:
            process.terminate()
            process.wait()


# ---- the delay line: netlink messages to and from the kernel's queue ---------------------------

# kinds of messages of the subsystem NFNL_SUBSYS_QUEUE, which is 3
_PACKET, _CONFIG, _VERDICTS = 0, 2, 3
_ACCEPT = 1
# seconds: how often the line looks while packets wait, or up to twice as often where one is due
TICK = 0.002


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def _message(kind: int, body: bytes) -> bytes:
    inner = struct.pack("=BB", 0, 0) + struct.pack(">H", QUEUE) + body  # nfgenmsg
    return struct.pack("=IHHII", 16 + len(inner), (3 << 8) | kind, 1, 0, 0) + inner


def _numbers(data: bytes) -> list[int]:
    """Numbers of the packets that a datagram of the kernel announces."""
    out, at = [], 0
    while at + 16 <= len(data):
        size, kind = struct.unpack_from("=IH", data, at)
        here, end = at + 20, at + size
        while kind == (3 << 8 | _PACKET) and here + 4 <= end:
            length, what = struct.unpack_from("=HH", data, here)
            if what == 1:  # NFQA_PACKET_HDR
                out.append(struct.unpack_from(">I", data, here + 4)[0])
                break
            here += (length + 3) & ~3
        at += max((size + 3) & ~3, 16)
    return out


def hold(delay: float) -> None:
    """Let each packet of the queue of this namespace go `delay` seconds after it came (within a
    tick, right on average), in order, until SIGTERM."""
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)  # NETLINK_NETFILTER
    link.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    link.setsockopt(270, 5, 1)  # NETLINK_NO_ENOBUFS
    link.bind((0, 0))
    link.send(_message(_CONFIG, _attribute(1, struct.pack(">BBH", 1, 0, 0))))  # bind to the queue
    modes = _attribute(2, struct.pack(">IB", 64, 1))  # headers only
    modes += _attribute(3, struct.pack(">I", 1 << 17))  # how many may wait
    # aggregates stay whole
    modes += _attribute(4, struct.pack(">I", 4)) + _attribute(5, struct.pack(">I", 4))
    link.send(_message(_CONFIG, modes))
    with contextlib.suppress(OSError):
        os.nice(-15)  # packets must leave on time, whatever else wants the core
    print("ready", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    waiting: collections.deque[tuple[float, int]] = collections.deque()
    while True:
        # It shares a core with what is measured: while packets wait it looks once a tick.
        slept = 0.0
        if waiting:
            slept = max(min(waiting[0][0] - time.monotonic(), TICK), TICK / 2)
            time.sleep(slept)
        else:
            select.select([link], [], [])
        now = time.monotonic() - slept / 2  # when what is there has come, on average
        while len(waiting) < 4096:
            try:
                data = link.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                continue
            waiting.extend((now + delay, number) for number in _numbers(data))
        last, now = None, time.monotonic() + TICK / 4
        while waiting and waiting[0][0] <= now:
            last = waiting.popleft()[1]
        if last is not None:  # one verdict for all up to this number
            link.send(_message(_VERDICTS, _attribute(2, struct.pack(">II", _ACCEPT, last))))


if __name__ == "__main__":
    hold(float(sys.argv[1]))
