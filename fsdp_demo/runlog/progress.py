"""The line of progress of one island: how far all islands are, and what this one does now."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TextIO

from ..errors import size
from .words import times

PLAIN_EVERY = 5.0
"""Seconds between two lines, where the output is no terminal."""
REFRESH = 0.5
"""Seconds after which the line on a terminal is written again."""
LONG_WAIT = 30.0
"""Seconds of standing still after which a line says so, where the output is no terminal."""
HOLD = 0.1
"""Seconds for which the line stays away once a record of the log has taken it off."""
WINDOW = 50  # steps from which the end is predicted


@dataclass(frozen=True)
class Progress:
    """The state of a job after a step.

    Attributes:
        step, steps: optimizer steps done, and of the job (None: nobody knows).
        loss: nats per token; everywhere: it is the mean over all islands, else this island's own.
        tokens_per_second: tokens per second of all islands together.
        sent, full: bytes of this island so far, and what a bf16 all-reduce at every step would have
            sent.
    """

    step: int
    steps: int | None
    loss: float | None = None
    everywhere: bool = False
    tokens_per_second: float | None = None
    sent: float | None = None
    full: float | None = None


def line(known: Progress, state: str, end: float | None = None, now: float | None = None) -> str:
    """The line of progress as text.

    Args:
        state: state of this island, in words.
        end: predicted end of the job, in seconds since 1970; None: not known.
        now: this moment, in seconds since 1970; None: the clock's.

    Example:
        >>> line(Progress(120, 300, 2.5, True, 12_340, 2.4e6, 1.2e8), "waiting for 2")
        'step 120/300, loss 2.500, 12,340 tokens/s, waiting for 2, sent 2.4 MB, 50 x less than \
all-reduce'
    """
    parts = [f"step {known.step}" + (f"/{known.steps}" if known.steps else "")]
    if known.loss is not None:
        parts.append(f"loss {known.loss:.3f}" + ("" if known.everywhere else " (this island)"))
    if known.tokens_per_second is not None:
        parts.append(f"{known.tokens_per_second:,.0f} tokens/s")
    parts.append(state)
    if known.sent:
        parts.append(f"sent {size(known.sent)}")
        if known.full:
            parts.append(f"{times(known.full / known.sent)} less than all-reduce")
    if end is not None:
        parts.append(f"ends {clock(end, time.time() if now is None else now)}")
    return ", ".join(parts)


def clock(end: float, now: float) -> str:
    """A time of day, with the day where it is another one."""
    then, today = time.localtime(end), time.localtime(now)
    if (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday):
        return time.strftime("%H:%M", then)
    return time.strftime("%a %H:%M" if end - now < 6 * 86_400 else "%Y-%m-%d %H:%M", then)


class ProgressLine:
    """Writes the line: over itself on a terminal, as plain lines elsewhere.

    Args:
        exchange: `activity` is read, also from a thread of this object, so that it says whom an
            island waits for while its training stands still.
        steps: steps of the job, or None.
        stream: where the line is written; None: stderr.
    """

    def __init__(self, exchange: Any, steps: int | None, stream: TextIO | None = None):
        self._exchange, self._stream = exchange, stream or sys.stderr
        self._terminal = self._stream.isatty()
        self.known = Progress(exchange.step, steps)
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._lock, self._shown, self._next, self._said = threading.RLock(), False, 0.0, False
        self._over, self._held = threading.Event(), 0.0
        self._handlers = [
            h
            for logger in (logging.getLogger(), logging.getLogger("fsdp_demo"))
            for h in logger.handlers
            if self._terminal
        ]
        for handler in self._handlers:
            handler.addFilter(self._above)
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def step(self, step: int) -> None:
        """Note that an optimizer step has ended; costs a look at the clock."""
        self._times.append((step, time.monotonic()))
        self.known = replace(self.known, step=step)

    def update(self, **fields: Any) -> None:
        """Take over fields of `Progress`; without a terminal, write a line where one is due."""
        self.known = replace(self.known, **fields)
        if not self._terminal and (time.monotonic() >= self._next or self._last):
            self._next = time.monotonic() + PLAIN_EVERY
            self.write(self.text())

    @property
    def _last(self) -> bool:
        return self.known.step == self.known.steps

    def text(self) -> str:
        """The line of progress of this moment."""
        return line(self.known, self._exchange.activity.text, self._end())

    def _end(self) -> float | None:
        if self.known.steps is None or len(self._times) < 2 or self._last:
            return None
        (first, began), (last, ended) = self._times[0], self._times[-1]
        left = self.known.steps - last
        return time.time() + (ended - began) / max(last - first, 1) * left

    def write(self, text: str) -> None:
        """A whole line, above the one that is rewritten."""
        with self._lock:
            self.clear()
            self._put(f"{text}\n")

    def clear(self) -> None:
        """Take the line off the terminal."""
        with self._lock:
            self._held = time.monotonic() + HOLD
            if self._shown:
                self._put("\r\x1b[K")
                self._shown = False

    def close(self) -> None:
        """Take the line off the terminal and stop its thread; nothing is written afterwards."""
        self._over.set()
        self._thread.join(5.0)
        self.clear()
        for handler in self._handlers:
            handler.removeFilter(self._above)

    def _watch(self) -> None:
        while not self._over.wait(REFRESH):
            activity = self._exchange.activity
            if self._terminal:
                if time.monotonic() >= self._held:
                    self._show()
            elif activity.seconds < LONG_WAIT:
                self._said = False
            elif not self._said:  # once for each wait
                self._said = True
                self.write(f"{self.text()}: for {activity.seconds:.0f} s now")

    def _show(self) -> None:
        width = shutil.get_terminal_size().columns
        with self._lock:
            self._put(f"\r{self.text()[: width - 1]}\x1b[K")
            self._shown = True

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):  # full, or closed: no line ends a training
            self._stream.write(text)
            self._stream.flush()

    def _above(self, record: logging.LogRecord) -> bool:
        """A filter of the log's handlers: a record is written where the line was."""
        self.clear()
        return True
