"""Parts that the first release has saved (format 1): the same tensors, settings under other
names.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.checkpoint import load_exchange, save_exchange

from ..config.test_renamed import before


def attached(**changes: Any) -> tuple[torch.nn.Linear, torch.optim.Optimizer, fsdp_demo.Exchange]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, fsdp_demo.attach(optimizer, "diloco", model=model, period=2, **changes)


def steps(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def as_format_1(path: Path, **changes: Any) -> int:
    """Write a part as the first release did; returns the digest it had then."""
    part = json.loads(json.loads(path.read_text())["part"])
    config, digest = before(preset("diloco", period=2)), 12345
    head = {("lanes" if k == "active_copies" else k): v for k, v in part["head"].items()}
    part["head"] = {
        **head,
        "format": 1,
        "package": "0.1.0",
        "config": config,
        "digest": digest,
        **changes,
    }
    part["state"]["digest"] = digest
    text = json.dumps(part)
    path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "part": text}))
    return digest


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISLAND_COUNT", raising=False)


def test_a_run_goes_on_from_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, exchange = attached()
    steps(model, optimizer, 3)
    save_exchange(tmp_path, exchange)
    as_format_1(tmp_path / "rank0.json")
    saved = load_exchange(tmp_path)
    (head,) = saved.heads
    assert (
        head["digest"] == exchange.config.digest() and head["config"] == exchange.config.to_dict()
    )
    assert head["active_copies"] == 1 and "lanes" not in head and head["format"] == 1
    anchor = exchange.channels[0].anchor
    assert anchor is not None
    anchor = anchor.clone()
    exchange.detach()
    again = fsdp_demo.attach(optimizer, "diloco", model=model, period=2, step=3, state=saved)
    assert (
        again.step == 3
        and again.channels[0].anchor is not None
        and torch.equal(again.channels[0].anchor, anchor)
    )
    assert "another configuration" not in caplog.text
    steps(model, optimizer, 1)
    assert again.step == 4
    again.finish()


def test_one_that_cannot_be_read_names_its_writer(tmp_path: Path) -> None:
    _, _, exchange = attached()
    save_exchange(tmp_path, exchange)
    exchange.detach()
    as_format_1(
        tmp_path / "rank0.json",
        config={"preset": "diloco", "channels": [{"name": "delta", "never": 1}]},
    )
    with pytest.raises(
        ValueError,
        match=r"has format 1, and its settings cannot be read .*never.*: resume it with "
        r"fsdp_demo 0\.1\.0",
    ):
        load_exchange(tmp_path)
