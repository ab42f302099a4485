"""Several islands on one machine: each launched on its own as `rehearsal.py` says, one store.

Their output is prefixed by island.
"""

from __future__ import annotations

import codecs
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..errors import counted
from ..status import DECIDE, SAVED
from ..status import FOLDER as STATUS_FOLDER
from ..store.server import FILE
from .processes import (
    LAUNCHED,
    adopt_orphans,
    descendants,
    end_with_parent,
    reap,
    send,
    shell_status,
    start,
)
from .rehearsal import LOCALHOST, Rehearsal, command, devices, environment

# Output of several islands: whole lines with the island's name. A progress bar rewrites its line
# with carriage returns; of the first island's bar a line is shown now and then.

BAR_EVERY = 10.0
"""Seconds between two lines of a progress bar."""

_END = re.compile(r"\r\n|\n|\r")


class Splitter:
    """Bytes of one island, in whatever pieces they come, into lines.

    >>> Splitter().feed(b"one\\n 10%\\r 20%\\rtwo", final=True)
    [('one', False), (' 10%', True), (' 20%', True), ('two', False)]
    """

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""

    def feed(self, data: bytes, *, final: bool = False) -> list[tuple[str, bool]]:
        """Complete lines as (text, passing); a passing one ended in a carriage return and will be
        written over.
        """
        self.text += self.decoder.decode(data, final)
        lines, begin = [], 0
        for end in _END.finditer(self.text):
            if end.group() == "\r" and end.end() == len(self.text) and not final:
                break  # the line feed of a "\r\n" may come with the next piece
            lines.append((self.text[begin : end.start()], end.group() == "\r"))
            begin = end.end()
        self.text = self.text[begin:]
        if final and self.text:
            lines.append((self.text, False))
            self.text = ""
        return lines


