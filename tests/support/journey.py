r"""The way of one step, of a checkpoint, of a lost island or of a newcomer through the files of the
package, as docs/architecture.md counts it.

    fsdp-demo rehearse --islands 2 --procs 1 -- tests/support/journey.py step demo
    fsdp-demo rehearse --islands 2 --procs 1 -- \
        tests/support/journey.py step streaming_diloco period=10 delay=5 layers=1
    fsdp-demo rehearse --islands 2 --procs 1 -- tests/support/journey.py save FOLDER
    fsdp-demo rehearse --islands 3 --procs 1 -- tests/support/journey.py load FOLDER
    fsdp-demo rehearse --islands 3 --procs 1 -- tests/support/journey.py death EMPTY_FOLDER
    fsdp-demo rehearse --islands 3 --procs 1 -- tests/support/journey.py newcomer EMPTY_FOLDER

What counts is a function of the package that is entered for the first time, in any thread. What the
threads that exchange and that move messages have entered stands where they were given their work;
what other threads have entered stands behind all that, thread by thread. A function whose body is
one simple statement looks something up or hands on: it does not count. Functions that follow
each other in one file are a stay. A stay in a file that was left before is a return.

Who reads breadth first, in each file all that the way enters there, opens a file again only if
files call each other in a circle.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import zmq
from torch import nn

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager, load_exchange, save_exchange
from fsdp_demo.elastic.chunks import Streams

ROOT = Path(fsdp_demo.__file__).parent
THREADS = {"CommWorker.submit": "exchange", "NetworkLoop.do": "network"}
"""Functions that give work to a thread: behind them stands what that thread has entered."""

FOLLOW = getattr(threading, "setprofile_all_threads", threading.setprofile)  # of Python 3.12


BY_THE_CLOCK = ("presence",)
"""Threads that tell the store, by the clock, that the island lives: they have no part in a step."""
HEARTBEATS = {"net/tcp.py"}  # entered twice a second, whatever a step does
OF_THE_LOG = "Voice."  # the handler that writes lines of the log has no part in what they say


class Journey:
    """Follows all threads of this process inside `with`. Make it before they are started: before
    Python 3.12 a thread that runs already cannot be followed, and one that did is an error.

    Attributes:
        ordinary: files that do not count in `beyond`.
        apart: threads that are not followed.
    """

    def __init__(self) -> None:
        self._entered: defaultdict[str, dict[tuple[str, str, int], None]] = defaultdict(dict)
        self._calls: set[tuple[str, str]] = set()
        self._on = False
        self.ordinary: set[str] = set()
        self.apart: tuple[str, ...] = ()
        self._before = {*threading.enumerate()} - {threading.current_thread()}
        FOLLOW(self._look)

    def __enter__(self) -> Journey:
        unseen = [thread.name for thread in self._before if thread.is_alive()]
        assert not unseen or FOLLOW is not threading.setprofile, f"not followed: {unseen}"
        self._on = True
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: Any) -> None:
        self._on = False
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._on or event != "call" or not frame.f_code.co_filename.startswith(str(ROOT)):
            return
        if (thread := threading.current_thread().name) in self.apart:
            return
        entered = self._entered[thread]
        code, name = frame.f_code, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        entered[code.co_filename, name, code.co_firstlineno] = None
        # what is defined inside another function is read there
        if counts(code) and "<locals>" not in name:
            above = frame.f_back
            while above is not None and not (
                above.f_code.co_filename.startswith(str(ROOT)) and counts(above.f_code)
            ):
                above = above.f_back
            if above is not None and above.f_code.co_filename != code.co_filename:
                self._calls.add((short(above.f_code.co_filename), short(code.co_filename)))

    @property
    def stays(self) -> list[tuple[str, list[str]]]:
        """(file below the package, functions), in order."""
        out: list[tuple[str, list[str]]] = []
        others = set(THREADS.values())
        way = [*self._way("MainThread", others)]
        by_itself = {"MainThread", *THREADS.values(), *BY_THE_CLOCK}
        for thread in sorted({*self._entered} - by_itself | others):
            way += self._entered[thread]
        for file, name, line in dict.fromkeys(way):
            where = short(file)
            if line not in works(file) or where in HEARTBEATS or name.startswith(OF_THE_LOG):
                continue
            if not out or out[-1][0] != where:
                out.append((where, []))
            out[-1][1].append(name.replace(".<locals>", ""))
        return out

    def _way(self, thread: str, others: set[str]) -> Iterator[tuple[str, str, int]]:
        """What a thread has entered, with what `others` have where it gave them their work."""
        for entered in self._entered[thread]:
            yield entered
            if (other := THREADS.get(entered[1], "")) in others:
                others.remove(other)
                yield from self._way(other, others)

    @property
    def threads(self) -> set[str]:
        """Names of the threads that have entered a function of the package."""
        return {thread for thread, entered in self._entered.items() if entered}

    def entered_by(self, thread: str) -> set[str]:
        """Files whose functions that count this thread has entered."""
        return {short(file) for file, _, line in self._entered[thread] if line in works(file)}

    @property
    def rooms(self) -> set[str]:
        """What was entered, as docs/architecture.md writes it: `file.py:Class.function`."""
        ways = self._entered.values()
        return {f"{short(file)}:{name}" for entered in ways for file, name, _ in entered}

    @property
    def files(self) -> set[str]:
        """Files of the stays."""
        return {file for file, _ in self.stays}

    @property
    def beyond(self) -> set[str]:
        """Files that the `ordinary` way, or part of the way, does not enter."""
        return self.files - self.ordinary

    def leave_behind(self) -> None:
        """What was entered so far is the ordinary way; the journey begins anew."""
        self.ordinary = self.files
        self._entered.clear()
        self._calls.clear()

    @property
    def order(self) -> list[str]:
        """The files so that each stands before those that it calls; without those in a circle, or
        behind one.
        """
        out: list[str] = []
        left = list(dict.fromkeys(file for file, _ in self.stays))
        while ready := next(
            (f for f in left if not any(b == f and a in left for a, b in self._calls)), ""
        ):
            out.append(ready)
            left.remove(ready)
        return out

    def show(self) -> None:
        seen: set[str] = set()
        for i, (file, names) in enumerate(self.stays):
            print(f"{i + 1:3} {'^' if file in seen else ' '} {file:34} {', '.join(names)}")
            seen.add(file)
        floors = Counter(file.partition("/")[0] for file in seen)
        print(
            f"{len(seen)} files, {len(self.stays)} stays, {len(self.stays) - len(seen)} returns; "
            f"files of each package: {dict(floors)}"
        )
        print(f"threads: {', '.join(sorted(self.threads))}")
        if self.ordinary:
            beyond = sorted(self.beyond)
            print(f"beyond the ordinary way: {len(beyond)} files: {' '.join(beyond)}")
        print(f"each once, in this order: {' '.join(self.order)}")
        print(f"in a circle, or behind one: {' '.join(sorted(seen - {*self.order})) or 'none'}")


def written(title: str) -> set[str]:
    """The rooms of a journey of docs/architecture.md, whose title begins so."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    journey = text.partition(f"### {title}")[2].partition("\n### ")[0]
    found = set(re.findall(r"`([a-z_/]+\.py:[A-Za-z_.]+)`", journey))
    assert found, title
    return found


