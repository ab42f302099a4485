"""What `doctor_lab.py` does to the machine of one island: its cores, its disk, its clock, its
release. Each is a context that takes the command of that island and gives the one to start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from slow_link_lab import LabError, command

ROOT = Path(__file__).resolve().parents[2]
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
