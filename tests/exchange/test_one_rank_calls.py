"""A call of all ranks that one rank makes alone: each rank says where all are, and none waits in
silence.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.rendezvous import sibling_watch

from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.two_layers import train


def wait_for(lines: list[str], text: str) -> None:
    end = time.monotonic() + 60
    while not any(text in line for line in lines):
        assert time.monotonic() < end, lines
        time.sleep(0.05)


def patient(patience: float, beat: float) -> None:
    """How soon this rank wonders where the others are."""
    pytest.MonkeyPatch().setattr(sibling_watch, "PATIENCE", patience)
    pytest.MonkeyPatch().setattr(sibling_watch, "BEAT", beat)


def alone(me: Any) -> list[str]:
    patient(0.5, 0.1)
    lines, model = heard(), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
    train(optimizer, lambda t: model(torch.ones(1, 4)).sum(), 1)
    if me.rank == 1:  # here it would hang for ever
        wait_for(lines, "totals()")
    exchange.totals()
    exchange.finish()
    return [line for line in lines if "totals()" in line]


def test_one_rank_call_named_on_every_rank(run_ranks: Any) -> None:
    """Each rank says where all ranks are when one of them makes a collective call alone, also of
    one replica and over any transport.
    """
    first, second = run_ranks(alone, 1, 2)
    both = "Rank 0 has waited"
    out = "in no call of the exchange, after step 1."
    calls = f"s in totals(), after step 1; rank 1 is {out} All ranks"
    assert len(first) == len(second) == 1, (first, second)
    assert first[0].startswith(f"rank 0 of island0 is in totals(), after step 1. {both}")
    assert second[0].startswith(f"rank 1 of island0 is {out[:-1]}. {both}")
    assert calls in first[0] and calls in second[0]
    assert first[0].endswith("(docs/troubleshooting.md#one-rank-calls)")


@in_ranks(1)
def test_one_rank_call_silent_when_common(me: Any) -> None:
    """A call that all ranks make logs nothing, however long it takes. The ranks look here, not by
    the clock: when both are in the call, and when both have noted that.
    """
    patient(0.0, 600.0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    exchange, lines = fsdp_demo.attach(optimizer, "diloco", model=model), heard()
    look = exchange._calls._look
    with exchange.outer_parameters(model):
        for turn in ("in it", "noted", "seen"):
            me.meet(turn)
            look()
        assert lines == []
        me.meet("alone")
    if me.rank == 0:
        with exchange._calls.within("totals()"):
            look()
        assert "is in totals()" in lines[0]  # so it would, were the other one elsewhere
    me.meet("out")
    exchange.finish()


# ---- ranks that can never meet -----------------------------------------------------------------

HERE = [[3, 30], [4, 40]]  # the last two steps that were begun, with torch's collectives before


def place(steps: int, votes: int, collectives: int, marks: Any = HERE) -> sibling_watch.RankCall:
    return sibling_watch.RankCall("finish()", 4, 0.0, [steps, votes, collectives], marks)


@pytest.mark.parametrize(("one", "other", "parted"), [
    ((5, 1, 50), (6, 0, 50), True),  # finish() on one side, a further step on the other
    ((5, 1, 50), (5, 0, 51), True),  # a further forward or backward pass
    ((6, 0, 50), (5, 0, 51), True),  # in a step, the other waits in torch for its next one
    ((5, 1, 50), (5, 0, 50), False),  # evaluates, saves or compiles alone
    ((5, 0, 50), (7, 1, 70), False),  # slow in a step, where the other one has waited nowhere
    ((5, 1, 50), (5, 0, 51, [[4, 44]]), False),  # stages of a pipeline
])  # fmt: skip
def test_place_parted(one: Any, other: Any, parted: bool) -> None:
    """Ranks have parted where each is ahead of the other in something that all do in one order."""
    assert place(*one).parted(place(*other)) is place(*other).parted(place(*one)) is parted


def uneven(me: Any, how: str) -> None:
    """Rank 0 takes a step, makes a call or spends time that rank 1 does not."""
    logging.basicConfig(level=logging.INFO, force=True)
    patient(sibling_watch.PATIENCE, 0.3)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
    for step in range(4 if how == "batches" and me.rank == 0 else 3):
        if how == "call" and me.rank == 0 and step == 2:
            exchange.totals()
        train(optimizer, lambda t: model(torch.ones(1, 4)).sum(), 1)
    if how == "time" and me.rank == 0:
        time.sleep(5)
    exchange.finish()


@pytest.mark.parametrize(("how", "status", "says"), [
    ("batches", 78, "in finish(), after step 3; rank 0 is in no call of the exchange, after"),
    ("call", 78, "in totals(), after step 2; rank 1 is in no call of the exchange, after"),
    ("time", 0, ""),
])  # fmt: skip
def test_ranks_that_never_meet_end(run_ranks: Any, how: str, status: int, says: str) -> None:
    """After ISLAND_TIMEOUT all ranks of an uneven island end with 78 and the cure; one that is late
    is waited for.
    """
    env = {"ISLAND_COUNT": "1", "ISLAND_TIMEOUT": "2"}
    found = run_ranks(uneven, 1, 2, env=env, args=(how,), check=False, timeout=60)
    assert [f.status for f in found] == [status] * 2, [f.log for f in found]
    assert all(says in f.log for f in found)
    if status:
        cures = ("these never will", "out of `if rank == 0:`", "drop_last=True", "exchange.skip()")
        assert all(cure in f.log for cure in cures for f in found)
