"""Which tests start processes: found in what they use, not written by hand.

`ranks`: a fixture is built on the rank server. `launch`: the test's function, one of its fixtures,
or a function of tests/, recipes/ or benchmarks/ that these reach by name, mentions something that
starts processes.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / folder) + "/" for folder in ("tests", "recipes", "benchmarks"))
STARTS = {
    "fork",
    "forkpty",
    "Popen",
    "subprocess",
    "posix_spawn",
    "system",
    "multiprocessing",
    "spawn",
    "NotebookClient",
    "fresh_python",  # of programs.py
    "Cluster",  # of slurm.py
    "S3",  # of s3.py
    "kernel",  # of topk: a compiler
    "ray_init",  # a cluster of Ray
    "over_bytes",  # of the study: matplotlib: fc-list, where it knows no fonts yet
    "draw_storm",  # the same
    "report_png",  # the same
}
Code = types.CodeType


def mark(items: Iterable[pytest.Item]) -> None:
    """Add the markers `ranks` and `launch`."""
    for item in items:
        if "rank_server" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
        if any(_launches(function) for function in _functions(item)):
            item.add_marker("launch")


def starts_processes(item: pytest.Item) -> bool:
    """Whether it has one of the markers."""
    return any(item.get_closest_marker(name) for name in ("ranks", "launch"))


def _functions(item: pytest.Item) -> Iterator[Any]:
    """The test's own function and those of its fixtures in this repository."""
    yield getattr(item, "function", None)
    info = getattr(item, "_fixtureinfo", None)
    for definitions in (info.name2fixturedefs if info else {}).values():
        yield definitions[-1].func


@functools.cache
def _launches(function: Any) -> bool:
    """Whether this function, or one that it reaches, mentions a start of a process."""
    seen: set[Any] = set()
    queue = [function]
    while queue:
        code, scope = _code(queue.pop())
        if (
            code is None
            or code in seen
            or not code.co_filename.startswith(OURS)
            or "/tests/support/" in code.co_filename
        ):
            continue
        seen.add(code)
        names = set(_names(code))
        if names & STARTS:
            return True
        queue += _reached(names, scope)
    return False


def _code(thing: Any) -> tuple[Code | None, dict[str, Any]]:
    """A function's code and the globals its names stand for."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    return getattr(thing, "__code__", None), getattr(thing, "__globals__", {})


def _names(code: Code) -> Iterator[str]:
    """Names that a function and the functions in it use: variables, attributes, imports."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, Code):
            yield from _names(constant)


def _reached(names: set[str], scope: dict[str, Any]) -> Iterator[Any]:
    """What these names stand for: functions, methods of classes, and what of a module of ours is
    mentioned beside it.
    """
    for name in names:
        thing = scope.get(name)
        if isinstance(thing, types.ModuleType) and str(getattr(thing, "__file__", None)).startswith(
            OURS
        ):
            yield from (vars(thing)[n] for n in names if n in vars(thing))
        elif inspect.isclass(thing):
            yield from (getattr(m, "__func__", m) for m in vars(thing).values())
        elif isinstance(thing, list | tuple | dict):
            yield from (
                x for x in (thing.values() if isinstance(thing, dict) else thing) if callable(x)
            )
        else:
            yield thing
