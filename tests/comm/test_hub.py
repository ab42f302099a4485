"""Sockets of a hub are touched by its thread alone, whoever asks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fsdp_demo.comm.hub import Hub

FILES = Path("/proc/self/fd")


def test_connections_are_closed_and_added_by_several_threads() -> None:
    """A newcomer's worker waits while its other thread drops a member that was lost: "Socket
    operation on non-socket" once.
    """
    hub, errors, stop = Hub(), list[BaseException](), threading.Event()

    def churn() -> None:
        wires = [hub.add(0, True) for _ in range(8)]
        for wire in wires:
            wire.socket.bind("tcp://127.0.0.1:*")
        for wire in wires:
            wire.close(0)

    def work() -> None:
        try:
            while not stop.is_set():
                hub.run(churn)
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
    hub.close(0)
    assert not errors and not hub.thread.is_alive()


def test_a_job_raises_where_it_was_asked_for() -> None:
    hub = Hub()
    with pytest.raises(ZeroDivisionError):
        hub.run(lambda: 1 // 0)
    assert hub.run(lambda: hub.run(threading.current_thread)) is hub.thread
    hub.close(0)
    with pytest.raises(RuntimeError, match="the connections were closed"):
        hub.run(lambda: None)


def test_a_wait_ends_when_the_hub_is_closed() -> None:
    hub, errors = Hub(), list[str]()

    def wait() -> None:
        with pytest.raises(RuntimeError) as error:
            hub.wait_until(lambda: False, 60.0)
        errors.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    hub.close(0)
    thread.join(10)
    assert errors == ["the connections were closed"]
