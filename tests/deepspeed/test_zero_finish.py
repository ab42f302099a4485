"""`finish()` inside a round under ZeRO: the masters become the plain mean of the replicas."""

from __future__ import annotations

import pytest
import torch

from ..support import zero


@pytest.mark.parametrize("stage, steps", [("zero1", 6), ("zero3-parts", 5), ("zero2", 8)])
def test_zero_finish_inside_round(run_ranks, stage, steps):
    """`finish` inside a round ends in the plain mean of the replicas."""

    def run(me):
        made, exchange = zero.attached(stage, "diloco", period=4, momentum_warmup=0)
        zero.train(made, range(steps), me.rank)
        before = [t.clone() for t in exchange.host.tensors("parameter")]
        exchange.finish()
        assert exchange.digests_equal()
        return before, [t.clone() for t in exchange.host.tensors("parameter")]

    results = run_ranks(run, 2, 2)
    for proc in range(2):
        (mine, end), (theirs, other) = results[proc], results[proc + 2]
        assert all(torch.equal(a, b) for a, b in zip(end, other, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)) == (steps % 4 == 0)
        for a, b, e in zip(mine, theirs, end, strict=True):
            assert torch.allclose(e, (a + b) / 2, rtol=0, atol=1e-6)
