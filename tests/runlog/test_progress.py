"""The line of progress: rewritten on a terminal, plain elsewhere; it says whom an island waits for
while training stands still.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo.exchange.readings import Activity
from fsdp_demo.runlog import progress
from fsdp_demo.runlog.progress import Progress, ProgressLine, clock, line

from ..support.inside import in_threads


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(state: Activity) -> SimpleNamespace:
    return SimpleNamespace(step=0, activity=state)


def until(holds, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()


def test_progress_line_has_what_is_known() -> None:
    """The line has step, loss and activity, as far as they are known."""
    assert line(Progress(3, None), "training") == "step 3, training"
    own = line(Progress(3, 9, 2.0), "sending to 1")
    assert own == "step 3/9, loss 2.000 (this island), sending to 1"
    now = time.mktime((2026, 11, 23, 12, 0, 0, 0, 0, -1))
    assert line(Progress(3, 9), "training", now + 3600, now).endswith("training, ends 13:00")


def test_progress_closed_stream_ends_nothing() -> None:
    """A stream that takes nothing more ends no training."""
    with open("/dev/full", "w") as out:
        shown = ProgressLine(said(Activity()), 30, out)
        shown.update(loss=1.0)
        with contextlib.suppress(OSError):
            out.close()
    shown.update(loss=1.0)
    shown.write("more")
    shown.close()


def test_progress_clock_has_the_day() -> None:
    """A time on another day has its day."""
    now = time.mktime((2026, 11, 23, 12, 0, 0, 0, 0, -1))  # a Monday
    assert clock(now + 86_400, now) == "Tue 12:00" and clock(now + 1, now) == "12:00"
    assert clock(now + 9 * 86_400, now) == "2026-12-02 12:00"


def test_progress_plain_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal few lines are written."""
    monkeypatch.setattr(progress, "PLAIN_EVERY", 1e9)
    out = io.StringIO()
    shown = ProgressLine(said(Activity()), 30, out)
    for step in range(1, 31):
        shown.step(step)
        if step % 10 == 0:
            shown.update(loss=1.0, everywhere=True)
    shown.close()
    first, last = out.getvalue().splitlines()  # the first, and that of the last step
    assert first.startswith("step 10/30, loss 1.000, training, ends ")
    assert last == "step 30/30, loss 1.000, training"


def test_progress_end_is_predicted_from_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is predicted from the last steps."""
    now = SimpleNamespace(value=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.value)
    shown = ProgressLine(said(Activity()), 100, io.StringIO())
    for step in range(1, 61):
        now.value += 50.0 if step < 11 else 2.0  # the first steps are slow: not in the window
        shown.step(step)
    left = (shown._end() or 0.0) - time.time()
    shown.close()
    assert left == pytest.approx(80.0, abs=1.0)


def test_progress_long_wait_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long wait is said once where there is no terminal."""
    monkeypatch.setattr(progress, "REFRESH", 0.01)
    out, state = io.StringIO(), said(Activity("waiting", (2,), 31.0))
    shown = ProgressLine(state, 9, out)
    until(lambda: "waiting for 2: for 31 s now" in out.getvalue())
    time.sleep(0.1)
    shown.close()
    assert len(out.getvalue().splitlines()) == 1


def test_progress_terminal_has_one_line_below_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal has one line, and the log above it."""
    monkeypatch.setattr(progress, "REFRESH", 0.01)
    out = Terminal()
    handler, log = logging.StreamHandler(out), logging.getLogger("fsdp_demo")
    log.addHandler(handler)
    try:
        state = said(Activity("sending", (1, 2)))
        shown = ProgressLine(state, 9, out)
        until(lambda: "sending to 1, 2" in out.getvalue())
        state.activity = Activity("waiting", (2,), 1.0)  # nobody calls it: training stands still
        until(lambda: "waiting for 2" in out.getvalue())
        log.error("something else")
        shown.close()
    finally:
        log.removeHandler(handler)
    assert "\n" not in out.getvalue().split("something else")[0]
    assert "\r\x1b[Ksomething else\n" in out.getvalue() and handler.filters == []
    assert out.getvalue().endswith(("\x1b[K", "something else\n"))


@in_threads(2)
def test_progress_names_whom_an_island_waits_for(island: int, topology) -> None:
    """The line names the island that is waited for. Island 1 comes late: island 0 waits for it, and
    sends while it trains.
    """
    weight = nn.Parameter(torch.zeros(64, 64))
    config = fsdp_demo.preset("diloco", period=2, **{"schedule.delay": 1})
    optimizer = fsdp_demo.base_optimizer(config, [("weight", weight)], lr=1e-3)
    exchange = fsdp_demo.attach(optimizer, config, topology=topology)
    seen = [exchange.activity.text]

    def watch() -> None:
        until(lambda: exchange.activity.kind == "waiting" and exchange.activity.islands != ())
        seen.append(exchange.activity.text)

    thread = threading.Thread(target=watch if island == 0 else (lambda: None))
    for t in range(3):
        if t == island == 1:  # the payload leaves after this step
            time.sleep(1.0)
        weight.grad = torch.ones(64, 64)
        optimizer.step()
        if t == 1:
            if island == 0:
                until(lambda: exchange.activity.islands != ())
            seen.append(exchange.activity.text)
            thread.start()
    thread.join()
    exchange.finish()
    seen.append(exchange.activity.text)
    assert island == 1 or seen == ["training", "sending to 1", "waiting for 1", "finished"]
