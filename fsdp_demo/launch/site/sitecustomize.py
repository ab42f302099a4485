"""Runs first in every Python process that a launcher has started: `fsdp_demo.launch` and `rehearse`
put this folder on PYTHONPATH. A `sitecustomize` of the user runs behind it.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SHM = "deepspeed.ops.op_builder.cpu.comm"


class _NoCompiler:
    """Keeps DeepSpeed on a CPU from compiling an operator for inference (deepspeed_shm_comm) at its
    first start, for 30 to 50 s. Islands on one machine would meet at the lock of that build, and a
    build that was killed leaves the lock, at which every later start waits for ever.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module that declares the operator, which says that it cannot be built."""
        spec = PathFinder.find_spec(name, path) if name == SHM else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                module.ShareMemCommBuilder.is_compatible = lambda self, verbose=False: False

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _serve_own_store() -> None:
    """Let the single rank of an island serve a store of its own, where it needs one. What its
    script starts by itself (`mp.spawn`, `debug_launcher`) has its variables: those ranks would take
    the launcher's store for granted, and wait for it at an address that nobody serves.
    """
    from fsdp_demo.launch.processes import reserve_port

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(reserve_port())


def _forget_earlier_starts(folder: Path, start: int) -> None:
    """With `--max-restarts` a launcher starts its ranks several times: the statuses that those of
    an earlier start have left (`status.tell_launcher`) count no more.
    """
    for file in folder.glob("rank*"):
        if int(file.suffix[1:] or 0) < start:
            file.unlink(missing_ok=True)


if os.environ.get("DS_ACCELERATOR") == "cpu":
    sys.meta_path.insert(0, _NoCompiler)
if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["WORLD_SIZE"] == "1":
    _serve_own_store()
if _start := int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
    _forget_earlier_starts(Path(os.environ.get("ISLAND_STATUS", "no-folder")), _start)
_here = str(Path(__file__).parent)
_others = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != _here])
if _others is not None and _others.loader is not None:
    _others.loader.exec_module(importlib.util.module_from_spec(_others))
