"""An island that is told to end sends what it has done since its last exchange, and the others
count it in their next one (early-part).

Real processes over ZeroMQ, with `guard` around the loop.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.config.channel import Channel
from fsdp_demo.config.parts import Applier, Codec, Reducer, SyncSchedule
from fsdp_demo.config.schema import ExchangeConfig

from ..support.two_layers import step
from .test_survivors import Small, loss, optimizer_for

ENV = {"ISLAND_DEAD": "4", "ISLAND_STOP": "20"}
GRADIENTS = (15.0, 30.0, 45.0)  # of each island, in every step
VICTIM, AT, STEPS = 1, 5, 12  # told to end in step 5, the second of the second round of 4
SAID = "it counts in their exchange of step 8"


def plain(code: str = "fp32", weight: str = "equal") -> ExchangeConfig:
    """The anchor less the mean delta: numbers that can be followed by hand."""
    outer = Applier("outer_step", lr=1.0, momentum=0.0, nesterov=False)
    form = {"codec": Codec(value_dtype=code), "reducer": Reducer(weight=weight), "applier": outer}
    return ExchangeConfig("plain", (Channel("delta", "delta", SyncSchedule(4), **form),))


def kept(exchange: Any) -> list[torch.Tensor]:
    return [c.accumulator.clone() for c in exchange.channels if c.accumulator is not None]


def trained(me: Any, config: ExchangeConfig, tokens: int = 0) -> Any:
    w = torch.nn.Parameter(torch.zeros(3, 5000))
    model = torch.nn.Module()
    model.w = w
    optimizer = torch.optim.SGD([w], lr=1.0)
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    with fsdp_demo.guard(exchange):
        for t in range(STEPS):
            if me.island == VICTIM and t == AT:
                os.kill(os.getpid(), signal.SIGTERM)
            exchange.report(tokens=tokens)
            step(optimizer, (w * GRADIENTS[me.island]).sum())
        exchange.finish()
    return exchange.digests_equal(), w.detach().clone()


def ended(found: list[Any], ranks: int = 1) -> list[Any]:
    """What the survivors have returned; the victim ended with 75."""
    victims = found[VICTIM * ranks : (VICTIM + 1) * ranks]
    assert [v.status for v in victims] == [75] * ranks, [v.log for v in victims]
    others = [f for f in found if f not in victims]
    assert all(f.error is None for f in others), [f.log for f in others]
    return [f.value for f in others]


OF = {"fp32": (plain(), 0), "bf16": (plain("bf16"), 0), "tokens": (plain(weight="tokens"), 8)}


@pytest.mark.parametrize(("config", "tokens"), OF.values(), ids=OF)
def test_leave_early_part_weight(run_ranks, config: ExchangeConfig, tokens: int) -> None:
    """The steps of a leaving island since its last exchange count with their share."""
    found = run_ranks(trained, 3, 1, env=ENV, args=(config, tokens), check=False)
    one, two = ended(found)
    assert SAID in found[VICTIM].log
    rounds = [4 * sum(GRADIENTS) / 3, (4 * 15 + 4 * 45 + 0.5 * 2 * 30) / 2.5, 4 * (15 + 45) / 2]
    assert one[0] and torch.equal(one[1], two[1])
    assert torch.equal(one[1], torch.full((3, 5000), -sum(rounds)))


def test_leave_all_ranks_at_one_step(run_ranks, everywhere) -> None:
    """All ranks of an island leave at one step. Two copies, both active; the signal comes to both,
    at unlike moments.
    """
    everywhere.setattr("fsdp_demo.peers.votes", "VOTE_EVERY", 0.0)  # they leave after the very step
    found = run_ranks(trained, 3, 2, env=ENV, args=(plain(),), check=False)
    values = ended(found, 2)
    rounds = [4 * sum(GRADIENTS) / 3, (4 * 15 + 4 * 45 + 0.5 * 2 * 30) / 2.5, 4 * (15 + 45) / 2]
    assert all(equal and torch.equal(w, torch.full((3, 5000), -sum(rounds))) for equal, w in values)


CASES = {
    "diloco": preset("diloco", period=4, momentum_warmup=0),
    "diloco, int4": preset("diloco", period=4, momentum_warmup=0, value_dtype="int4"),
    "sparse_loco": preset("sparse_loco", period=4),
    "sign_loco": preset("sign_loco", period=4, momentum_warmup=1),
    "muloco": preset("muloco", period=4),
    "decoupled_momentum": preset("decoupled_momentum", period=4),
    "decoupled_momentum, late": preset("decoupled_momentum", period=4, **{"schedule.delay": 3}),
    "streaming_diloco": preset("streaming_diloco", period=8, delay=3, layers=2),
    "local_sgd": preset("local_sgd", period=4),
    "desloc": preset("desloc", period=4),
    "sel_sync": preset("sel_sync", check_every=4, window=2, delta=1.0),
}
QUICK = ("sparse_loco", "decoupled_momentum, late", "desloc", "sel_sync")


def told(me: Any, case: str) -> Any:
    model = Small()
    optimizer = optimizer_for(case, model)
    exchange = fsdp_demo.attach(optimizer, CASES[case], model=model)
    before: list[Any] = []

    def save() -> None:
        assert len(before) == len(kept(exchange)) and all(map(torch.equal, before, kept(exchange)))
        assert exchange.state_dict()["step"] == AT + 1
        print("saved as it was before")

    with fsdp_demo.guard(exchange, save=save):
        for t in range(14):
            if me.island == VICTIM and t == AT:
                os.kill(os.getpid(), signal.SIGTERM)
            step(optimizer, loss(model, me.island, t))
            before[:] = kept(exchange)
        exchange.finish()
    return exchange.digests_equal(), {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_leave_presets(run_ranks, case: str) -> None:
    """Under every preset an island leaves, and the survivors end with one model. It sends a part
    early, unless nobody knows when the next exchange is.
    """
    found = run_ranks(told, 3, 1, env=ENV, args=(case,), check=False)
    one, two = ended(found)
    log = found[VICTIM].log
    assert ("the others hold step" in log) == (case != "sel_sync"), log
    assert "saved as it was before" in log, log
    assert all(torch.isfinite(v).all() for v in one[1].values())
    if CASES[case].equal_after_exchange:
        assert one[0] and two[0] and all(torch.equal(one[1][n], two[1][n]) for n in one[1])
