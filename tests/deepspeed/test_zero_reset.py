"""`Exchange.reset` on ZeRO engines: the fp32 masters, cut over the ranks, are the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..support import joining, zero

AT = 5
CASES = {
    "zero1": ("diloco", {"period": 3}),
    "zero2": ("demo", {"schedule.delay": 2}),
    "zero3-parts": ("streaming_diloco", {"period": 3, "delay": 1, "layers": 1}),
    "zero3": ("sparse_loco", {"period": 2}),
    "wrapper": ("desloc", {"period": 2}),
    "zero2-offload": ("diloco", {"period": 3}),
    "zero3-parts-offload": ("demo", {}),
}
NAMES = ("layers.0.weight", "norm.bias")


@pytest.mark.parametrize("stage", CASES)
def test_zero_reset(run_ranks: Any, stage: str) -> None:
    """What `safe_set_full_fp32_param` has written becomes the mean over the islands in masters and
    model, stays in a round at rate 0, and other parameters stand as after `flush`."""
    name, settings = CASES[stage]

    def run(me: Any) -> Any:
        from deepspeed.utils import safe_set_full_fp32_param

        found = []
        for resets in (False, True):
            made, exchange = zero.attached(zero.settings(stage, clip=0.5), name, **settings)
            zero.train(made, range(AT), me.rank)
            parameters = dict(made.module.named_parameters())
            written = {}
            for k, n in enumerate(NAMES if resets else ()):
                p = parameters[n]
                g = torch.Generator().manual_seed(10 * me.island + k)
                written[n] = torch.randn(getattr(p, "ds_shape", p.shape), generator=g)
                safe_set_full_fp32_param(p, written[n])
            if resets:
                exchange.reset([parameters[n] for n in NAMES])
            else:
                exchange.flush()
            found.append(zero.whole(made))
        with zero.gathered(made.module):
            seen = {n: parameters[n].detach().float().clone() for n in NAMES}
        for group in made.optimizer.param_groups:
            group["lr"] = 0.0
        zero.train(made, range(AT, AT + 4), me.rank)
        still = zero.whole(made)
        exchange.finish()
        assert exchange.digests_equal() is not False
        return written, *found, seen, still

    ranks = run_ranks(run, 2, 2, timeout=180)
    means = {n: (ranks[0][0][n] + ranks[2][0][n]) / 2 for n in NAMES}
    for _, flushed, reset, seen, still in ranks:
        for n, value in reset.items():
            assert torch.equal(value, means.get(n, flushed[n])), n
        low = {n: t.bfloat16().float() if stage == "wrapper" else t for n, t in means.items()}
        assert joining.same(seen, low)
        assert joining.same({n: still[n] for n in NAMES}, means)
