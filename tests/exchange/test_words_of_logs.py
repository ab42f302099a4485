"""What the log says: one of a thing is not several; an outer rate that is an inner one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.errors import counted
from fsdp_demo.rendezvous import run_status


def attached(preset: str, **changes: Any) -> Any:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return fsdp_demo.attach(optimizer, preset, model=model, batch=(4, 8), **changes), optimizer


def test_log_singular_and_plural(caplog: pytest.LogCaptureFixture) -> None:
    """The log uses the singular for one of a thing."""
    caplog.set_level(logging.INFO, "fsdp_demo")
    late = {"schedule.delay": 1, "applier.mix": 0.5}
    exchange, optimizer = attached("diloco", period=2, **late)
    for _ in range(3):
        optimizer.step()
    exchange.finish()
    assert "applied 1 step later" in caplog.text
    assert "4 x 8 accumulation x 1 rank x 1 island; 1 shard x 1 copy" in caplog.text
    for text in ("1 steps", "1 ranks", "1 islands", "1 exchanges", "1 shards", "1 copies"):
        assert f" {text}" not in caplog.text
    assert counted(1, "step") == "1 step" and counted(0, "copy", "copies") == "0 copies"


def test_log_outer_rate_like_inner(caplog: pytest.LogCaptureFixture) -> None:
    """The log warns of an outer rate that looks like an inner one."""
    attached("diloco", lr=1e-3)
    (said,) = [r.getMessage() for r in caplog.records if "outer rate" in r.getMessage()]
    assert "channel 'delta': the outer rate (applier.lr) is 0.001" in said
    assert "that of your optimizer (recipes: --lr), not lr of preset diloco" in said
    caplog.clear()
    for changes in ({}, {"lr": 0.05}):
        attached("diloco", **changes)
    attached("local_sgd")
    assert "outer rate" not in caplog.text


def test_log_values_sent_whole(caplog: pytest.LogCaptureFixture) -> None:
    """The log says how many values of sparse channels go whole."""
    caplog.set_level(logging.INFO, "fsdp_demo")
    model = torch.nn.Linear(64, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp_demo.attach(optimizer, "demo", model=model).detach()
    assert "100 of 6500 values of sparse channels go whole" in caplog.text
    caplog.clear()
    attached("diloco")
    assert "go whole" not in caplog.text


def test_log_run_status_counts_islands() -> None:
    """The status of a run counts the islands beside the epoch."""
    member = {"slot": 0, "life": 0, "delivered": 1, "heard": {}}
    found = {"run": "a", "attempt": "0", "state": "members", "epoch": 0, "members": [member]}
    head, line = run_status.text(found).splitlines()
    assert head == "run a, attempt 0: members; epoch 0, 1 island"
    assert line == "  island 0: 1 message delivered, heard nobody"
    two = run_status.text(found | {"members": [member, member | {"slot": 1, "delivered": 2}]})
    assert "epoch 0, 2 islands" in two and "island 1: 2 messages delivered" in two
