"""A ZeRO engine joins a run under way: masters, moments, counters and scheduler are those of an
engine that walked there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_ext
from fsdp_demo import preset

from ..support import joining, zero

N = 6
CASES = {
    ("zero1", "full"): {},
    ("zero2", "demo"): {"schedule.delay": 2},
    ("zero3-parts", "diloco"): {"period": 2},
    ("wrapper", "streaming_diloco"): {"period": 3, "delay": 1, "layers": 1},
    ("wrapper", "full"): {},
}


def engine(stage: str, name: str) -> Any:
    """With a rate of its own for each step."""
    inner = zero.sgd if name == "demo" else zero.adamw
    return zero.engine(
        zero.settings(stage, clip=0.5),
        inner,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    )


def now(made: Any, exchange: Any) -> dict[str, Any]:
    counters = (
        made.global_steps,
        made.global_samples,
        made.lr_scheduler.last_epoch,
        made.lr_scheduler.get_last_lr(),
    )
    rates = [float(r) for r in exchange.host.rates()]
    return joining.stand(exchange._runtime) | {"counters": counters, "rates": rates}


@pytest.mark.parametrize("stage, name", CASES)
def test_zero_newcomer_equals_other_engines(run_ranks, stage: str, name: str) -> None:
    """A newcomer goes on as an engine that has taken all steps."""
    config = preset(name, **CASES[stage, name])

    def run(me: Any) -> None:
        made = engine(stage, name)
        exchange = deepspeed_ext.attach(made, config)
        record, truth = joining.Record(exchange), [now(made, exchange)]
        for t in range(N):
            zero.train(made, range(t, t + 1), me.rank)
            truth.append(now(made, exchange))
        exchange.state_dict()
        exchange.detach()
        if me.island:
            return
        for at, until in ((1, 5), (3, 4)):
            again = engine(stage, name)
            where = joining.island(record, at, until, rank=me.proc, world=me.procs)
            exchange = deepspeed_ext.attach(again, config, topology=where)
            assert exchange.newcomer and again.load_checkpoint(me.folder / "nothing") == (None, {})
            for t in range(until, N):
                compare(now(again, exchange), truth[t])
                zero.train(again, range(t, t + 1), me.rank + 7)
            compare(now(again, exchange), truth[N])
            exchange.detach()

    def compare(here: dict[str, Any], there: dict[str, Any]) -> None:
        equal = ["step", "clocks", "anchors", "momenta", "counters", "rates"]
        equal += ["parameters", "states"] if config.channels[0].before_step else []
        assert [key for key in equal if not joining.same(here[key], there[key])] == []

    run_ranks(run, islands=2, procs=2, timeout=120)
