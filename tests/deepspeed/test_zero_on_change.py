"""ZeRO where islands exchange when a gradient has changed: partitions that cut tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..support import zero
from ..support.inside import in_ranks


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@in_ranks(timeout=120)
def test_zero_on_change_measures_whole_tensors(me: Any, stage: str) -> None:
    """The norms are those of whole gradients, before clipping, wherever ZeRO cuts them; all islands
    exchange at the same steps, those in which nothing is known yet, and after `at_most`.
    """
    changes = {"check_every": 2, "window": 2, "delta": 1e6, "at_most": 6}
    settings = zero.settings(stage, clip=0.01)
    engine, exchange = zero.attached(settings, "sel_sync", model=None, **changes)
    torch.manual_seed(7)
    plain = zero.Model()
    for rank in (2 * me.island, 2 * me.island + 1):  # the ranks of this island
        rows, targets = zero.batch(0, rank)
        (torch.nn.functional.cross_entropy(plain(rows), targets) / 2).backward()
    truth = sum(float(p.grad.norm()) for p in plain.parameters() if p.grad is not None)
    zero.train(engine, range(1), me.rank)
    (norm,) = exchange.state_dict()["changes"]["norms"]
    assert truth > 0.1 and norm == pytest.approx(truth, rel=1e-5)
    zero.train(engine, range(1, 14), me.rank)
    exchange.finish()
    assert [sent.step for sent in exchange.timeline()] == [1, 3, 9, 14]  # the last by finish()
    assert exchange.digests_equal()
