"""The worker thread in which exchanges run in order: training goes on meanwhile, and signals still
reach the main thread.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from .peer_group import PeerGroup


class Exchanging(Future[Any]):
    """The future result of one exchange.

    Attributes:
        staging: begin and end (`time.perf_counter`) of the worker's wait for the device; Inf until
            then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.staging = (math.inf, math.inf)

    def stage(self, staged: Callable[[], Any]) -> Any:
        """The value of `staged`, which waits for the device; the wait is noted in `staging`."""
        begin = time.perf_counter()
        self.staging = (begin, math.inf)
        found = staged()
        self.staging = (begin, time.perf_counter())
        return found

    def waited(self, since: float, until: float) -> float:
        """Seconds of waiting for the link between two times: without those in which the device was
        still making the message.
        """
        begin, end = self.staging
        return until - since - max(0.0, min(end, until) - max(begin, since))


class CommWorker:
    """One worker thread that runs exchanges in order, and counts the seconds of exchanges and of
    waits for the link.

    It is a daemon: with an executor's thread the interpreter could not end before a lost peer times
    out.
    """

    def __init__(self, peers: PeerGroup):
        self.peers = peers
        self._jobs: queue.SimpleQueue[
            tuple[Callable[..., Any], Callable[[], Any] | None, Exchanging] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            (job, staged, future), task = task, None
            start, result, failure = time.perf_counter(), None, None
            try:
                if staged is not None:
                    job = partial(job, future.stage(staged))
                    start = time.perf_counter()
                result = job()
            except BaseException as error:  # handed to the thread that waits
                failure = error
            self.peers.meter.seconds_exchanging += time.perf_counter() - start
            del job, staged  # and what they hold, before the thread that waits goes on
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            del future, result, failure

    def submit(
        self, job: Callable[..., Any], staged: Callable[[], Any] | None = None
    ) -> Exchanging:
        """Run `job` after all earlier ones; its result or error is in the future.

        Args:
            staged: waits for the device and returns the argument of `job`. The host runs ahead of
                a GPU, so this wait for the end of the step does not count as time of the link.
        """
        future = Exchanging()
        self._jobs.put((job, staged, future))
        return future

    def wait(self, future: Exchanging) -> Any:
        """Block until `future` is done; the seconds count as waiting, but those of `staged`.

        Raises:
            What the job has raised.
        """
        start = time.perf_counter()
        try:
            return future.result()
        finally:
            self.peers.meter.seconds_waiting += future.waited(start, time.perf_counter())

    def close(self) -> bool:
        """End the thread after all submitted jobs, and close the peer group; False if the thread
        hangs on a silent peer and is left behind.
        """
        self._jobs.put(None)
        self._thread.join(5.0)
        self.peers.release()
        return not self._thread.is_alive()
