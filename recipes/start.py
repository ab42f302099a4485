"""What a run does between its launch and its first step, in seconds: one line in the log.

A script imports this module first. What imports make stays, so the garbage collector rests until
`Start` turns it on again: imports take a fifth less.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from pathlib import Path

import psutil

# only in the process of a script beside this file: others that import one keep their collector
if Path(getattr(sys.modules["__main__"], "__file__", "")).parent == Path(__file__).parent:
    gc.disable()


class Start:
    """Counts the seconds from launch to first step, by part. Each `mark` ends a part.

    Make it when all is imported: it turns the garbage collector on.

    The launcher says when it began (ISLAND_LAUNCHED). Without one it is the start of this process.

    Example:
        >>> start = Start()
        >>> start.mark("data")
        >>> start.line().split(":")[0]
        'start'
    """

    def __init__(self) -> None:
        if not gc.isenabled():
            gc.freeze()  # what has been imported is never looked through again
            gc.enable()
        own, self._last = psutil.Process().create_time(), time.time()
        launched = float(os.environ.get("ISLAND_LAUNCHED", own))
        self.parts = {"launcher": max(own - launched, 0.0), "imports": self._last - own}
        self._said = False

    def mark(self, part: str) -> None:
        """A part has ended."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def line(self) -> str:
        """Seconds in all, and of each part in its order."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"start: {sum(self.parts.values()):.1f} s to the first step: {parts}"

    def first_step(self, name: str) -> None:
        """The first step has ended: log the line, once. name: of the island."""
        if not self._said:
            self.mark("first step")
            self._said = True
            logging.getLogger("fsdp_demo").info("%s: %s", name, self.line())
