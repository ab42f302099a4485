"""The thread of exchanges: what it counts as waiting for the link."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import fsdp_demo.exchange.sending as worker_module
from fsdp_demo.exchange.sending import CommWorker, Exchanging


class Clock:
    """`time` with seconds that pass where the test says so; `asked` is set when the thread that
    trains reads it.
    """

    def __init__(self) -> None:
        self.now, self.asked = 0.0, threading.Event()

    def perf_counter(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self.asked.set()
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker_module, "time", clock)
    return clock


@pytest.fixture
def worker() -> Iterator[CommWorker]:
    meter = SimpleNamespace(seconds_waiting=0.0, seconds_exchanging=0.0)
    peers: Any = SimpleNamespace(meter=meter, release=lambda: None)
    worker = CommWorker(peers)
    yield worker
    assert worker.close()


def test_worker_device_time_is_no_link_time(clock: Clock, worker: CommWorker) -> None:
    """The time of the device is no time of the link. The host runs ahead of a GPU: while that ends
    the step, nothing is on the wire.
    """

    def staged() -> str:
        assert clock.asked.wait(60)  # training waits already
        clock.now += 5.0
        return "copy"

    def job(found: str) -> str:
        clock.now += 3.0
        return f"{found} sent"

    assert worker.wait(worker.submit(job, staged)) == "copy sent"
    meter = worker.peers.meter
    assert (meter.seconds_waiting, meter.seconds_exchanging) == (3.0, 3.0)


def test_worker_counts_an_earlier_exchange_as_link_time(clock: Clock, worker: CommWorker) -> None:
    """An exchange behind another one on the wire waits for the link, before its copy is looked
    at.
    """

    def earlier() -> None:
        assert clock.asked.wait(60)
        clock.now += 7.0

    def staged() -> str:
        clock.now += 5.0
        return "copy"

    worker.submit(earlier)
    worker.wait(worker.submit(str.upper, staged))
    assert worker.peers.meter.seconds_waiting == 7.0


def test_worker_device_failure_is_raised(worker: CommWorker) -> None:
    """The error of a device that fails is raised where its exchange is waited for."""

    def staged() -> None:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        worker.wait(worker.submit(print, staged))


@pytest.mark.parametrize(("staging", "seconds"), [
    ((2.0, 4.0), 8.0),  # within
    ((-5.0, 3.0), 7.0),  # begun before training waited
    ((8.0, 99.0), 8.0),  # not over yet
    ((-5.0, -1.0), 10.0),  # over before
    ((float("inf"),) * 2, 10.0),  # not begun
])  # fmt: skip
def test_worker_seconds_waited(staging: tuple[float, float], seconds: float) -> None:
    """The seconds waited for the link leave out those in which the device still made the copy."""
    future = Exchanging()
    future.staging = staging
    assert future.waited(0.0, 10.0) == seconds
