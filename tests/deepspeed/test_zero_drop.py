"""DropCompute on ZeRO engines: the boundary of an accumulation, the divisor and the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_demo.exchange import drop

from ..support import trainer_script as script
from ..support import zero
from ..support.inside import in_ranks

N, CLIP = 4, 0.05


def by_hand(taken: list[int], ranks: list[int], exact: bool) -> list[torch.Tensor]:
    """A step of SGD on what an island has taken, clipped."""
    torch.manual_seed(7)
    model = zero.Model()
    for rank in ranks:
        for micro in taken:
            batch, targets = zero.batch(0, rank, micro)
            share = len(ranks) * (len(taken) if exact else N)
            (nn.functional.cross_entropy(model(batch), targets) / share).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    zero.sgd(model.parameters()).step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("stage, divisor", [("zero1", "exact"), ("zero3", "published")])
@in_ranks(2, 2)
def test_zero_drop_step_on_what_was_taken(me: Any, stage: str, divisor: str) -> None:
    """An island that leaves micro-batches out steps at its last one, on the mean over those taken
    or on their sum by the fixed divisor, clipped by the engine's norm."""
    now = [0.0]
    drop.clock = lambda: now[0]
    config = zero.settings(stage, clip=CLIP, accumulate=N)
    limit = {"limit": 2.5, "divisor": divisor}
    engine, exchange = zero.attached(
        config, "diloco", zero.sgd, period=100, drop=limit, inner_optimizers="as_is"
    )
    taken = []
    for micro in range(N):
        if exchange.time_is_up(micro, N):
            continue
        batch, targets = zero.batch(0, me.rank, micro)
        engine.backward(nn.functional.cross_entropy(engine(batch).float(), targets))
        engine.step()
        now[0] += 3.0 if me.rank == 2 else 0.1
        taken.append(micro)
    assert taken == ([0, N - 1] if me.island else [*range(N)])
    assert engine.global_steps == exchange.step == 1 and engine.micro_steps == N
    want = by_hand(taken, [2 * me.island, 2 * me.island + 1], divisor == "exact")
    for a, b in zip(zero.whole(engine).values(), want, strict=True):
        torch.testing.assert_close(a, b)
    exchange.detach()


@in_ranks(2, 2, timeout=120)
def test_zero_drop_trainer_as_without_an_engine(me: Any) -> None:
    """Under the Trainer an engine trains what DDP trains, with micro-batches left out: the same
    parameters, losses and tokens."""
    now, found = [0.0], []
    drop.clock = lambda: now[0]

    def forward(*_: Any) -> None:
        now[0] += 1.0 if me.island else 0.1

    for engine in ({}, {"deepspeed": zero.for_trainer("zero2")}):
        line = script.one_line("diloco", period=2, drop={"limit": 2.5, "divisor": "exact"})
        plan = {"gradient_accumulation_steps": 5, "max_steps": 2, "logging_steps": 1, **engine}
        with zero.another_run():
            made = script.trainer(
                me.folder / f"out{len(found)}",
                line,
                rows=160,
                eval_strategy="no",
                max_grad_norm=1.0,
                **plan,
            )
            made.model.register_forward_hook(forward)
            made.train()
        exchange = script.exchange_of(made)
        losses = [row["loss"] for row in made.state.log_history if "loss" in row]
        found.append((script.parameters(made), torch.tensor([*losses, exchange.tokens])))
        assert exchange.drop.dropped == 2 * me.island
    for plain, engine in zip(*found, strict=True):
        torch.testing.assert_close(plain, engine, rtol=1e-3, atol=1e-4)
