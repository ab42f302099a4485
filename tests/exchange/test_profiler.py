"""What a profile of a training shows of the exchange: ranges with names, in the thread that trains
and in the one that sends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fsdp_demo

from ..support import threaded
from ..support.inside import in_ranks
from ..support.small import Noise

RANGES = ("accumulate", "encode", "send", "wait", "decode", "apply")


def train(preset: str, changes: dict[str, Any]) -> None:
    config = fsdp_demo.preset(preset, **changes)

    def island(i: int, topology: fsdp_demo.Topology) -> None:
        made = Noise(topology, config, adamw=config.inner_optimizers[0] != "sgd")
        for _ in range(4):
            made.step()
        made.exchange.finish()

    threaded.values(threaded.islands(island))


@pytest.mark.parametrize(
    ("preset", "changes"), [("demo", {}), ("diloco", {"period": 2}), ("sparse_loco", {"period": 2})]
)
@in_ranks(1, 1)
def test_profiler_ranges_of_an_exchange(preset: str, changes: dict[str, Any]) -> None:
    """Each part of an exchange has a named range in the profile."""
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every) as seen:
        train(preset, changes)
    named = {e.key: e.count for e in seen.key_averages() if e.key.startswith("fsdp_demo::")}
    found = {key.removeprefix("fsdp_demo::"): count for key, count in named.items()}
    assert set(found) == set(RANGES)
    assert found["accumulate"] == found["encode"] and found["decode"] >= found["apply"]