def short(file: str) -> str:
    """Below the package."""
    return Path(file).relative_to(ROOT).as_posix()


def counts(code: CodeType) -> bool:
    """Whether a function does more than one simple statement."""
    return code.co_firstlineno in works(code.co_filename)


@cache
def works(file: str) -> set[int]:
    """First lines of the functions of a file that do more than one simple statement."""
    out = set()
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if len(body) > 1 or any(hasattr(statement, "body") for statement in body):
                out.add(min([node.lineno, *(d.lineno for d in node.decorator_list)]))
    return out


@cache
def before_ranks() -> None:
    """All files are parsed once for all ranks."""
    for file in ROOT.rglob("*.py"):
        works(str(file))


class Small(nn.Module):
    """Two layers whose matrices have whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Run:
    """A small run on this island; `journey` is there before its threads."""

    def __init__(
        self, name: str, topology: Any = None, journey: Journey | None = None, **changes: Any
    ):
        self.journey, self.model = journey or Journey(), Small()
        config = fsdp_demo.preset(name, **changes)
        self.delay = config.channels[0].schedule.delay
        self.optimizer = fsdp_demo.base_optimizer(config, self.model.named_parameters(), lr=1e-3)
        self.exchange = fsdp_demo.attach(
            self.optimizer, config, model=self.model, topology=topology
        )

    def step(self) -> None:
        generator = torch.Generator().manual_seed(
            100 * self.exchange.step + self.exchange.topology.island
        )
        self.model(torch.randn(4, 64, generator=generator)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step(name: str, **changes: Any) -> Journey:
    """From the step in which something leaves to the one that applies it."""
    run = Run(name, **changes)
    run.step()
    while run.exchange.next_exchange() > run.exchange.step:
        run.step()
    with run.journey as journey:
        for _ in range(run.delay + 1):
            run.step()
    run.exchange.finish()
    return journey


def save(folder: str) -> Journey:
    """A checkpoint of the exchange, while a message is under way, in a run that has begun anew."""
    topology = fsdp_demo.Topology.from_env()
    checkpoints = CheckpointManager(Path(folder) / f"island{topology.island}", topology)
    run = Run("streaming_diloco", topology, period=4, delay=3, layers=1)
    checkpoints.resume_point(resume=False)
    for _ in range(5):
        run.step()
    with run.journey as journey:
        checkpoints.save(
            run.exchange.step, lambda part: save_exchange(part / "exchange", run.exchange)
        )
    run.exchange.finish()
    checkpoints.close()
    return journey


def load(folder: str) -> Journey:
    """What `attach(state=...)` does with it: the islands are connected before, and agree first on a
    step.
    """
    topology = fsdp_demo.Topology.from_env()
    checkpoints = CheckpointManager(Path(folder) / f"island{topology.island}", topology)
    run = Run("streaming_diloco", topology, period=4, delay=3, layers=1)
    with run.journey as journey:
        found = checkpoints.resume_point(resume="auto")
        if found is not None and found.folder is not None:
            saved = load_exchange(found.folder / "exchange")
            run.exchange.rejoin(saved, saved.step, run.model)
        else:  # this island takes over from the others
            run.exchange.rejoin(None, 0, run.model)
    run.exchange.finish()
    checkpoints.close()
    return journey


def wait_for(*paths: Path) -> None:
    """Until these files are there."""
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def death(folder: str) -> Journey | None:
    """What an island enters from the death of another one in mid-exchange until it has delivered
    that message, and the next, which is the first without the other one. Of three islands the
    second dies in its fifth step, when it has sent its contribution to the first one only. The
    training thread only waits for that, and is not followed. Ordinary are the steps before, in all
    threads.
    """
    island, lost, steps = int(os.environ["ISLAND_RANK"]), 1, 4
    # a process of its own, so that its end tells the launcher nothing
    if island == lost and (child := os.fork()):
        os.waitpid(child, 0)
        return None
    dying = Path(folder) / "dying"
    watching = [Path(folder) / f"watching{other}" for other in (0, 2)]

    def watch() -> None:
        wait_for(dying)
        run.journey.__enter__()
        watching[island // 2].touch()

    run = Run("demo")
    watcher = threading.Thread(target=watch, daemon=True)
    run.step()
    with run.journey as journey:
        for _ in range(steps - 1):
            run.step()
    if island == lost:
        die_at_second_piece(dying, watching)
    journey.leave_behind()
    journey.apart = ("MainThread",)
    watcher.start()
    for _ in range(2):
        run.step()
    journey.__exit__()
    assert run.exchange.peers.slots == (0, 2)
    run.exchange.finish()
    return journey


def die_at_second_piece(dying: Path, watching: list[Path]) -> None:
    """From now on: when this island hands over its second piece, the first one has left, all others
    wait for the second one, and this process ends.
    """
    send, sent = Streams.send, []

    def send_or_die(streams: Streams, *piece: Any) -> None:
        sent.append(piece)
        if len(sent) < 2:
            send(streams, *piece)
            return
        for wire in list(streams._poller.wires):
            wire.serve(zmq.POLLOUT)
        time.sleep(0.5)  # the others have sent theirs
        dying.touch()
        wait_for(*watching)
        os._exit(9)

    Streams.send = send_or_die  # type: ignore[method-assign]


def newcomer(folder: str) -> Journey:
    """Two islands train, and a third one joins them. Of the newcomer: what it enters inside
    `attach`; ordinary are the `attach` of an island that begins the run, and some steps. Of the
    others (the first one is the donor): what they enter in the steps until it takes part; ordinary
    are the steps before it comes.
    """
    os.environ |= {"ISLAND_COUNT": "2", "ISLAND_SLOTS": "3"}
    begun, end = Path(folder) / "begun", Path(folder) / "end"
    island = int(os.environ["ISLAND_RANK"])
    comes = island == 2
    if comes:
        wait_for(begun)
    journey = Journey()
    with journey:
        run = Run("demo", journey=journey)
    exchange = run.exchange
    if comes:
        journey.ordinary = {*json.loads(begun.read_text())}
    else:
        attached = journey.files
        run.step()
        journey.leave_behind()
        with journey:
            for _ in range(3):
                run.step()
        journey.leave_behind()
        if island == 0:
            write(begun, json.dumps(sorted(attached | journey.ordinary)))
        with journey:
            while len(exchange.peers.slots) < 3:
                time.sleep(0.05)
                run.step()
    if island == 0:
        write(end, str(exchange.step + 10))
    while not end.exists() or exchange.step < int(end.read_text()):
        time.sleep(0.05)
        run.step()
    exchange.finish()
    return journey


def write(path: Path, text: str) -> None:
    """The file is there as a whole."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def main(what: str, *given: str) -> None:
    """`what` with its arguments on this island; the first island prints, and the newcomer."""
    torch.set_num_threads(1)
    changes = {key: int(value) for key, value in (text.split("=") for text in given if "=" in text)}
    ways = {"step": step, "save": save, "load": load, "death": death, "newcomer": newcomer}
    journey = ways[what](*[text for text in given if "=" not in text], **changes)
    island = int(os.environ["ISLAND_RANK"])
    if journey is not None and (island == 0 or (what == "newcomer" and island == 2)):
        journey.show()


if __name__ == "__main__":
    main(*sys.argv[1:])
