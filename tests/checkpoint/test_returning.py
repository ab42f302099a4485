"""A plain loop with `RunState`, over ZeroMQ: an island that was killed comes back with its
checkpoint. It fetches what came since.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.checkpoint import CheckpointManager, RunState

from ..exchange.test_survivors import ENV, Small, backward
from ..support.forked import forked

pytest.importorskip("zmq")

CASES = {
    "demo": preset("demo", inner_optimizer="adamw"),
    "diloco": preset("diloco", period=3),
    "late": preset("demo", **{"schedule.delay": 2}),
}


class Lines(logging.Handler):
    """What the log has said."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def life(me: Any, case: str, dies: int = 0, spoil: Any = None) -> Any:
    """One life of a loop as in the docstring of `RunState`: a checkpoint after every fourth
    step.
    """
    (log := logging.getLogger("fsdp_demo")).setLevel(logging.INFO)
    log.addHandler(lines := Lines())
    model = Small()
    optimizer = fsdp_demo.base_optimizer(CASES[case], model.named_parameters(), lr=1e-2)
    topology, ends = fsdp_demo.Topology.from_env(), me.folder.parent / "ends"
    state = RunState(
        CheckpointManager(me.folder.parent / f"disk{me.island}", topology, keep=4), model, optimizer
    )
    state.restore("auto")
    exchange = fsdp_demo.attach(
        optimizer, CASES[case], model=model, topology=topology, step=state.step, state=state.saved
    )
    if exchange.newcomer:
        ends.with_suffix(".part").write_text(str(exchange.step + 30))
        os.replace(ends.with_suffix(".part"), ends)
    last = None
    while last is None or exchange.step < last:
        if exchange.step == dies > 0:
            os._exit(9)
        backward(model, me.island, exchange.step)
        optimizer.step()
        optimizer.zero_grad()
        if last is None and ends.exists():
            last = int(ends.read_text())
        if exchange.step > 6:
            # the others wait for the start of a process here, and until it takes part
            time.sleep(0.05)
        if exchange.step % 4 == 0 and exchange.step < 9:
            state.save(exchange)
    exchange.finish(close=False)
    equal = exchange.digests_equal()
    exchange.finish()
    anchor = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (
        exchange.step,
        equal,
        anchor,
        [
            t
            for t in lines.texts
            if "MiB fetched" in t or "snapshot is fetched" in t or "can be used" in t
        ],
    )


@pytest.mark.parametrize("case", CASES)
def test_nothing_but_what_came_since_is_fetched(run_ranks, case: str) -> None:
    """It dies after the save of step 4; the one of step 8 it lacks, and the others have more than
    one in mind.
    """

    def run(me: Any) -> Any:
        if me.island == 1 and (child := forked()):
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
            return life(me, case)
        try:
            return life(me, case, dies=6 if me.island == 1 else 0)
        finally:
            if me.island == 1:
                os._exit(1)

    found = run_ranks(run, islands=2, procs=1, timeout=150, env=ENV)
    (ended, equal, kept, _), (again, same, came, said) = found
    assert ended == again and equal and same and torch.equal(kept, came)
    before, after = said
    assert "no snapshot is fetched" in before and "step 4 from its own checkpoint" in after, said


def test_of_another_run_it_takes_a_snapshot(run_ranks) -> None:
    """Its disk holds a checkpoint of the same step with another state: nobody has its mark."""

    def run(me: Any) -> Any:
        if me.island == 1 and (child := forked()):
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
            forged(me.folder.parent / "disk1" / "checkpoint-4" / "exchange" / "rank0.json")
            return life(me, "diloco")
        try:
            return life(me, "diloco", dies=6 if me.island == 1 else 0)
        finally:
            if me.island == 1:
                os._exit(1)

    (_, equal, kept, _), (_, same, came, said) = run_ranks(
        run, islands=2, procs=1, timeout=150, env=ENV
    )
    assert equal and same and torch.equal(kept, came)
    assert any("a snapshot is fetched" in t for t in said) and any(
        "from a snapshot" in t for t in said
    ), said


def forged(part: Any) -> None:
    """As another history would have left it: the mark is another one, and all sums fit."""
    from fsdp_demo.checkpoint import folders
    from fsdp_demo.checkpoint.files import read_part, write_part

    head, tree = read_part(part)
    assert head["mark"]
    head = {k: v for k, v in head.items() if k not in ("format", "package", "file")} | {
        "mark": "0" * 32
    }
    write_part(part.parent, "rank0", head, tree)
    checkpoint = part.parents[1]
    (checkpoint / folders.MANIFEST).unlink()
    folders.sum_up(checkpoint, 0, 1)
    folders.seal(checkpoint, 4, 1)
