"""The islands of `chaos.py`, their store and their supervisor: processes of this machine, and what
can be done to them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos_relay import Delay, Links, address
from fsdp_demo.launch.processes import (
    adopt_orphans,
    descendants,
    reap,
    reserve_port,
    returns,
    send,
    shell_status,
)

SCRIPT = Path(__file__).with_name("chaos_island.py")
FRESH = 3.0
"""Seconds since its last step within which an island counts as training."""


_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """SIGKILL when this process is gone, however it ends: what stands still does not hear
    SIGTERM.
    """
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


@dataclass
class Life:
    """One start of an island."""

    slot: int
    number: int
    process: subprocess.Popen[bytes]
    began: float
    ended: float = float("inf")
    status: int | None = None

    def facts(self) -> dict[str, Any]:
        ended = None if self.status is None else self.ended
        return {
            "slot": self.slot,
            "life": self.number,
            "began": self.began,
            "ended": ended,
            "status": self.status,
        }


@dataclass
class Seen:
    """What an island's first rank has told in its present life."""

    life: int = -1
    step: int = -1
    at: float = 0.0  # of the last step
    attached: bool = False
    saving: bool = False
    member: bool = False  # counted in a message since it attached
    doubted: bool = False  # the others may have left it out; until it is counted in a message again
    ended: bool = False


