"""The thread in which exchanges run, in order, so that training can go on meanwhile and signals
still reach the main thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any

from ..errors import PeerLost
from .peers import PeerGroup


class CommWorker:
    """One worker thread that runs exchanges in order and counts how long they were under way and
    how long training waited.

    A daemon thread: an executor's would hold an interpreter that wants to end until a lost peer
    times out.
    """

    def __init__(self, peers: PeerGroup):
        self.peers = peers
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            (job, future), task = task, None
            start, result, failure = time.perf_counter(), None, None
            try:
                result = job()
            except BaseException as error:  # handed to the thread that waits
                failure = error
            self.peers.meter.seconds_exchanging += time.perf_counter() - start
            del job  # and what it holds, before the thread that waits goes on
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            del future, result, failure

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` after all earlier ones; its result or error is in the future."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def wait(self, future: Future[Any], gone: Callable[[], str] = lambda: "") -> Any:
        """Block until `future` is done; the seconds count as waiting.

        Args:
            gone: asked twice a second; why it will never be done, empty if it may be.

        Raises:
            PeerLost: it will not. What else the job has raised.
        """
        start = time.perf_counter()
        try:
            while True:
                try:
                    return future.result(0.5)
                except Late:
                    if future.done():
                        return future.result()
                    if reason := gone():
                        raise PeerLost(f"{reason}: what is waited for will not come") from None
        finally:
            self.peers.meter.seconds_waiting += time.perf_counter() - start

    def close(self) -> bool:
        """Let what was submitted end, then drop thread and process group; False if the thread hangs
        on a silent peer and is left behind.
        """
        self._jobs.put(None)
        self._thread.join(5.0)
        self.peers.release()
        return not self._thread.is_alive()
