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
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..files import in_one_piece

FOLDER, STEPS = "FSDP_DEMO_CLOCK", "FSDP_DEMO_CLOCK_STEPS"
SETTLE = 3
"""Steps that are not counted: the first ones make buffers and choose kernels."""

_OPTIMIZER = "torch.optim.optimizer"


class _Finder(MetaPathFinder):
    """Finds torch's optimizers as everybody does, and adds the hook when they are there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _OPTIMIZER:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Hooking(spec.loader)
                return spec
        return None


class _Hooking(Loader):
    """Runs another loader, then registers the clock."""

    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        clock = Clock(Path(os.environ[FOLDER]), int(os.environ[STEPS]))
        module.register_optimizer_step_post_hook(clock)


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
        _synchronize(optimizer)
        times.append(time.perf_counter())
        if len(times) <= self._steps:
            return
        self._done = True
        seconds = [b - a for a, b in zip(times, times[1:], strict=False)][SETTLE:]
        text = json.dumps({"seconds": seconds, "rank": os.environ.get("RANK", "0")})
        in_one_piece(self._folder / f"{os.getpid()}.json", lambda part: part.write_text(text))


def _synchronize(optimizer: Any) -> None:
    """Wait for an accelerator: what was queued is part of the step."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def install() -> None:
    """Hook torch's optimizers as soon as somebody imports them."""
    if os.environ.get(FOLDER):
        sys.meta_path.insert(0, _Finder())