@dataclass
class Lab:
    """Store, relays and islands.

    Attributes:
        lives: all that were started, in order. seen: by slot. facts: every line that was told, in
            order of reading.
        stopped: slots that stand still, or whose links do, by our doing.
        store_round_trip: seconds between the islands and the store; 0: as fast as it goes.
    """

    folder: Path
    islands: int
    ranks: int
    words: Sequence[str]
    dead: float
    restarts: bool = True
    relays: bool = True
    store_round_trip: float = 0.0
    lives: list[Life] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        adopt_orphans()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.seen = {slot: Seen() for slot in range(self.islands)}
        self.now: dict[int, Life] = {}
        self.links = Links()
        self.store: subprocess.Popen[bytes] | None = None
        self._port, self._offsets, self._rests = (
            reserve_port(),
            dict[Path, int](),
            dict[Path, bytes](),
        )
        self._way = (
            Delay(("127.0.0.1", self._port), self.store_round_trip / 2)
            if self.store_round_trip
            else None
        )
        self._log = (self.folder / "lab.log").open("a", buffering=1)

    # ---- start and end -------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where the islands find the store."""
        return self._at(self._way.port if self._way is not None else self._port)

    def _at(self, port: int) -> str:
        return f"127.0.0.1:{port}"

    def start(self) -> None:
        self.start_store()
        for slot in range(self.islands):
            self.start_island(slot)

    def start_store(self) -> None:
        """On the same port and file as before."""
        where = self._at(self._port)
        words = [sys.executable, "-m", "fsdp_demo.cli", "store", "--bind", where, "--quiet"]
        words += ["--file", str(self.folder / "store.sqlite")]
        self.store = self._start(words, dict(os.environ), self.folder / "store.log")

    def start_island(self, slot: int) -> None:
        number = self.now[slot].number + 1 if slot in self.now else 0
        env = dict(
            os.environ,
            ISLAND_COUNT=str(self.islands),
            ISLAND_RANK=str(slot),
        )
        env |= {
            "ISLAND_NAME": f"island{slot}",
            "ISLAND_RUN": "chaos",
            "ISLAND_ENDPOINT": self.endpoint,
            "ISLAND_ADDRESS": address(slot),
        }
        env |= {
            "ISLAND_TIMEOUT": "60",
            "ISLAND_DEAD": f"{self.dead:g}",
            "ISLAND_ATTEMPT": str(number),
            "CHAOS_LIFE": str(number),
        }
        env |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}
        if self.relays:
            env["CHAOS_DOOR"] = str(self.links.port)
        words = [sys.executable, str(SCRIPT), "--folder", str(self.folder), *self.words]
        if self.ranks > 1:
            master = ["--master-addr", "127.0.0.1", "--master-port", str(reserve_port())]
            words[:1] = [
                sys.executable,
                "-m",
                "fsdp_demo.launch",
                "torchrun",
                "--nproc-per-node",
                str(self.ranks),
                *master,
            ]
        process = self._start(words, env, self.folder / f"island{slot}.log")
        self.now[slot] = life = Life(slot, number, process, time.monotonic())
        self.lives.append(life)
        self.seen[slot] = Seen(number)
        self.note(f"island {slot}: life {number} starts, process {process.pid}")

    def _start(
        self, words: Sequence[str], env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                words,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def ask_where(self) -> None:
        """Let all ranks that live write into their logs where their threads are."""
        for slot, life in self.now.items():
            starts = [
                f
                for f in self.facts
                if f["what"] == "start" and (f["slot"], f["life"]) == (slot, life.number)
            ]
            send([f["pid"] for f in starts if f["pid"] in self.processes(slot)], signal.SIGUSR1)
        time.sleep(0.5)

    def close(self) -> None:
        """Whatever happened before, nothing runs on after this."""
        own = descendants(os.getpid())
        send(own, signal.SIGKILL)
        end = time.monotonic() + 10
        while descendants(os.getpid()) and time.monotonic() < end:
            send(descendants(os.getpid()), signal.SIGKILL)
            self._poll_processes(restart=False)
            time.sleep(0.02)
        self._poll_processes(restart=False)
        if self.store is not None:
            self.store.wait(5)
        reap(())
        self.links.close()
        if self._way is not None:
            self._way.close()
        self._log.close()

    def note(self, text: str) -> None:
        """Into the log of the lab, with the time of day as the islands' logs have it."""
        now = time.time()
        self._log.write(
            f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d} {text}\n"
        )

    # ---- what is seen --------------------------------------------------------------------------

    def poll(self) -> None:
        """Look at processes and at what the islands have told; start again what returns."""
        for path in sorted(self.folder.glob("facts-*.jsonl")):
            slot, rank = (
                int(word)
                for word in path.name.removeprefix("facts-").removesuffix(".jsonl").split(".")
            )
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            self._offsets[path] = self._offsets.get(path, 0) + len(data)
            *lines, self._rests[path] = (self._rests.get(path, b"") + data).split(b"\n")
            for line in lines:
                fact = _read(line)
                if fact is not None:
                    self.facts.append({**fact, "slot": slot, "rank": rank})
                    if rank == 0:
                        self._see(slot, fact)
        self._poll_processes(self.restarts)

    def _see(self, slot: int, fact: dict[str, Any]) -> None:
        seen, what = self.seen[slot], fact["what"]
        if fact["life"] != seen.life:
            return
        if what == "step":
            seen.step, seen.at = fact["step"], fact["time"]
        elif what == "message":
            counted = slot in fact["counted"]
            seen.member, seen.doubted = seen.member or counted, seen.doubted and not counted
        seen.attached |= what == "attached"
        seen.ended |= what == "end"
        seen.saving = what == "saving" or (seen.saving and what not in ("saved", "step"))

    def _poll_processes(self, restart: bool) -> None:
        for slot, life in list(self.now.items()):
            if life.status is None and life.process.poll() is not None:
                life.status, life.ended = shell_status(life.process.returncode), time.monotonic()
                self.note(f"island {slot}: life {life.number} has ended with status {life.status}")
                self.links.forget(slot)
                send(self._left_behind(), signal.SIGKILL)
                if restart and returns(life.status):
                    self.start_island(slot)

    def _left_behind(self) -> list[int]:
        """What a launcher that is gone has left."""
        known = [life.process.pid for life in self.now.values()]
        return descendants(os.getpid(), leave_out=[*known, self.store.pid] if self.store else known)

    def training(self, slot: int) -> bool:
        """Whether it lives, is a member for sure, is not stopped by us, and steps."""
        seen, life = self.seen[slot], self.now[slot]
        fresh = seen.member and not seen.doubted and time.monotonic() - seen.at < FRESH
        return life.status is None and slot not in self.stopped and fresh and not seen.ended

    def doubt(self, slots: Sequence[int]) -> None:
        """What was done to these may have made the others go on without them, which they find out
        at their next message.
        """
        for slot in slots:
            self.seen[slot].doubted = True

    def joining(self, slot: int) -> bool:
        """Whether it was started again and is no member yet."""
        return (
            self.now[slot].status is None
            and self.now[slot].number > 0
            and not self.seen[slot].member
        )

    def processes(self, slot: int) -> list[int]:
        """All of an island, ranks last."""
        pid = self.now[slot].process.pid
        return [pid, *descendants(pid)] if self.now[slot].status is None else []

    def rank_of(self, slot: int, number: int) -> list[int]:
        """The process of one rank."""
        starts = [
            f
            for f in self.facts
            if f["what"] == "start" and (f["slot"], f["life"]) == (slot, self.now[slot].number)
        ]
        found = [f["pid"] for f in starts if f["rank"] == number % self.ranks]
        return [pid for pid in found[-1:] if pid in self.processes(slot)]

    # ---- what is done --------------------------------------------------------------------------

    def signal(self, pids: Sequence[int], number: int) -> None:
        send(pids, number)

    def kill_store(self) -> None:
        if self.store is not None:
            self.store.kill()
            self.store.wait()

    def signal_store(self, store: subprocess.Popen[bytes] | None, number: int) -> None:
        """To the server of this start of the store, if it still runs."""
        if store is not None:
            send(descendants(store.pid), number)

    def order(self, name: str, text: str = "") -> None:
        """A file that the islands look for, in one piece."""
        part = self.folder / f".{name}"
        part.write_text(text)
        part.replace(self.folder / name)


def _read(line: bytes) -> dict[str, Any] | None:
    """A fact; None for a line that a killed process has not ended."""
    try:
        fact = json.loads(line)
    except ValueError:
        return None
    return fact if isinstance(fact, dict) and "what" in fact else None
