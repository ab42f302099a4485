"""Sockets of a hub are touched by its thread alone, whoever asks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fsdp_demo.peers.poller import Poller

FILES = Path("/proc/self/fd")


def test_connections_are_closed_and_added_by_several_threads() -> None:
    """A newcomer's worker waits while its other thread drops a member that was lost: "Socket
    operation on non-socket" once.
    """
    poller, errors, stop = Poller(), list[BaseException](), threading.Event()

    def churn() -> None:
        wires = [poller.add(0, True) for _ in range(8)]
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
    time.sleep(2.0)
    stop.set()
    for thread in threads:
        thread.join(10)
    poller.close(0)
    assert not errors and not poller.thread.is_alive()


def test_a_job_raises_where_it_was_asked_for() -> None:
    poller = Poller()
    with pytest.raises(ZeroDivisionError):
        poller.run(lambda: 1 // 0)
    assert poller.run(lambda: poller.run(threading.current_thread)) is poller.thread
    poller.close(0)
    with pytest.raises(RuntimeError, match="the connections were closed"):
        poller.run(lambda: None)


def test_a_wait_ends_when_the_hub_is_closed() -> None:
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
