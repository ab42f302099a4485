"""What a profile of a training shows of the exchange: ranges with names, in the thread that trains
and in the one that sends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp_demo

from ..support import threaded

RANGES = ("accumulate", "encode", "send", "wait", "decode", "apply")


def train(preset: str, **changes: Any) -> Any:
    def island(i: int, topology: fsdp_demo.Topology) -> int:
        weight = nn.Parameter(torch.zeros(130, 128))
        config = fsdp_demo.preset(preset, **changes)
        optimizer = fsdp_demo.base_optimizer(config, [("weight", weight)], lr=1e-3)
        exchange = fsdp_demo.attach(optimizer, config, topology=topology)
        for t in range(4):
            weight.grad = torch.randn(130, 128, generator=torch.Generator().manual_seed(10 * t + i))
            optimizer.step()
        exchange.finish()
        return exchange.metrics()["messages"]

    return threaded.values(threaded.islands(island))


@pytest.mark.parametrize(
    ("preset", "changes"), [("demo", {}), ("diloco", {"period": 2}), ("sparse_loco", {"period": 2})]
)
def test_profiler_ranges_of_an_exchange(run_ranks, preset: str, changes: dict[str, Any]) -> None:
    """Each part of an exchange has a named range in the profile."""

    def run() -> dict[str, int]:
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every) as seen:
            train(preset, **changes)
        return {e.key: e.count for e in seen.key_averages() if e.key.startswith("fsdp_demo::")}

    (found,) = run_ranks(run, 1, 1)
    assert set(found) == {f"fsdp_demo::{name}" for name in RANGES}
    assert found["fsdp_demo::accumulate"] == found["fsdp_demo::encode"]
    assert found["fsdp_demo::decode"] >= found["fsdp_demo::apply"]
