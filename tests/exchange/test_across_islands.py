"""Questions between islands: `Exchange.across_islands`."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.exchange.consensus import IslandConsensus


@pytest.mark.parametrize("procs", [[1, 1, 1], [2, 1]], ids=["three", "uneven"])
def test_across_islands_questions(run_ranks, procs):
    """`across_islands` answers questions between islands alike on all ranks."""

    def run(rank):
        model = torch.nn.Linear(2, 2)
        exchange = fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco", model=model)
        across_islands, i = exchange.across_islands, rank.island
        out = [
            across_islands.mean([i, 10.0 * i]),
            across_islands.mean([float("nan") if i == 1 else 1.0, 2.0]),
        ]
        out += [
            across_islands.all_equal({"a": 1}),
            across_islands.all_equal(i),
            across_islands.any_equal(i),
            across_islands.any_equal(min(i, 1) if rank.islands > 2 else 7),
        ]
        with pytest.raises(ValueError, match="all must bring the same ones"):
            across_islands.mean([1.0] * (1 + i))
        exchange.finish(close=False)
        out.append(
            exchange.finished and not exchange.closed and exchange.across_islands.all_equal("end")
        )
        exchange.finish()
        with pytest.raises(RuntimeError, match="connected no more"):
            _ = exchange.across_islands
        return out

    out = run_ranks(run, procs=procs)
    mean = (len(procs) - 1) / 2
    for means, lost, *answers in out:
        assert means == [mean, 10 * mean] and lost[0] != lost[0] and lost[1] == 2.0
        assert answers == [True, False, False, True, True]


@pytest.mark.parametrize("lost", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 1])
def test_across_islands_mean_lost_on_any_shard(lost: float, at: int) -> None:
    """A mean that is not finite on any shard of the island is NaN, and else the largest counts."""
    shards = [[1.0, 2.0], [1.0, 3.0]]
    shards[at][0] = lost
    queue: Any = SimpleNamespace(ask=lambda question: [[1.0, 2.0]])
    island: Any = SimpleNamespace(any=bool, everyone=lambda means: shards)
    first, second = IslandConsensus(queue, island, lambda: 1).mean([1.0, 2.0])
    assert math.isnan(first) and second == 3.0
