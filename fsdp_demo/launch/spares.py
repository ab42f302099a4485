"""Forked ranks for launchers that start theirs by `subprocess.Popen`.

A launcher has threads when it starts ranks, and must not fork then. So the processes are forked
before it begins, and wait: each becomes a rank when the launcher would start one, as its child.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from .forking import Forked, Template, handled
from .preload import CannotFork


class Spares:
    """Processes that wait to become the ranks of one start of an island.

    Args:
        template: of this process, which has one thread.
    """

    def __init__(self, template: Template):
        self.template = template
        self._waiting: list[tuple[Forked, int]] = []
        for _ in range(template.procs):
            read, write = os.pipe()
            child = template.fork(
                lambda read=read: self._wait(read),  # type: ignore[misc]
                os.environ,
                sys.orig_argv,
                keep=[read],
            )
            os.close(read)
            self._waiting.append((child, write))

    def _wait(self, pipe: int) -> int:
        """In the child: until it is told, or the launcher is gone."""
        with os.fdopen(pipe, "rb") as file:
            told = file.read()
        if not told:
            os._exit(0)
        return self.template.run_script(*pickle.loads(told))

    def popen(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> Forked | subprocess.Popen[bytes]:
        """In place of `subprocess.Popen`: a spare process where it can be what is asked for."""
        if reason := self._against(args, os.environ if env is None else env, options):
            sys.stderr.write(f"fsdp_demo.launch: a rank imports by itself: {reason}\n")
            return subprocess.Popen(args, env=env, **options)
        child, pipe = self._waiting.pop(0)
        session = bool(options.get("start_new_session"))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with os.fdopen(pipe, "wb") as file:
            words = [str(word) for word in args]
            told = dict(os.environ if env is None else env), words, session, handled()
            file.write(pickle.dumps(told))
        child.args = list(args)
        return child

    def _against(
        self, args: Sequence[str], env: Mapping[str, str], options: Mapping[str, Any]
    ) -> str:
        """Why a process must be a fresh one ("" if it need not be)."""
        script = 2 if list(args[1:2]) == ["-u"] else 1
        wanted = self.template.imported.script
        if args[0] != sys.executable or list(args[script : script + 1]) != [wanted]:
            return f"it is not {wanted}, run by {sys.executable}"
        if any(value is not None for name, value in options.items() if name != "start_new_session"):
            return f"it is started with {', '.join(options)}"
        if other := self.template.imported.other(env):
            return f"imports have read {', '.join(other)}, and the rank has another value"
        if not self._waiting or self._waiting[0][0].poll() is not None:
            return "no process is left of those that were forked for the first start"
        return ""


def use_forks(template: Template | None, module: str) -> None:
    """Let the launcher in this process, whose main module is named, start forked ranks.

    Where the process cannot be forked, it says so and starts ranks as always.
    """
    if template is None:
        return
    try:
        spares = Spares(template)
    except CannotFork as reason:
        sys.stderr.write(f"fsdp_demo.launch: each rank imports by itself: {reason}\n")
        return
    handler: Any = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )
    handler.Popen = spares.popen
    if module.startswith("accelerate"):  # with one process it goes without torchrun
        launch: Any = importlib.import_module(module)
        launch.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": spares.popen})
