"""A plain loop with `RunState`, over ZeroMQ: an island that was killed comes back by itself. What
islands share it fetches; moments that are its own come from its checkpoint.
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

from ..exchange.test_survivors import ENV, Small, loss
from ..support.forked import forked
from ..support.heard import heard
from ..support.two_layers import step

pytest.importorskip("zmq")

CASES = {
    "demo": preset("demo", inner_optimizer="adamw"),
    "diloco": preset("diloco", period=3),
    "late": preset("demo", inner_optimizer="adamw", **{"schedule.delay": 2}),
}


def life(me: Any, case: str, dies: int = 0) -> Any:
    """One life of a loop as in the docstring of `RunState`: a checkpoint after every fourth
    step.
    """
    lines = heard(logging.INFO)
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
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    saved = me.folder.parent / f"moments{me.island}.pt"
    if exchange.newcomer:
        ends.with_suffix(".part").write_text(str(exchange.step + 30))
        os.replace(ends.with_suffix(".part"), ends)
    last = None
    while last is None or exchange.step < last:
        if exchange.step == dies > 0:
            os._exit(9)
        step(optimizer, loss(model, me.island, exchange.step))
        if last is None and ends.exists():
            last = int(ends.read_text())
        if exchange.step > 6:
            # the others wait for the start of a process here, and until it takes part
            time.sleep(0.05)
        if exchange.step % 4 == 0 and exchange.step < 9:
            state.save(exchange)
            if exchange.step <= 4:
                torch.save([optimizer.state[p]["exp_avg"] for p in model.parameters()], saved)
    exchange.finish(close=False)
    equal = exchange.digests_equal()
    exchange.finish()
    anchor = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (
        exchange.step,
        equal,
        anchor,
        all(map(torch.equal, moments, torch.load(saved))),
        [t for t in lines if "MiB fetched" in t or "moments" in t],
    )


def comes_back(run_ranks: Any, case: str, between: Any = None) -> Any:
    """Island 1 dies after the save of step 4, lacks that of step 8, and lives again."""

    def run(me: Any) -> Any:
        if me.island == 1 and (child := forked()):
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
            if between is not None:
                between(me.folder.parent / "disk1" / "checkpoint-4" / "exchange" / "rank0.json")
            return life(me, case)
        try:
            return life(me, case, dies=6 if me.island == 1 else 0)
        finally:
            if me.island == 1:
                os._exit(1)

    (ended, equal, kept, *_), (again, same, came, own, said) = run_ranks(
        run, islands=2, procs=1, timeout=150, env=ENV
    )
    assert ended == again and equal and same and torch.equal(kept, came)
    return own, said


@pytest.mark.parametrize("case", CASES)
def test_returning_island_keeps_own_moments(run_ranks, case: str) -> None:
    """An island that comes back goes on with moments of its own. Of gradient presets the moments
    are those of all.
    """
    own, said = comes_back(run_ranks, case)
    assert own == (case == "diloco")
    assert len(said) == 2 and "go on from checkpoint-4" in said[0], said
    assert "goes on from step" in said[1] and "takes part from message" in said[1]
    assert "from a snapshot" in said[1]


def torn(part: Any) -> None:
    """A byte of the model has changed."""
    tensors = next((part.parents[1] / "model").glob("*.safetensors"))
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)


def forged(part: Any) -> None:
    """As another run would have left it: all sums fit."""
    from fsdp_demo.checkpoint import folders
    from fsdp_demo.checkpoint.files import read_part, write_part

    head, tree = read_part(part)
    head = {k: v for k, v in head.items() if k not in ("format", "package", "file")}
    write_part(part.parent, "rank0", head | {"run": "else"}, tree)
    checkpoint = part.parents[1]
    (checkpoint / folders.MANIFEST).unlink()
    folders.sum_up(checkpoint, 0, 1)
    folders.seal(checkpoint, 4, 1)


SPOILT = [(forged, "it is of run 'else'"), (torn, "checksum does not fit")]


@pytest.mark.parametrize("spoil, why", SPOILT)
def test_returning_island_refuses_spoilt_checkpoint(run_ranks, spoil: Any, why: str) -> None:
    """An island that comes back does not use a checkpoint that is not its own or not whole."""
    own, said = comes_back(run_ranks, "diloco", spoil)
    assert not own and "begin anew, checkpoint-4 cannot be used (" in said[0] and why in said[0]
