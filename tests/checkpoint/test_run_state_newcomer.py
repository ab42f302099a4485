"""A plain loop with checkpoints on an island that joins a run under way: nothing is resumed, the
step is that of the others.
"""

from __future__ import annotations

import torch

import fsdp_demo
from fsdp_demo import preset

from ..exchange.test_newcomer import made, recorded, step
from ..support import joining
from ..support.inside import in_ranks
from ..support.plain_loop import PlainLoop


@in_ranks(1, 1)
def test_newcomer_ignores_own_old_checkpoint(me) -> None:
    """A newcomer does not resume from an old checkpoint of its own."""
    config = preset("demo", inner_optimizer="adamw")

    def life(where, steps, resume) -> tuple[list[int], int, list[torch.Tensor], list[int]]:
        """One life of a loop as in the docstring of `RunState`."""
        model, optimizer, schedule = made(config, 7)
        given = {"must_match": {"steps": 100}}
        loop = PlainLoop(me.folder, model, optimizer, config, resume, where, **given)
        began, taken = loop.exchange.step, []
        for _ in range(began):
            schedule.step()
        while loop.exchange.step < steps:
            taken.append(loop.exchange.step)
            step(model, optimizer, loop.exchange.step, 5)
            schedule.step()
        loop.state.save(loop.exchange)
        return taken, began, loop.close(), [h.step for h in loop.checkpoints.held()]

    record, truth = recorded(config, 8)
    assert life(fsdp_demo.Topology(name="newcomer"), 3, False)[3] == [3]
    # a supervisor may start it either way
    for at, until, resume, held in ((2, 5, True, [3, 7]), (4, 6, False, [3, 7])):
        where = joining.island(record, at, until)
        taken, began, parameters, kept = life(where, 7, resume)
        assert began == until and taken == list(range(until, 7)) and sorted(kept) == held
        others = [p for p in truth[7]["parameters"] if p is not None]
        assert joining.same(parameters[:-1], others[: len(parameters) - 1])
