"""Under ZeRO, too, an `auto` run is the one that begins at the choice with the chosen method."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import deepspeed_ext
from fsdp_demo.config.auto import MEASURED, undecided
from fsdp_demo.doctor.reading import LinkReading

from ..support import zero

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)


@pytest.mark.parametrize("stage", ["zero1", "zero3-parts"])
def test_it_is_the_run_that_begins_at_the_choice(
    run_ranks: Any, everywhere: Any, stage: str
) -> None:
    def reading(peers: Any, island: Any) -> LinkReading | None:
        return None if peers is None else LinkReading(1e5, 0.02)

    everywhere.setattr("fsdp_demo.automatic", "quick_probe", reading)

    def run(me: Any) -> bool:
        made = zero.engine(zero.settings(stage), ADAMW)
        exchange = deepspeed_ext.attach(made, "auto")
        fresh = zero.whole(made)
        zero.train(made, range(MEASURED - 1), me.rank)
        held = zero.whole(made)
        assert undecided(exchange.config) and all(torch.equal(held[n], fresh[n]) for n in held)
        zero.train(made, range(MEASURED - 1, 20), me.rank)
        chosen = exchange.config
        exchange.finish()

        twin = zero.engine(zero.settings(stage), ADAMW)
        with zero.another_run():
            plain = deepspeed_ext.attach(twin, chosen, step=MEASURED)
        zero.train(twin, range(MEASURED, 20), me.rank)
        plain.finish()
        ends = zero.whole(made), zero.whole(twin)
        return all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])

    assert all(run_ranks(run, 2, 1, group=True, timeout=240))
