"""The faults that `doctor_lab.py` provokes: what is done to the network between two islands, or to
the machine of one (cores, disk, clock, release). The latter are contexts that take the command of
that island and give the one to start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.network_lab import PORT, Lab, LabError, command

# ---- the machine of an island ------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]
CGROUP = Path("/sys/fs/cgroup")
NAME = "fsdp-demo-doctor"
CORE = 0.25  # of one core
WEIGHT = 32  # of the lab's control groups, where that of others is 1
DISK = 10_000_000  # bytes per second
AHEAD = 30  # seconds
OLD = "0.0.9"


@dataclass(frozen=True)
class Call:
    """A command with its environment, its folder and its control group, as the file that takes
    process ids.
    """

    words: tuple[str, ...]
    env: dict[str, str]
    cwd: Path = ROOT
    group: Path | None = None


@contextlib.contextmanager
def untouched(call: Call, folder: Path) -> Iterator[Call]:
    """As it is."""
    yield call


def join(group: Path | None, process: int = 0) -> None:
    """Put a process (0: this one) into a control group."""
    if group is not None:
        group.write_text(str(process or os.getpid()))


@contextlib.contextmanager
def _control_group(name: str, cores: float | None = None) -> Iterator[Path]:
    """A control group that comes before others; the file that takes process ids."""
    old = CGROUP / "cpu"  # of version 1
    group = (old if old.is_dir() else CGROUP) / name
    group.mkdir(exist_ok=True)
    try:
        if old.is_dir():
            (group / "cpu.shares").write_text(str(1024 * WEIGHT))
        else:
            (group / "cpu.weight").write_text(str(100 * WEIGHT))
        if cores is not None and old.is_dir():
            (group / "cpu.cfs_quota_us").write_text(str(round(cores * 100_000)))
        elif cores is not None:
            (group / "cpu.max").write_text(f"{round(cores * 100_000)} 100000")
        yield group / "cgroup.procs"
    finally:
        with contextlib.suppress(OSError):  # somebody is still in it
            group.rmdir()


@contextlib.contextmanager
def ahead() -> Iterator[Path | None]:
    """The control group of the whole lab, so that what else this machine does is no fault. None
    where there can be none.

    A priority (nice) does not do that: with the kernel's autogroups it counts within one session.
    """
    with contextlib.ExitStack() as around:
        group = None
        with contextlib.suppress(OSError):
            group = around.enter_context(_control_group(NAME))
        yield group


@contextlib.contextmanager
def slow_core(call: Call, folder: Path) -> Iterator[Call]:
    """It may use a part of one core."""
    with contextlib.ExitStack() as around:
        try:
            group = around.enter_context(_control_group(f"{NAME}-slow", CORE))
        except OSError as error:
            raise LabError(f"no control group can limit a core here: {error}") from None
        yield replace(call, group=group)


@contextlib.contextmanager
def slow_disk(call: Call, folder: Path) -> Iterator[Call]:
    """Its `--folder` is a file system of its own on a loop device, to which few bytes per second
    may be written.
    """
    throttle = CGROUP / "blkio" / "blkio.throttle.write_bps_device"
    if not throttle.exists():
        raise LabError(f"a slow disk needs control groups of version 1 with {throttle}")
    image, mount = folder / "disk.img", folder / "disk"
    mount.mkdir()
    command("truncate", "-s", "600M", str(image))
    device = command("losetup", "--find", "--show", str(image)).strip()
    number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
    try:
        command("mkfs.ext4", "-q", device)
        command("mount", device, str(mount))
        throttle.write_text(f"{number} {DISK}\n")
        yield replace(call, words=(*call.words, "--folder", str(mount)))
    finally:
        throttle.write_text(f"{number} 0\n")
        command("umount", str(mount), check=False)
        command("losetup", "--detach", device, check=False)


@contextlib.contextmanager
def fast_clock(call: Call, folder: Path) -> Iterator[Call]:
    """Its Python tells a wall clock that is ahead. What measures durations is not touched."""
    clock = f"import time\n_now = time.time\ntime.time = lambda: _now() + {AHEAD}\n"
    (folder / "sitecustomize.py").write_text(clock)
    paths = f"{folder}{os.pathsep}{call.env['PYTHONPATH']}"
    yield replace(call, env={**call.env, "PYTHONPATH": paths})


@contextlib.contextmanager
def old_release(call: Call, folder: Path) -> Iterator[Call]:
    """It runs a copy of the package that calls itself another release."""
    copy = folder / "old"
    shutil.copytree(ROOT / "fsdp_demo", copy / "fsdp_demo")
    file = copy / "fsdp_demo" / "version.py"
    (line,) = (x for x in file.read_text().splitlines() if x.startswith("__version__"))
    file.write_text(file.read_text().replace(line, f'__version__ = "{OLD}"'))
    env = {**call.env, "PYTHONPATH": str(copy)}
    yield replace(call, env=env, cwd=copy)


# ---- the network, and all faults ---------------------------------------------------------------

NO_DISK = ("--no-disk",)


class FaultyLab(Lab):
    """Two nodes, and what can be broken between them."""

    def __init__(self) -> None:
        super().__init__(2, "doctor")

    def lines_join(self, group: Path | None) -> None:
        """Put what delays the packets into a control group."""
        for line in self._lines.values():
            join(group, line.pid)

    def node(self, node: int, *words: str) -> None:
        """Run a command on a node."""
        self._in(self._space(node), *words)

    def both(self, *words: str) -> None:
        """Run a command on both nodes."""
        for node in range(self.nodes):
            self.node(node, *words)

    def port(self, node: int, *words: str) -> None:
        """`ip link set` for the hub's end of a node's cable."""
        self._in(self.poller, "ip", "link", "set", f"p{node}", *words)

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
        machine: what is done to island 1's machine.
    """

    finding: str
    says: str
    put: Callable[[FaultyLab], None] = lambda lab: None
    about: str = ""
    rate: float | None = 400e6
    delay: float = 0.005
    address: str = ""
    words: tuple[tuple[str, ...], ...] = (NO_DISK, NO_DISK)
    machine: Callable[[Call, Path], AbstractContextManager[Call]] = untouched


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


