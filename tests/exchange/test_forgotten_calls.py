"""Lines of a script that were forgotten: `init_process_group` before `attach`, `finish` at the
end.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import Topology
from fsdp_demo.attaching import refuse_lone_rank
from fsdp_demo.errors import see

from ..support import threaded

TEXT = "the script ends at step 3, and finish() was not called"


def attached(topology: Topology | None = None) -> tuple[fsdp_demo.Exchange, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, topology=topology, period=2)

    def step() -> None:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return exchange, step


def test_attach_before_init_process_group_refused(run_ranks: Any) -> None:
    """An attach on ranks that made no process group is refused."""

    def run() -> str:
        with pytest.raises(ValueError, match="started 3 ranks on island .* not initialised") as e:
            attached()
        return str(e.value)

    for text in run_ranks(run, islands=2, procs=3, group=False):
        assert "init_process_group" in text and text.endswith(see("rank-taken"))


def test_attach_lone_rank_allowed_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """`refuse_lone_rank` refuses only ranks of one island that made no process group."""
    island = Topology("islands", 1, 2, endpoint="127.0.0.1:1")
    several = {"WORLD_SIZE": "2", "RANK": "0"}
    with pytest.raises(ValueError, match="WORLD_SIZE=2"):
        refuse_lone_rank(island, several)
    refuse_lone_rank(island, {})
    refuse_lone_rank(island, {"WORLD_SIZE": "1", "RANK": "0"})
    # each process of one launch is an island of its own
    refuse_lone_rank(island, {"WORLD_SIZE": "2", "RANK": "1"})
    refuse_lone_rank(Topology(), several)
    refuse_lone_rank(Topology("islands", 1, 2, endpoint="127.0.0.1:1", rank=1, world=2), several)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for count, rank in ((1, 0), (2, 1)):  # one rank; or each is an island of its own
        monkeypatch.setattr("torch.distributed.get_world_size", lambda count=count: count)
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        refuse_lone_rank(island, several)


@pytest.mark.parametrize("islands", [1, 2])
def test_topology_before_process_group_refused(run_ranks: Any, islands: int) -> None:
    """A topology that was made before `init_process_group` is refused."""

    def run(me: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.is_initialized", lambda: False)
            topology = Topology.from_env()
        with pytest.raises(ValueError, match="has 3 ranks, .* made before init_process_group") as e:
            attached(topology)
        return str(e.value)

    for text in run_ranks(run, islands, 3):
        assert text.endswith(see("rank-taken"))


def test_finish_forgotten_is_logged(run_ranks: Any) -> None:
    """A script that ends without `finish` leaves a line in the log."""

    def run() -> None:
        logging.basicConfig(level=logging.WARNING, force=True)
        exchange, step = attached()
        for _ in range(3):
            step()
        atexit._run_exitfuncs()  # a forked rank ends without
        assert exchange.closed

    outs = run_ranks(run, islands=2, procs=1, check=False)
    assert all(o.log.count(TEXT) == 1 for o in outs), outs[0].log


def test_finish_forgotten_silent_otherwise(run_ranks: Any) -> None:
    """Every other way to end leaves no line about a forgotten `finish`."""

    def ends(exchange: fsdp_demo.Exchange, way: str) -> None:
        if way == "finish":
            exchange.finish()
        elif way == "finish-open":
            exchange.finish(close=False)
        elif way == "detach":
            exchange.detach()
        elif way == "stopped":
            exchange._runtime.stopped = True
        elif way == "broken":
            exchange._queue.broken = True

    def run() -> dict[str, int]:
        seen: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fsdp_demo").addHandler(handler)
        found = {}
        for way in ("", "finish", "finish-open", "detach", "stopped", "broken", "error", "fresh"):

            def island(number: int, topology: Topology, way: str = way) -> None:
                exchange, step = attached(topology)
                for _ in range(0 if way == "fresh" else 3):
                    step()
                ends(exchange, way)
                exchange._at_exit()

            if way == "error":  # the interpreter's note of an exception that ended the script
                sys.last_value = RuntimeError("the script's own")
            threaded.values(threaded.islands(island))
            sys.last_value = None  # type: ignore[assignment]
            found[way] = sum("finish() was not called" in text for text in seen)
            seen.clear()
        return found

    (found,) = run_ranks(run, 1, 1)
    assert found.pop("") == 2 and not any(found.values()), found


def test_finish_forgotten_silent_alone(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """One replica alone misses no `finish`."""
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    exchange, step = attached()
    step()
    exchange._at_exit()
    assert exchange.closed and "finish()" not in caplog.text
