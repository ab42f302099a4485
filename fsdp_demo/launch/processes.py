"""Launchers as children of this process, which must leave no process behind; an island whose ranks
saved and left, or were killed, is started again (`supervise`).

`torchrun` starts every rank in a session of its own, so signals to the launcher's process group do
not reach the ranks, and a launcher that is killed leaves them running. On Linux the parent
therefore adopts what its children leave behind (`adopt_orphans`) and finds them through /proc.
Elsewhere only direct children are known.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..rendezvous.environment import stop_signals, whole
from ..status import FOLDER as STATUS_FOLDER
from ..status import SAVED

# The launchers by name, and how the end of their ranks is read.

ATTEMPT = "ISLAND_ATTEMPT"
"""Variable with the number of an island's start, counted from 0, where it is restarted by
`--restarts` or by an engine (`--from`).
"""

LAUNCHED = "ISLAND_LAUNCHED"
"""Variable with the moment at which the launch began, in seconds since the epoch."""

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""What torch's launchers take for a wish to end, where they are told nothing else."""

SITE = Path(__file__).parent / "site"
"""Folder of the `sitecustomize` for the processes below a launcher."""


def path_with_site(env: Mapping[str, str]) -> str:
    """PYTHONPATH with `SITE` ahead of what stands there."""
    before = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    return os.pathsep.join([str(SITE), *(place for place in before if place != str(SITE))])


LAUNCHERS = {
    "accelerate": "accelerate.commands.accelerate_cli",
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
}


HEARD = "heard"
"""File in the folder of statuses: a signal has told the launcher to end."""

PATIENCE = 40.0  # seconds that ranks which a launcher left behind get to save


def was_told(folder: str | None, status: int, before: float = math.inf) -> bool:
    """Did a rank write this status into `folder` before a moment (seconds since the epoch)?"""
    files = sorted(Path(folder).glob("rank*")) if folder else []
    return any(
        file.stat().st_mtime < before and file.read_text().strip() == str(status) for file in files
    )


def shell_status(code: int) -> int:
    """A process's return code as a shell shows it.

    >>> shell_status(-9)
    137
    """
    return 128 - code if code < 0 else code


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Send this process a signal when its parent is gone, even by SIGKILL (Linux). For
    `preexec_fn`: nothing is imported here.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an island's launcher with pipes for its output; it is told to end with this process."""
    # A session of its own: Ctrl-C in the terminal reaches only this process, which then ends the
    # others in order.
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=end_with_parent,
    )


