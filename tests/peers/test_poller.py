"""Sockets of a hub are touched by its thread alone, whoever asks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_demo.peers.poller import Poller

FILES = Path("/proc/self/fd")


def test_poller_serves_several_threads() -> None:
    """Several threads add and close connections: "Socket operation on non-socket" came once, when a
    newcomer's worker waited while its other thread dropped a member that was lost.
    """
    poller, stop = Poller(), threading.Event()

    def churn() -> None:
        wires = [poller.add(True) for _ in range(8)]
        for wire in wires:
            wire.socket.bind("tcp://127.0.0.1:*")
        for wire in wires:
            wire.close(0)

    def work() -> None:
        while not stop.is_set():
            poller.run(churn)
            # a thread of zmq lets go of the files, on a busy machine much later
            while FILES.exists() and len(list(FILES.iterdir())) > 500:
                time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work) for _ in range(2)]
        time.sleep(1.0)
        stop.set()
        for worker in workers:
            worker.result(10)
    poller.close(0)
    assert not poller.thread.is_alive()


def test_poller_job_raises_at_its_caller() -> None:
    """The error of a job is raised by the call that asked for it."""
    poller = Poller()
    with pytest.raises(ZeroDivisionError):
        poller.run(lambda: 1 // 0)
    assert poller.run(lambda: poller.run(threading.current_thread)) is poller.thread
    poller.close(0)
    with pytest.raises(RuntimeError, match="the connections were closed"):
        poller.run(lambda: None)


def test_poller_close_ends_a_wait() -> None:
    """A wait ends when the poller is closed."""
    poller = Poller()
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(poller.wait_until, lambda: False, 60.0)
        time.sleep(0.1)
        poller.close(0)
        with pytest.raises(RuntimeError, match="^the connections were closed$"):
            wait.result(10)
