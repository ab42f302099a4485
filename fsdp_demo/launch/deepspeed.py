"""The `deepspeed` launcher of `python -m fsdp_demo.launch`: a runner, and on this machine a
launcher of the ranks, each in a process of its own.

Both are DeepSpeed's. What is added here (0.19, deepspeed/launcher/runner.py and launch.py, read and
run):

* The runner dies by SIGTERM and leaves its child running; here the child is told, too, and the
  runner waits for it.
* The runner ends with 0 when its child was killed, and the child with 247 when a rank was (-9 as an
  exit status): here with 137.
* The child ends with 1 when it is told to end: here with 75 where the ranks saved and left
  (`fsdp_demo.guard`). Told before it listens, while it starts ranks, it dies and leaves them
  running: here it tells them as soon as it listens.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from ..rendezvous.environment import stop_signals
from ..status import FOLDER as STATUS_FOLDER
from ..status import SAVED
from .processes import LAUNCHERS, end_with_parent, shell_status, was_told

_NODE = "deepspeed.launcher.launch"
"""DeepSpeed's launcher of the ranks of one machine; the runner starts it as `python -u -m`, over
ssh on other machines.
"""


class _Child:
    """The process that the runner has started, and the signal that has told it to end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.signal = 0

    def start(self, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """In place of `subprocess.Popen`: ranks of this machine are launched by this module."""
        if words[0] == sys.executable:
            words = [__spec__.name if word == _NODE else word for word in words]
        self.process = subprocess.Popen(words, preexec_fn=end_with_parent, **options)
        return self.process

    def told(self, number: int, frame: object) -> None:
        """Handler: pass it on once, as SIGTERM; Ctrl-C in a terminal reaches the child by
        itself.
        """
        again, self.signal = self.signal, number
        if self.process is None:
            raise SystemExit(128 + number)
        if number != signal.SIGINT and not again:
            self.process.send_signal(signal.SIGTERM)


def run(argv: list[str]) -> int:
    """`deepspeed` with the arguments `argv[1:]`; returns the island's status."""
    runner = importlib.import_module(LAUNCHERS["deepspeed"])
    child = _Child()
    folder = os.environ.get(STATUS_FOLDER)
    runner.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": child.start})  # type: ignore[attr-defined]
    # with a hostfile and pdsh the runner sets handlers of its own
    for number in (signal.SIGINT, *stop_signals(os.environ)):
        signal.signal(number, child.told)
    sys.argv = list(argv)
    try:
        runner.main()
    except SystemExit as left:
        # what the child ended with; or, before there was one, words that the runner does not know
        if child.process is None:
            return left.code if isinstance(left.code, int) else 1
    assert child.process is not None
    if child.signal:
        return SAVED if was_told(folder, SAVED) else 128 + child.signal
    return shell_status(child.process.wait())


def node() -> int:
    """DeepSpeed's launcher of this machine's ranks; the status of the one that failed first."""
    launcher, stopped_at = importlib.import_module(_NODE), float("inf")
    terminate = launcher.terminate_process_tree

    def noted(pid: int) -> None:
        nonlocal stopped_at
        stopped_at = min(stopped_at, time.time())
        terminate(pid)

    launcher.terminate_process_tree = noted  # type: ignore[attr-defined]
    early: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    for number in stop_signals(os.environ)[1:]:  # the runner tells it by SIGTERM
        signal.signal(number, lambda *_: None)

    def listen(number: int, handler: Any) -> Any:
        before = signal.signal(number, handler)
        if number in early:
            handler(number, None)
        return before

    launcher.signal = SimpleNamespace(**{**vars(signal), "signal": listen})  # type: ignore[attr-defined]
    try:
        launcher.main()
    except SystemExit as left:
        first = shell_status(left.code) if isinstance(left.code, int) else 1
        folder = os.environ.get(STATUS_FOLDER)
        if first in (1, 128 + signal.SIGABRT) and was_told(folder, SAVED, stopped_at):
            return SAVED
        return first
    return 0


if __name__ == "__main__":
    sys.exit(node())
