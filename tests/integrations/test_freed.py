"""A model is freed when its training has ended, under Accelerate and under the Trainer."""

from __future__ import annotations

from typing import Any

import torch

import fsdp_demo
from fsdp_demo.integrations.accelerate import accelerator

from ..support import trainer_script as script
from ..support.freed import left, references
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.trainer_script import before_ranks, one_line  # noqa: F401


@in_ranks(1, 2)
def test_accelerate_frees_the_model(me: Any) -> None:
    """Behind `finish` and `free_memory` nothing is left of what Accelerate has prepared."""

    def life() -> dict[str, Any]:
        made = accelerator(cpu=True)
        model = torch.nn.Linear(8, 8)
        model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
        for _ in range(3):
            made.backward(model(torch.randn(4, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        exchange.finish()
        made.free_memory()
        return references(model=model, optimizer=optimizer.optimizer, exchange=exchange)

    assert not left(life)


@in_ranks(2, 1)
def test_trainer_frees_the_model(me: Any) -> None:
    """Of two Trainers in one process nothing is left; one that goes on from what `save_only_model`
    has left says what begins anew.
    """
    said = heard()

    def life(steps: int, resume: bool) -> dict[str, Any]:
        plan = {"max_steps": steps, "save_only_model": True, "eval_strategy": "no"}
        line = one_line("diloco", period=2)
        trained = script.trained(me.folder / "out", line, resume=resume, **plan)
        trained.accelerator.free_memory()
        return references(
            model=trained.model,
            optimizer=trained.optimizer.optimizer,
            exchange=script.exchange_of(trained),
        )

    first, before = left(life, 4, False), list(said)
    found = first + left(life, 6, True)
    assert not found
    assert not any("begin anew" in text for text in before)
    assert any("checkpoint-4 holds no optimizer (save_only_model)" in text for text in said)
