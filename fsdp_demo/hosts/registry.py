"""Training engines of other packages: who offers an `attach` of its own for an object that is not a
torch optimizer.

A package names itself in the entry point group `fsdp_demo.engines`: the entry's name is the
top-level module of the engine's classes, its value a module with

* `attach(engine, config, **keywords) -> Exchange`, keywords as of `fsdp_demo.attach`;
* `clipping(engine, config) -> config`, `topology() -> Topology | None` and `advance(engine, step)`
  (of a replica that takes over: counters and scheduler), for hosts that build the engine themselves
  (the Trainer).

It is imported only when such an object turns up.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import torch

GROUP = "fsdp_demo.engines"
_LEVELS = 4  # of wrappers: a list, Accelerate's, the engine's own


def find_host(thing: Any) -> ModuleType | None:
    """The module that attaches to `thing`, or to what it wraps under `.optimizer` (it says what to
    pass instead); None for what is torch's own, whoever wrote the class."""
    for _ in range(_LEVELS):
        if isinstance(thing, torch.optim.Optimizer) and getattr(thing, "optimizer", None) is None:
            return None
        for module in {c.__module__.partition(".")[0] for c in type(thing).__mro__} - {
            "torch",
            "builtins",
        }:
            if (engine_module := named(module)) is not None:
                return engine_module
        thing = (
            next(iter(thing), None)
            if isinstance(thing, (list, tuple))
            else getattr(thing, "optimizer", None)
        )
    return None


def named(name: str) -> ModuleType | None:
    """The module that attaches to engines of the package `name`; None where no installed package
    offers one.
    """
    for entry in entry_points(group=GROUP, name=name):
        engine_module: ModuleType = entry.load()
        return engine_module
    return None