class Launcher:
    """A launcher that runs as a child of this process. The first signal that tells this process to
    end is passed on to it, once: a second one would break off its wait for ranks that save.

    Args:
        heard: a file that the launcher makes when a signal has reached it (Slurm tells all
            processes of a step): then nothing is passed on.

    Attributes:
        told: the signal that has told this process to end; 0 for none.
    """

    def __init__(self, heard: Path | None = None) -> None:
        self._heard, self.told = heard, 0
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within this context signals to end are passed on: `SIGNALS` as they are, others of
        ISLAND_STOP_SIGNALS as SIGTERM.
        """
        numbers = {*map(signal.Signals.__getitem__, SIGNALS), *stop_signals(os.environ)}
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], env: Mapping[str, str], session: bool = False) -> int:
        """Start a launcher and wait for it; its status as a shell shows it. session: in a session
        of its own.
        """
        self._process = subprocess.Popen(
            command, env=env, start_new_session=session, preexec_fn=end_with_parent
        )
        if self.told:  # between two of them
            send([self._process.pid], self.told)
        return shell_status(self._process.wait())

    def _on_signal(self, number: int, frame: object) -> None:
        if self.told:
            return
        known = signal.Signals(number).name in SIGNALS
        self.told, end = number if known else signal.SIGTERM, time.monotonic() + 0.5
        while self._heard is not None and time.monotonic() < end:
            if self._heard.exists():
                return
            time.sleep(0.02)
        if self._process is not None:
            send([self._process.pid], self.told)


def end_strays() -> None:
    """End what a launcher that was killed has left: its ranks would live beside their successors.
    They get `PATIENCE` seconds to save. Finds them where `adopt_orphans` was called before.
    """
    end = time.monotonic() + PATIENCE
    send(descendants(os.getpid()), signal.SIGTERM)
    while (left := descendants(os.getpid())) and time.monotonic() < end:
        reap(())
        time.sleep(0.1)
    send(left, signal.SIGKILL)
    reap(())


def returns(status: int) -> bool:
    """Whether an island that ended with this status is started again: it saved and left, or was
    killed.

    >>> [status for status in (0, 1, 2, 75, 78, 137, 139) if returns(status)]
    [75, 137, 139]
    """
    return status == SAVED or status >= 128


def supervise(words: Sequence[str], restarts: int, resume: Sequence[str] = ()) -> int:
    """Run `python -m fsdp_demo.launch *words`, and again as long as it ends with a status that
    `returns`; the last status.

    Each start is a process of its own (`python -m fsdp_demo.launch` without restarts), under the
    same `ISLAND_RUN`: the islands agree in the store on the attempt in which they meet again
    (`rendezvous/attempts.py`). A signal to end ends the island and no other is started.

    Args:
        restarts: how often it is started again at most.
        resume: what is added to the script's arguments from the second start on.
    """
    adopt_orphans()
    island, before = Launcher(), whole(os.environ, ATTEMPT, 0)
    with island.listening():
        for number in range(restarts + 1):
            # none reads what an earlier one has left
            folder = Path(os.environ[STATUS_FOLDER]) / f"attempt{number}"
            folder.mkdir(parents=True, exist_ok=True)
            env = {**os.environ, ATTEMPT: str(before + number), STATUS_FOLDER: str(folder)}
            if number:
                env[LAUNCHED] = str(time.time())
            again = resume if number else ()
            status = island.run([sys.executable, "-m", "fsdp_demo.launch", *words, *again], env)
            if island.told or number == restarts or not returns(status):
                break
            sys.stderr.write(
                f"fsdp_demo.launch: ended with status {status}; restart {number + 1} of "
                f"{restarts}\n"
            )
            end_strays()
    return status


def _processes() -> Iterator[tuple[int, str, int]]:
    """Id, state (a letter) and parent's id of every process."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state parent ...": the name may hold spaces and parentheses.
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # ended meanwhile
        yield int(entry.parent.name), state, int(parent)


def descendants(of: int, *, leave_out: Iterable[int] = ()) -> list[int]:
    """Ids of all living descendants of `of`, parents first, without the trees under `leave_out`."""
    children: dict[int, list[int]] = {}
    for pid, state, parent in _processes():
        if state not in "ZX":
            children.setdefault(parent, []).append(pid)
    out, queue, skip = [], [of], set(leave_out)
    while queue:
        fresh = [pid for pid in children.get(queue.pop(0), []) if pid not in skip]
        out += fresh
        queue += fresh
    return out


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def reap(known: Iterable[int]) -> None:
    """Collect adopted children that have ended; `Popen` objects collect those in `known`."""
    known = set(known)
    for pid, state, parent in _processes():
        if state == "Z" and parent == os.getpid() and pid not in known:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def reserve_port(host: str = "127.0.0.1") -> int:
    """A free TCP port outside the range from which the system takes ports by itself, so that it is
    still free when a server listens on it later.

    A port that `bind` finds for port 0 may be an outgoing connection's before the server starts.

    Raises:
        OSError: there is none, or `host` is not this machine.
    """
    # above those of well-known services; below those of outgoing connections, if there are any
    ports = range(20_000, _first_outgoing()) or range(20_000, 1 << 16)
    for port in secrets.SystemRandom().sample(ports, min(len(ports), 100)):
        with socket.socket() as listener, suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            return port
    raise OSError(f"no free TCP port from {ports.start} to {ports.stop - 1} on {host}")


def _first_outgoing() -> int:
    """The lowest port that the system gives to outgoing connections; elsewhere than on Linux the
    lowest that any gives.
    """
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return 1 << 15
    return int(text.split()[0])
