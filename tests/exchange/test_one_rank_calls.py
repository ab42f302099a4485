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
from fsdp_demo.rendezvous import island


class Heard(logging.Handler):
    """The warnings of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("fsdp_demo").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 60
        while not any(text in line for line in self.lines):
            assert time.monotonic() < end, self.lines
            time.sleep(0.05)


def alone(me: Any) -> list[str]:
    patch = pytest.MonkeyPatch()
    patch.setattr(island, "PATIENCE", 0.5)
    patch.setattr(island, "BEAT", 0.1)
    heard, model = Heard(), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if me.rank == 1:  # here it would hang for ever
        heard.wait_for("totals()")
    exchange.totals()
    exchange.finish()
    return [line for line in heard.lines if "totals()" in line]


def test_one_rank_call_named_on_every_rank(run_ranks: Any) -> None:
    """Each rank says where all ranks are when one of them makes a collective call alone, also of
    one replica and over any transport.
    """
    first, second = run_ranks(alone, 1, 2)
    both = "Rank 0 has waited"
    calls = (
        "s in totals(), after step 1; rank 1 is in no call of the exchange, after step 1. All ranks"
    )
    assert len(first) == len(second) == 1, (first, second)
    assert first[0].startswith(f"rank 0 of island0 is in totals(), after step 1. {both}")
    assert second[0].startswith(
        f"rank 1 of island0 is in no call of the exchange, after step 1. {both}"
    )
    assert calls in first[0] and calls in second[0]
    assert first[0].endswith("(docs/troubleshooting.md#one-rank-calls)")


def test_one_rank_call_silent_when_common(run_ranks: Any) -> None:
    """A call that all ranks make logs nothing."""

    def together(me: Any) -> list[str]:
        patch = pytest.MonkeyPatch()
        patch.setattr(island, "PATIENCE", 0.3)
        patch.setattr(island, "BEAT", 0.05)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        exchange, heard = fsdp_demo.attach(optimizer, "diloco", model=model), Heard()
        with exchange.outer_parameters(model):
            time.sleep(1.0)
        exchange.finish()
        return heard.lines

    assert run_ranks(together, 1, 2) == [[], []]
