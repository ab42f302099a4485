"""A small Slurm on this machine: its controller and a slurmd per node, as the current user, without
munge. The programs come from PATH, from the folder FSDP_DEMO_SLURM (Debian packages unpacked), or
from apt, unpacked below the system's tmp.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fsdp_demo.launch.processes import descendants, reserve_port, send

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 libnuma1 liblz4-1"

CONF = """
ClusterName=test SlurmctldHost={host}(127.0.0.1) SlurmctldPort={port} SlurmUser={user}
SlurmdUser={user} AuthType=auth/none CredType=cred/none AuthInfo=cred_expire=5 MpiDefault=none
ProctrackType=proctrack/linuxproc TaskPlugin=task/none SelectType=select/cons_tres
SelectTypeParameters=CR_CPU SlurmdParameters=config_overrides JobRequeue=1 ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2,sched_min_interval=0 SlurmdTimeout=9
MessageTimeout=5 KillWait=60 StateSaveLocation={folder}/state SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log SlurmdLogFile={folder}/%n.log
"""
# A node: it ends by SIGKILL alone, and is the parent of all that its daemon leaves behind.
NODE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
while True:
    os.wait()
"""


def _unpacked() -> Path:
    """The folder with Slurm's packages, from apt. Skips where it gives none."""
    cache = Path(tempfile.gettempdir()) / f"fsdp-demo-slurm-{os.getuid()}"
    if cache.is_dir():
        return cache
    with tempfile.TemporaryDirectory() as folder:
        words = ["apt-get", "download", *PACKAGES.split()]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"no Slurm on PATH, and apt gives none: {done.stderr.strip()[-200:]}")
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, f"{folder}/root"], check=True, timeout=60)
        with suppress(OSError):  # another process was first
            os.rename(f"{folder}/root", cache)
    return cache


def environment() -> dict[str, str]:
    """Variables under which Slurm's programs are found. Skips where there are none."""
    env = {n: v for n, v in os.environ.items() if not n.startswith(("ISLAND_", "SLURM", "PET_"))}
    given = env.get("FSDP_DEMO_SLURM", "")
    if not given and shutil.which("slurmctld"):
        return env
    if not given and not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip("no slurmctld on PATH, no folder FSDP_DEMO_SLURM and no apt to take it from")
    root = Path(given) if given else _unpacked()
    for program in root.glob("usr/sbin/*-wlm"):  # Debian's links are made at an installation
        link = program.with_name(program.name.removesuffix("-wlm"))
        if not link.exists():
            link.symlink_to(program.name)
    plugins = next(root.glob("usr/lib/*/slurm-wlm"))
    path = os.pathsep.join([f"{root}/usr/bin", f"{root}/usr/sbin", env["PATH"]])
    libraries = os.pathsep.join([str(plugins), str(plugins.parent)])
    return env | {"PATH": path, "LD_LIBRARY_PATH": libraries, "PLUGINS": str(plugins)}


class Cluster:
    """Slurm's controller, and nodes `node0`, `node1` ... of 32 processors each once they are given;
    close it.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.env = folder, environment() | {"SLURM_CONF": f"{folder}/slurm.conf"}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        host, user = socket.gethostname(), subprocess.check_output(["id", "-un"], text=True).strip()
        conf = CONF.format(host=host, user=user, port=reserve_port(), folder=folder).split()
        conf += [f"PluginDir={self.env.pop('PLUGINS')}"] if "PLUGINS" in self.env else []
        for n in range(nodes):
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={reserve_port()}"
            conf.append(f"NodeName=node{n} {place} CPUs=32 RealMemory=64000 State=UNKNOWN")
        (folder / "state").mkdir(parents=True)
        lines = [*conf, "PartitionName=all Nodes=ALL Default=YES", ""]
        (folder / "slurm.conf").write_text("\n".join(lines))
        self._controller = self._start("slurmctld", self._path("slurmctld"), "-D", "-c")

    def _path(self, program: str) -> str:
        return shutil.which(program, path=self.env["PATH"]) or program

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        out = (self.folder / f"{name}.err").open("a")
        return subprocess.Popen(words, env=self.env, stdout=out, stderr=out)

    def give(self, node: str) -> None:
        """Start this node, and wait until it is there."""
        words = [self._path("slurmd"), "-D", "-N", node, "-d", self._path("slurmstepd")]
        self.nodes[node] = self._start(node, sys.executable, "-c", NODE, *words)
        self.until(lambda: self.state(node) == "idle")

    def take(self, node: str) -> None:
        """Kill this node and all its processes, as where it loses power."""
        holder = self.nodes.pop(node)
        os.kill(holder.pid, signal.SIGSTOP)  # what is killed must not be handed to others
        send([*descendants(holder.pid), holder.pid], signal.SIGKILL)
        holder.wait()

    def ask(self, *words: str, **env: str) -> str:
        """What a program of Slurm prints."""
        done = subprocess.run(words, env=self.env | env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.log()}"
        return done.stdout

    def state(self, node: str) -> str:
        return self.ask("sinfo", "-hN", "-n", node, "-o", "%T").strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.ask("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, true: Callable[[], bool], seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.log()
            time.sleep(0.3)

    def log(self) -> str:
        """What jobs have written, and the end of the controller's log, for an error."""
        files = [*self.folder.glob("*.out"), self.folder / "slurmctld.log"]
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-4000:]}" for f in files)

    def close(self) -> None:
        for node in list(self.nodes):
            self.take(node)
        self._controller.kill()
        self._controller.wait()