def _no_data(lab: FaultyLab) -> None:
    """Packets of 400 bytes and more vanish on their way to node 1, but for those of the store."""
    lab.offload(False)
    large = ("-p", "tcp", "!", "--sport", str(PORT), "-m", "length", "--length", "400:65535")
    lab.node(1, "iptables", "-w", "-A", "INPUT", "-i", "eth0", *large, "-j", "DROP")


def _cut_off(lab: FaultyLab) -> None:
    """Node 1 gets nothing of a connection any more once it has carried a megabyte."""
    lab.offload(False)
    long = ("-m", "connbytes", "--connbytes", "1000000:", "--connbytes-dir", "both")
    long = (*long, "--connbytes-mode", "bytes")
    rule = ("-i", "eth0", "-p", "tcp", "!", "--sport", str(PORT), *long, "-j", "DROP")
    lab.node(1, "iptables", "-w", "-A", "INPUT", *rule)


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
        f"island 1 may use {100 * CORE:.0f} % of one core",
        about="s on island 1 (island1) and",
        words=((*NO_DISK, "--model", "small"),) * 2,
        machine=slow_core,
    ),
    "stalled": Fault(
        "stalled",
        "packets of 400 bytes and more vanish on their way to node 1",
        _no_data,
        "island 0 (island0) connects to island 1 (island1)",
    ),
    "not-measured": Fault(
        "not-measured",
        "a firewall on node 1 ends connections that have carried a megabyte",
        _cut_off,
    ),
    "unlike-versions": Fault(
        "unlike-versions",
        f"island 1 runs a copy of the package that calls itself {OLD}",
        about=f"island 1 (island1) has {OLD}",
        machine=old_release,
    ),
    "slow-disk": Fault(
        "slow-disk",
        f"{DISK / 1e6:.0f} MB/s may be written to island 1's disk",
        about="island 1 (island1) writes",
        words=(NO_DISK, ()),
        machine=slow_disk,
    ),
    "clock-offset": Fault(
        "clock-offset",
        f"the wall clock that island 1's Python tells is {AHEAD} s ahead",
        about="island 1 (island1) is",
        machine=fast_clock,
    ),
}
