"""Under ZeRO each stretch of a parameter knows the learning rate of its group, at every stage and
step.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed_ext

from ..support import zero
from ..support.inside import in_ranks


@pytest.mark.parametrize("stage", ["zero1", "zero3-parts", "wrapper"])
@in_ranks(1, group=True)
def test_zero_rates_of_groups(me, stage):
    """Each stretch of a parameter has the learning rate of its group."""
    torch.manual_seed(7)
    model: nn.Module = zero.Model()
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if n.startswith("layers") == inside],
            "lr": rate,
        }
        for inside, rate in ((True, 0.25), (False, 0.5))
    ]
    made = zero.engine(zero.settings(stage), zero.sgd, model, groups=groups)
    exchange = deepspeed_ext.attach(made, "demo", lr_inside=True)
    for group in made.optimizer.param_groups:
        group["lr"] *= 2.0  # a scheduler's work
    zero.train(made, range(2), me.rank)
    host = exchange.host
    held = [c.accumulator for c in exchange.channels]
    exchange.detach()
    rates = list(zip([s.name for s in host.params], host.rates(), strict=True))
    moved = bool(held[0].any())
    assert moved and {name.startswith("layers") for name, _ in rates} == {True, False}
    assert all(rate == (0.5 if name.startswith("layers") else 1.0) for name, rate in rates)