class Console:
    """Writes prefixed lines to a stream, and a line of a progress bar now and then."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.next_bar = 0.0

    def note(self, text: str) -> None:
        """A line of the rehearsal itself."""
        self.show("rehearse", text)

    def show(self, name: str, text: str, *, passing: bool = False, first: bool = False) -> None:
        """One line of `name`; one that passes is shown only for the first island. A line that has
        the name already (`exchange/summary.py`) gets no second one.
        """
        text = text.removeprefix(f"[{name}] ")
        if passing:
            text = text.strip()
            if not (first and text) or time.monotonic() < self.next_bar:
                return
            self.next_bar = time.monotonic() + BAR_EVERY
        print(f"[{name}] {text}", file=self.stream, flush=True)


STOP = 40.0
"""Seconds between SIGTERM and SIGKILL: the launchers give their ranks 30 of them."""


@dataclass
class RehearsedIsland:
    """One launched island and what is known of it."""

    name: str
    process: subprocess.Popen[bytes]
    status: int | None = None
    stopped: bool = False


class Supervisor:
    """Starts store and islands, passes output to `stream`, and leaves no process behind."""

    def __init__(self, plan: Rehearsal, stream: TextIO) -> None:
        self.plan, self.console = plan, Console(stream)
        self.folder = Path(tempfile.mkdtemp(prefix="fsdp-demo-"))
        self.store: subprocess.Popen[bytes] | None = None
        self.endpoint = ""  # of the store
        self.islands: list[RehearsedIsland] = []
        self.ended: list[RehearsedIsland] = []  # in the order in which they ended
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self.stop_at: float | None = None  # SIGTERM is due then
        self.kill_at: float | None = None  # SIGKILL is due then; set when SIGTERM was sent
        self.store_lost, self.started = False, time.monotonic()
        self.launched = time.time()

    def on_signal(self, number: int, frame: object) -> None:
        self.signals.append(number)

    def run(self) -> int:
        """Run the rehearsal to its end; returns the worst exit status. Raises ValueError: the store
        did not start.
        """
        adopt_orphans()
        ends = signal.SIGINT, signal.SIGTERM
        before = {number: signal.signal(number, self.on_signal) for number in ends}
        try:
            self.launch_store()
            self.await_store()
            self.start_islands()
            while any(island.status is None for island in self.islands):
                self.pass_output(0.1)
                self.watch()
            self.drain()
            return self.verdict()
        finally:
            self.leave_nothing()
            for number, handler in before.items():
                signal.signal(number, handler)

    # Start

    def launch_store(self) -> None:
        words = [sys.executable, "-m", "fsdp_demo.cli", "store", "--bind", f"{LOCALHOST}:0"]
        words += ["--file", str(self.folder / FILE), "--port-file", str(self.folder / "port")]
        self.store = subprocess.Popen(
            [*words, "--quiet"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # as an island's (`processes.start`)
            preexec_fn=end_with_parent,
        )

    def await_store(self) -> None:
        port_file = self.folder / "port"
        assert self.store is not None
        deadline = time.monotonic() + 120
        while not port_file.exists() and not self.signals:
            if self.store.poll() is not None or time.monotonic() > deadline:
                raise ValueError(
                    f"the store did not start (status {self.store.poll()}); its error is above"
                )
            time.sleep(0.05)
        self.endpoint = f"{LOCALHOST}:{port_file.read_text().strip()}" if port_file.exists() else ""

    def start_islands(self) -> None:
        if self.signals:
            return
        visible, where = devices(self.plan)
        link = f", link {self.plan.link}" if self.plan.link else ""
        of = (
            f"{counted(self.plan.islands, 'island')} of "
            f"{counted(self.plan.procs, 'process', 'processes')}"
        )
        self.console.note(f"{of} {where}, {self.plan.launcher}, store at {self.endpoint}{link}")
        for number in range(self.plan.islands):
            env = environment(self.plan, number, self.endpoint, self.folder, visible[number])
            env[LAUNCHED] = str(self.launched)
            Path(env[STATUS_FOLDER]).mkdir()
            words = command(self.plan, self.folder, bool(visible[number]))
            process = start(words, env)
            island = RehearsedIsland(env["ISLAND_NAME"], process)
            self.islands.append(island)
            for pipe in (process.stdout, process.stderr):
                # Apart from each other: a progress bar on one leaves lines on the other whole.
                assert pipe is not None
                self.selector.register(pipe, selectors.EVENT_READ, (island, Splitter()))

    # While it runs

    def pass_output(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            island, splitter = key.data
            data = os.read(key.fd, 65536)
            if not data:
                self.selector.unregister(key.fileobj)
            for text, passing in splitter.feed(data, final=not data):
                self.console.show(
                    island.name, text, passing=passing, first=island is self.islands[0]
                )

    def watch(self) -> None:
        now = time.monotonic()
        for island in self.islands:
            if island.status is None and island.process.poll() is not None:
                self.has_ended(island, now)
        if self.store is not None and self.store.poll() is not None and not self.store_lost:
            self.store_lost, self.stop_at = True, now
            self.console.note("the store has ended; ending the islands")
        if self.signals and self.kill_at is None:
            if self.stop_at is None or self.stop_at > now:
                self.console.note(
                    f"{signal.Signals(self.signals[0]).name}: ending the islands, once more to "
                    "kill them"
                )
            self.stop_at = now
        if self.kill_at is not None and (now >= self.kill_at or len(self.signals) > 1):
            send(self.everything(), signal.SIGKILL)
        elif self.stop_at is not None and now >= self.stop_at and self.kill_at is None:
            self.stop_islands(now)

    def has_ended(self, island: RehearsedIsland, now: float) -> None:
        island.status = shell_status(island.process.wait())
        self.ended.append(island)
        if island.status == 0:
            return
        self.console.note(
            f"{island.name} ended with status {island.status} after {now - self.started:.0f} s"
        )
        # Its launcher is gone; ranks that it left behind are told to end now (and save).
        send(descendants(os.getpid(), leave_out=self.known()), signal.SIGTERM)
        if island.status != DECIDE:
            return  # the others train on
        if self.stop_at is None and any(other.status is None for other in self.islands):
            self.stop_at = now + self.plan.grace
            self.console.note(
                f"the others have {self.plan.grace:g} s to notice, save and end by themselves"
            )

    def stop_islands(self, now: float) -> None:
        self.kill_at = now + STOP
        for island in self.islands:
            if island.status is None:
                # Once, and to the launcher only: it passes it on, and a second one would interrupt
                # that.
                island.stopped = True
                send([island.process.pid], signal.SIGTERM)

    def known(self) -> list[int]:
        started = [self.store, *(island.process for island in self.islands)]
        return [process.pid for process in started if process is not None]

    def everything(self) -> list[int]:
        """All processes of the islands."""
        launchers = [island.process.pid for island in self.islands if island.process.poll() is None]
        store = [self.store.pid] if self.store else []
        return list({*launchers, *descendants(os.getpid(), leave_out=store)})

    # End

    def drain(self) -> None:
        """Pass on what is in the pipes, for a second: a process left may hold one open."""
        until = time.monotonic() + 1
        while self.selector.get_map() and time.monotonic() < until:
            self.pass_output(0.05)

    def verdict(self) -> int:
        """The worst status: of islands that ended by themselves, 78 (somebody must decide) being
        worse than any other and 75 (saved) better; else that of the signal."""
        statuses = ", ".join(f"{island.name} {island.status}" for island in self.islands)
        own = [island.status for island in self.ended if island.status and not island.stopped]
        told = [island.status for island in self.ended if island.status and island.stopped]
        if own:
            others = (status for status in own if status != SAVED)
            worst = DECIDE if DECIDE in own else next(others, SAVED)
        elif told and set(told) == {SAVED}:
            worst = SAVED
        elif self.signals:
            worst = 128 + self.signals[0]
        else:
            worst = 1 if self.store_lost else 0
        self.console.note(
            f"ended after {time.monotonic() - self.started:.0f} s with status {worst} ({statuses})"
        )
        return worst

    def leave_nothing(self) -> None:
        """End all processes that still run, whatever happened before; the store last."""
        over = all(island.status is not None for island in self.islands)
        send(self.everything(), signal.SIGTERM if over else signal.SIGKILL)
        until = time.monotonic() + 5
        while self.everything() and time.monotonic() < until:
            self.poll_all()
        send(self.everything(), signal.SIGKILL)
        if self.store is not None:
            send([self.store.pid], signal.SIGTERM)
            try:
                self.store.wait(5)
            except subprocess.TimeoutExpired:
                self.store.kill()
        self.poll_all()
        self.selector.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def poll_all(self) -> None:
        for island in self.islands:
            island.process.poll()
        reap(self.known())
        time.sleep(0.05)
