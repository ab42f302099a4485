"""The preset `sign_loco` on real islands and processes against an oracle that was written from its
rule alone (`oracles/sign.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_demo import Accumulator, preset

from ..oracles.sign import SignLoCo
from .test_presets_oracle import ISLANDS, Case, adamw, expected, sgd, trainer, worst

PLAIN: dict[str, Any] = {"clip": None, "inner_optimizers": "as_is"}
STEPS = 19  # three rounds of 5 steps, the beginning of a fourth, and what is late
KEPT = {"rise": 2, "beta": 0.6, "momentum": 0.5}  # the momentum is at rest in the third round
NONE = {"rise": 2, "beta": 0.0, "momentum": 0.6}


def case(options, inner: Callable[[Any], torch.optim.Optimizer] = adamw, **fields) -> Case:
    """The preset and the oracle at the same settings."""
    words = {"rise": "momentum_warmup", "k": "topk", "delay": "schedule.delay"}
    words["late_k"] = "late_topk"
    config = preset("sign_loco", **PLAIN, **{words.get(k, k): v for k, v in options.items()})
    options = {**options, "dtype": torch.float32}  # so that what is sent whole is rounded alike
    return Case(config, SignLoCo, inner, options, **fields)


CASES = {
    "feedback": case(KEPT, seeds={"2x1": 2, "3x1": 2, "2x2": 0, "2x2-unsharded": 2, "4x1": 3}),
    "none": case(NONE, seeds={"2x2": 0, "3x1": 2, "4x1": 4}),
    "late": case({**KEPT, "delay": 3}, sgd, seeds={"2x2": 0, "3x1": 1}),
    "constant": case({"beta": 0.6, "momentum": 0.5, "rise": 0, "lr": 1.0, "k": 7, "period": 3}, sgd,
        seed=3),
    "switch": case({**NONE, "switch": 8, "late_k": 30}, seeds={"2x2": 0, "3x1": 2}),
    "switch-feedback": case({**KEPT, "switch": 11}, seeds={"3x1": 2}),
    "switch-late": case({**NONE, "switch": 8, "delay": 3}, sgd, seeds={"2x2": 1, "3x1": 1}),
}  # fmt: skip
AT = [("feedback", i) for i in ISLANDS] + [("none", i) for i in ("2x2", "3x1", "4x1")]
AT += [("late", "2x2"), ("late", "3x1"), ("constant", "2x1")]
AT += [("switch", i) for i in ("2x2", "3x1")] + [("switch-feedback", "3x1")]
AT += [("switch-late", "2x2"), ("switch-late", "3x1")]


@pytest.mark.parametrize("name, islands", AT, ids=[f"{n}-{i}" for n, i in AT])
def test_sign_loco_follows_rule(run_ranks: Any, name: str, islands: str) -> None:
    """`sign_loco` follows its rule. Every element after every step, with 2, 3 and 4 islands,
    sharded by FSDP2 and not.
    """
    made, (count, procs, sharded) = CASES[name], ISLANDS[islands]
    seed = made.seed_for(islands)
    truth = expected(made, count, procs if sharded else 1, seed, STEPS)
    assert truth.margin > 5e-6, f"choose another seed: a choice is as close as {truth.margin}"
    results = run_ranks(trainer(made, seed, STEPS, sharded=sharded), count, procs)
    period, delay = made.config.channels[0].schedule.sync_every, made.options.get("delay", 0)
    for rank, (equal, params) in enumerate(results):
        assert equal == [t >= delay and (t + 1 - delay) % period == 0 for t in range(STEPS)]
        if params is not None:
            assert worst(params, rank // procs, truth) <= made.tolerance


def test_sign_loco_mean_over_senders() -> None:
    """The mean goes over the islands that sent a value. By hand: two islands that choose unlike
    values move each by their own scale, not by half.
    """
    start = {"w": torch.zeros(4096)}
    method = SignLoCo(start, 2, sgd, period=1, k=1, beta=0.0, lr=1.0, momentum=0.0, rise=0)
    first, second = torch.zeros(4096), torch.zeros(4096)
    first[[7, 9]], second[[9, 11]] = torch.tensor([4.0, 1.0]), torch.tensor([1.0, -2.0])
    method.step([{"w": first}, {"w": second}])  # of rate 0.01
    found = {p: round(float(method.a["w"][p]), 4) for p in method.a["w"].nonzero().view(-1)}
    assert {int(p): v for p, v in found.items()} == {7: -0.04, 11: 0.02}


def test_sign_loco_settings() -> None:
    """The settings of `sign_loco` are those of its definition."""
    channel = preset("sign_loco").channels[0]
    assert (channel.schedule.sync_every, channel.codec.topk) == (5, 90)
    assert (channel.codec.value_dtype, channel.reducer.mean_over) == ("1bit", "senders")
    assert channel.accumulator is None and channel.taken == 0.0  # nothing is kept
    outer = channel.applier
    assert (outer.lr, outer.dense_lr, outer.momentum, outer.nesterov) == (0.7, 0.7, 0.6, True)
    assert [outer.momentum_in(n) for n in (1, 25, 49, 97)] == [0.0, 0.3, 0.6, 0.6]
    assert preset("sign_loco", lr=0.4).channels[0].applier.dense_lr == 0.4
    kept = preset("sign_loco", beta=0.6, momentum=0.5).channels[0]
    assert kept.accumulator == Accumulator(beta=0.6) and kept.taken == 1.0


@pytest.mark.parametrize(("changes", "said"), [
    ({"beta": 1.5}, "accumulator.beta=1.5 is out of range"),
    ({"topk": 0}, "codec.topk=0 is out of range"),
    ({"momentum": 1.0}, "applier.momentum=1.0 is out of range"),
    ({"momentum_warmup": 0.5}, "momentum_warmup=0.5 must be a whole number"),
    ({"codec.select": "dense"}, "needs a selection by the data"),
    ({"applier.sign": True}, "applier.sign=True is for gradient channels"),
    ({"accumulator.alpha": 0.5}, "accumulator.alpha=0.5 has no effect"),
    ({"seed": 3}, "seed=3 has no effect"),
])  # fmt: skip
def test_sign_loco_settings_refused(changes: dict[str, Any], said: str) -> None:
    """Settings that cannot work with `sign_loco` are refused."""
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        preset("sign_loco", **changes)
