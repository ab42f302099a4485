"""Runs first in every Python process that a launcher has started: `fsdp_demo.launch` and `rehearse`
put this folder on PYTHONPATH. A `sitecustomize` of the user runs behind it. What is not of the
standard library is imported when it is needed: most of these processes never train.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


class _After:
    """A finder that changes modules when they have been imported.

    Args:
        changes: by the name of a module what is called with it then.
    """

    def __init__(self, changes: dict[str, Callable[[Any], None]]):
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module as it is found without this finder, changed when it has been executed."""
        change = self._changes.get(name)
        spec = PathFinder.find_spec(name, path) if change else None
        if change is not None and spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _no_compiler(comm: Any) -> None:
    """Keep DeepSpeed on a CPU from compiling an operator for inference (deepspeed_shm_comm) at its
    first start, for 30 to 50 s: it is said to be one that cannot be built. Islands on one machine
    would meet at the lock of that build, and a build that was killed leaves the lock, at which
    every later start waits for ever.
    """
    comm.ShareMemCommBuilder.is_compatible = lambda self, verbose=False: False


def _exchange(trainer: Any) -> None:
    """Every Trainer trains beside the exchange that ISLAND_EXCHANGE asks for."""
    original = trainer.Trainer.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        from fsdp_demo.integrations.trainer import unedited

        return unedited.train(original, self, *args, **kwargs)

    trainer.Trainer.train = train


def _end_as_ranks(kind: type[BaseException], error: Any, trace: TracebackType | None) -> None:
    """End the process of a launcher that another command has started (`trl`) with the status of its
    ranks: uncaught, what it raises ends Python with 1, also where a rank was killed.
    """
    _before(kind, error, trace)
    status = 1
    if kind.__name__ == "ChildFailedError":  # several ranks
        from fsdp_demo.launch.torch_launcher import failed_status

        status = failed_status(error, os.environ["ISLAND_STATUS"], [])
    elif kind.__name__ == "CalledProcessError" and error.returncode < 0:  # one rank
        status = 128 - error.returncode
    if status != 1:
        raise SystemExit(status)


def _serve_own_store() -> None:
    """Let the single rank of an island serve a store of its own, where it needs one. What its
    script starts by itself (`mp.spawn`, `debug_launcher`) has its variables: those ranks would take
    the launcher's store for granted, and wait for it at an address that nobody serves.
    """
    from fsdp_demo.launch.processes import reserve_port

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(reserve_port())


def _forget_earlier_starts(folder: Path, start: int) -> None:
    """Delete statuses of earlier starts of the ranks (`--max-restarts`): they count no more."""
    for file in folder.glob("rank*"):
        if int(file.suffix[1:] or 0) < start:
            file.unlink(missing_ok=True)


_changes: dict[str, Callable[[Any], None]] = {}
if os.environ.get("DS_ACCELERATOR") == "cpu":
    _changes["deepspeed.ops.op_builder.cpu.comm"] = _no_compiler
if os.environ.get("ISLAND_EXCHANGE", "").strip():
    _changes["transformers.trainer"] = _exchange
if _changes:
    sys.meta_path.insert(0, _After(_changes))
if "ISLAND_STATUS" in os.environ:
    _before, sys.excepthook = sys.excepthook, _end_as_ranks
if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["WORLD_SIZE"] == "1":
    _serve_own_store()
if _start := int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
    _forget_earlier_starts(Path(os.environ.get("ISLAND_STATUS", "no-folder")), _start)
_here = str(Path(__file__).parent)
_others = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != _here])
if _others is not None and _others.loader is not None:
    _others.loader.exec_module(importlib.util.module_from_spec(_others))
