"""Sockets of a hub are touched by its thread alone, whoever asks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fsdp_demo.peers.poller import Poller

FILES = Path("/proc/self/fd")


def test_poller_serves_several_threads() -> None:
    """Several threads add and close connections: "Socket operation on non-socket" came once, when a
    newcomer's worker waited while its other thread dropped a member that was lost.
    """
    poller, errors, stop = Poller(), list[BaseException](), threading.Event()

    def churn() -> None:
        wires = [poller.add(True) for _ in range(8)]
        for wire in wires:
            wire.socket.bind("tcp://127.0.0.1:*")
        for wire in wires:
            wire.close(0)

    def work() -> None:
        try:
            while not stop.is_set():
                poller.run(churn)
                # a thread of zmq lets go of the files, on a busy machine much later
                while FILES.exists() and len(list(FILES.iterdir())) > 500:
                    time.sleep(0.01)
        except BaseException as error:  # noqa: BLE001 - any is the test's
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    stop.set()
    for thread in threads:
        thread.join(10)
    poller.close(0)
    assert not errors and not poller.thread.is_alive()


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
    poller, errors = Poller(), list[str]()

    def wait() -> None:
        with pytest.raises(RuntimeError) as error:
            poller.wait_until(lambda: False, 60.0)
        errors.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    poller.close(0)
    thread.join(10)
    assert errors == ["the connections were closed"]
