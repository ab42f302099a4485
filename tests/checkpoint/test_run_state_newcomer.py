"""A plain loop with checkpoints on an island that joins a run under way: nothing is resumed, the
step is that of the others.
"""

from __future__ import annotations

import os

import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.checkpoint import CheckpointManager, RunState

from ..exchange.test_newcomer import made, recorded, step
from ..support import joining
from ..support.inside import in_ranks


@in_ranks(1, 1)
def test_newcomer_ignores_own_old_checkpoint(me) -> None:
    """A newcomer does not resume from an old checkpoint of its own."""
    config = preset("demo", inner_optimizer="adamw")

    def life(me, where, steps, resume) -> tuple[list[int], int, list[torch.Tensor], list[int]]:
        """One life of a loop as in the docstring of `RunState`."""
        model, optimizer, schedule = made(config, 7)
        checkpoints = CheckpointManager(me.folder / "newcomer", where)
        state = RunState(checkpoints, model, optimizer)
        state.restore(resume)
        given = {"must_match": {"steps": 100}, "step": state.step, "state": state.saved}
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=where, **given)
        for _ in range(exchange.step):
            schedule.step()
        taken, began = [], exchange.step
        while exchange.step < steps:
            taken.append(exchange.step)
            step(model, optimizer, exchange.step, 5)
            schedule.step()
        parameters = [p.detach().clone() for p in model.parameters()]
        state.save(exchange)
        exchange.detach()
        return taken, began, parameters, [h.step for h in checkpoints.held()]

    record, truth = recorded(config, 8)
    assert life(me, fsdp_demo.Topology(name="newcomer"), 3, False)[3] == [3]
    # a supervisor may start it either way
    for at, until, resume, held in ((2, 5, True, [3, 7]), (4, 6, False, [3, 7])):
        where = joining.topology(
            joining.Fed(record, at, until),
            kind="islands",
            run=f"at{at}",
            endpoint=os.environ["ISLAND_ENDPOINT"],
        )
        taken, began, parameters, kept = life(me, where, 7, resume)
        assert began == until and taken == list(range(until, 7)) and sorted(kept) == held
        assert joining.same(
            parameters[:-1],
            [p for p in truth[7]["parameters"] if p is not None][: len(parameters) - 1],
        )
