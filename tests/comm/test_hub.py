"""Sockets of a hub are touched by one thread at a time, whoever drives."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from fsdp_demo.comm.hub import Hub  # noqa: E402

FILES = Path("/proc/self/fd")


def test_connections_are_closed_and_added_while_another_thread_drives() -> None:
    """A newcomer's worker drives while its other thread drops a member that was lost: "Socket
    operation on non-socket" once.
    """
    hub, errors, stop = Hub(), list[BaseException](), threading.Event()

    def drive() -> None:
        try:
            while not stop.is_set():
                hub.drive(0.05, stop.is_set)
        except BaseException as error:  # noqa: BLE001 - any is the test's
            errors.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        end = time.monotonic() + 2.0
        while not errors and time.monotonic() < end:
            wires = [hub.add(0, True) for _ in range(8)]
            for wire in wires:
                wire.socket.bind("tcp://127.0.0.1:*")
            for wire in wires:
                wire.close(0)
            # a thread of zmq lets go of the files, on a busy machine much later
            while FILES.exists() and len(list(FILES.iterdir())) > 500:
                time.sleep(0.01)
    finally:
        stop.set()
        thread.join(10)
        hub.close(0)
    assert not errors


def test_who_drives_may_close_what_it_drives() -> None:
    hub = Hub()
    wire = hub.add(0, True)
    with hub.alone(), hub.alone():
        wire.close(0)
    assert wire.socket.closed
    hub.close(0)
