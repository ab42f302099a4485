"""Tests whose whole body runs elsewhere: in ranks, or in islands that are threads.

>>> @in_ranks(2, 1)
... def test_islands_know_their_number(me):
...     assert me.islands == 2
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from . import threaded
from .small import same

Test = Callable[..., Any]


def in_ranks(
    islands: int = 2, procs: int | list[int] = 2, **options: Any
) -> Callable[[Test], Test]:
    """The test is what each rank of `run_ranks(..., islands, procs, **options)` does. What it
    returns is the same on all ranks, bit by bit.

    Its parameter `me`, if it has one, is the `Rank`. Its other arguments travel to the ranks, so it
    takes no fixture but those that can be pickled. Parameters `islands` and `procs` stand in for
    those of the decorator; `env` is added to its variables.
    """

    def decorator(test: Test) -> Test:
        def run(run_ranks: Any, given: dict[str, Any]) -> None:
            def work(me: Any) -> Any:
                return test(**({"me": me} if takes_me else {}), **given)

            how = {"islands": islands, "procs": procs, **options}
            how |= {n: given[n] for n in ("islands", "procs") if n in given}
            if "env" in given:
                how["env"] = {**given["env"], **options.get("env", {})}
            found = run_ranks(work, **how)
            unlike = [rank for rank, value in enumerate(found) if not same(value, found[0])]
            assert not unlike, f"ranks {unlike} return another value than rank 0"

        takes_me = "me" in inspect.signature(test).parameters
        return _as_test(test, {"me"}, run)

    return decorator


def in_a_process(test: Test) -> Test:
    """The test runs in a process of its own, which may fork: its threads and sockets end with it.
    Its arguments travel there, as those of `in_ranks` do.
    """

    def run(run_ranks: Any, given: dict[str, Any]) -> None:
        run_ranks(lambda: test(**given), 1, 1, timeout=120)

    return _as_test(test, set(), run)


def in_threads(
    count: int = 2, timeout: float = 10.0, limit: float = 60.0
) -> Callable[[Test], Test]:
    """The test is what each of `count` islands does, on threads of one process of its own; its
    parameters `island` and `topology`, of which it may leave one out, are that island's.
    """

    def decorator(test: Test) -> Test:
        def run(run_ranks: Any, given: dict[str, Any]) -> None:
            def work(island: int, topology: Any) -> None:
                own = {"island": island, "topology": topology}
                test(**{name: own[name] for name in own.keys() & takes}, **given)

            def process() -> None:
                threaded.values(threaded.islands(work, given.get("count", count), timeout))

            run_ranks(process, 1, 1, timeout=limit)

        takes = set(inspect.signature(test).parameters)
        return _as_test(test, {"island", "topology"}, run)

    return decorator


def _as_test(test: Test, own: set[str], run: Callable[[Any, dict[str, Any]], None]) -> Test:
    """What pytest calls: without the parameters that are the ranks' own, and with `run_ranks`."""

    @functools.wraps(test)
    def wrapper(run_ranks: Any, **given: Any) -> None:
        run(run_ranks, given)

    shown = inspect.signature(test)
    fixture = inspect.Parameter("run_ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kept = [p for p in shown.parameters.values() if p.name not in own]
    wrapper.__signature__ = shown.replace(parameters=[fixture, *kept])  # type: ignore[attr-defined]
    return wrapper
