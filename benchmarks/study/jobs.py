"""Runs of the study in parallel processes, each of one thread."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from fsdp_demo.launch.processes import end_with_parent
from study.cells import Run

SPAWN = multiprocessing.get_context("spawn")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # glibc gives large blocks back to the kernel at once, and each comes again page by page
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Of the processes that train."""

LEAVES_WITHIN = 20.0
"""Seconds for an idle process to leave. Threads of it may hold it up."""


@dataclass
class Worker:
    """A process that trains one run after the other."""

    process: SpawnProcess
    pipe: Connection
    run: Run | None = None

    @classmethod
    def start(cls, compiled: bool) -> Worker:
        here, there = SPAWN.Pipe()
        os.environ.update(ENVIRONMENT)  # what the allocator reads must be there at the start
        process = SPAWN.Process(target=_work, args=(there, compiled), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def end(self) -> None:
        """Ask an idle process to leave, so that it gives back its semaphores; kill another."""
        if self.run is None:
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(timeout=LEAVES_WITHIN)
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def result(self) -> dict[str, Any]:
        """What its run gave; `error` where it failed, or the process was killed."""
        try:
            found: dict[str, Any] = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            found = {"error": f"its process ended with status {self.process.exitcode}"}
        return found


def _work(pipe: Connection, compiled: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this one
    end_with_parent()
    logging.getLogger("fsdp_demo").setLevel(logging.WARNING)
    from study.owners import recounted
    from study.run import fresh_model, train_run

    while order := pipe.recv():
        run, folder = order
        try:
            result, cell = train_run(run, compiled, folder), run.cell
            if cell.owners:
                result = recounted(result, cell.config(), cell.replicas, fresh_model(run))
            pipe.send(result)
        except Exception:
            pipe.send({"error": traceback.format_exc()})


def train_all(
    runs: Iterable[Run],
    jobs: int,
    done: Callable[[Run, dict[str, Any]], None],
    compiled: bool = True,
    states: Callable[[Run], Path | None] = lambda run: None,
) -> None:
    """Train `runs` in `jobs` processes at once; `done(run, result)` as each ends. `states(run)` is
    the folder from which a run goes on, and in which it saves.

    After an error the process is replaced: a thread of it may hang.
    """
    queue, busy, idle = deque(runs), {}, []  # type: ignore[var-annotated]
    try:
        while queue or busy:
            while queue and len(busy) < jobs:
                worker = idle.pop() if idle else Worker.start(compiled)
                try:
                    worker.pipe.send((queue[0], states(queue[0])))
                except OSError:  # it died while it had nothing to do
                    worker.end()
                    continue
                worker.run = queue.popleft()
                busy[worker.pipe] = worker
            for pipe in wait(list(busy)):
                worker = busy[pipe]
                result = worker.result()
                assert worker.run is not None
                done(worker.run, result)
                del busy[pipe]
                if "error" in result:
                    worker.end()
                else:
                    worker.run = None
                    idle.append(worker)
    finally:
        for worker in (*busy.values(), *idle):
            worker.end()
