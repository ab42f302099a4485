"""Times the optimizer steps of a script that knows nothing of it (`fsdp-demo plan -- SCRIPT`).

The command puts a folder with a `sitecustomize.py` in front of PYTHONPATH, which calls `install`
when an interpreter starts. That waits for the script to import torch's optimizers, and hooks their
steps. Nothing but the standard library is imported by this module.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..files import in_one_piece

FOLDER, STEPS = "FSDP_DEMO_CLOCK", "FSDP_DEMO_CLOCK_STEPS"
SETTLE = 3
"""Steps that are not counted: the first ones make buffers and choose kernels."""

_OPTIMIZER = "torch.optim.optimizer"


class _Finder(MetaPathFinder):
    """Finds torch's optimizers as everybody does, and adds the clock once they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _OPTIMIZER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hook(module: ModuleType) -> None:
            execute(module)
            clock = Clock(Path(os.environ[FOLDER]), int(os.environ[STEPS]))
            module.register_optimizer_step_post_hook(clock)

        spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


class Clock:
    """A hook of all optimizers' steps: when the one with the most parameters has made enough, the
    seconds of each go into a file of the folder.
    """

    def __init__(self, folder: Path, steps: int):
        self._folder, self._steps = folder, steps + SETTLE
        self._times: dict[int, list[float]] = {}
        self._done = False

    def __call__(self, optimizer: Any, *_: Any) -> None:
        if self._done:
            return
        times = self._times.setdefault(id(optimizer), [])
        torch = sys.modules["torch"]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was queued is part of the step
        times.append(time.perf_counter())
        if len(times) <= self._steps:
            return
        self._done = True
        seconds = [b - a for a, b in zip(times, times[1:], strict=False)][SETTLE:]
        text = json.dumps({"seconds": seconds, "rank": os.environ.get("RANK", "0")})
        in_one_piece(self._folder / f"{os.getpid()}.json", lambda part: part.write_text(text))


def install() -> None:
    """Hook torch's optimizers as soon as somebody imports them."""
    if os.environ.get(FOLDER):
        sys.meta_path.insert(0, _Finder())
