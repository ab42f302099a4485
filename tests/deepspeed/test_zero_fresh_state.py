"""Under ZeRO, too, state that is made at attach changes nothing, and momentum survives a
checkpoint.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import deepspeed_ext

from ..support import zero
from ..support.inside import in_ranks
from ..support.small import same

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.5),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
}
STAGES = ["zero1", "zero2", "zero3-parts", "wrapper"]


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups with decay of their own: a master takes that of its group."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(1, 2, timeout=240)
def test_zero_fresh_state_one_replica(me: Any, stage: str) -> None:
    """One replica is plain training. `full` on one island, 20 steps, bit for bit; every state is
    there before the first step, on the masters.
    """
    for name, make in OPTIMIZERS.items():
        ends = []
        for attached in (True, False):
            torch.manual_seed(7)
            model = zero.Model()
            made = zero.engine(zero.settings(stage), make, model, groups=groups(model))
            exchange = deepspeed_ext.attach(made, "full") if attached else None
            if exchange is not None:
                assert bool(exchange.host.states()) == (name != "dampened"), name
            zero.train(made, range(20), me.rank)
            ends.append(zero.whole(made))
            if exchange is not None:
                assert exchange.metrics()["exchanges"] == 20
                exchange.finish()
        assert same(*ends), name


@pytest.mark.parametrize("stage", ["zero1", "zero3-parts"])
@in_ranks(2, 1, group=True, timeout=240)
def test_zero_fresh_state_momentum_after_resume(me: Any, stage: str, tmp_path: Any) -> None:
    """Momentum survives a checkpoint. Six steps are three, a checkpoint, and three in an engine
    that has stepped never.
    """
    for name in ("sgd", "dampened"):
        ends = []
        for parts in ((range(6),), (range(3), range(3, 6))):
            for steps in parts:
                made, exchange = zero.attached(stage, "full", OPTIMIZERS[name])
                if steps.start:
                    made.load_checkpoint(str(tmp_path / name))
                zero.train(made, steps, me.rank)
                if steps.stop == 3:
                    made.save_checkpoint(str(tmp_path / name))
                exchange.finish()
            ends.append(zero.whole(made))
        assert same(*ends), name
