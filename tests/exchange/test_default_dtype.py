"""torch's default dtype and device are the script's: no tensor of an exchange follows them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo

from ..support.inside import in_ranks
from ..support.two_layers import train

MAKES = {"empty", "zeros", "ones", "full", "tensor", "eye", "linspace", "rand", "randn"}
NUMBERS = {"arange", "randint", "randperm"}  # of integers: the default dtype is no matter
PACKAGES = (
    "channels", "checkpoint", "compression", "exchange", "hosts", "tools", "net", "store",
    "membership", "peers", "elastic", "rendezvous",
)  # fmt: skip
PRESETS = ("diloco", "demo", "sign_loco", "muloco", "desloc", "streaming_diloco", "stride", "full")


@pytest.mark.parametrize("package", PACKAGES)
def test_default_dtype_every_call_explicit(package: str) -> None:
    """Every call of the library that makes a tensor names its device and dtype."""
    missing = []
    for file in sorted((Path(fsdp_demo.__file__).parent / package).rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if not name.startswith("torch.") or name[6:] not in MAKES | NUMBERS:
                continue
            assert isinstance(call, ast.Call)
            wanted = {"device"} if name[6:] in NUMBERS else {"device", "dtype"}
            if lacks := wanted - {k.arg for k in call.keywords}:
                missing.append(f"{file.name}:{call.lineno} {name} lacks {sorted(lacks)}")
    assert missing == []


@in_ranks(2, 1)
def test_default_dtype_and_device_same_bits(me: Any) -> None:
    """Another default dtype or device changes no bit of a training. With bf16 as default fp32 work
    was done in bf16. A default device other than the model's ended the process in a kernel.
    """

    def trained(name: str, set_default: Callable[[], None]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 3))
        config = fsdp_demo.preset(name)
        if name not in ("demo", "stride", "full"):
            config = fsdp_demo.preset(name, period=2)
        optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr=1e-2)
        rows = [torch.randn(4, 64) + me.island for _ in range(4)]
        set_default()
        try:
            exchange = fsdp_demo.attach(optimizer, config, model=model)
            train(optimizer, lambda t: model(rows[t]).square().mean(), len(rows))
            with exchange.outer_parameters(model):
                exchange.metrics()
            exchange.state_dict()
            exchange.finish()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        return [p.detach() for p in model.parameters()]

    defaults: list[Callable[[], None]] = [
        lambda: torch.set_default_dtype(torch.bfloat16),
        lambda: torch.set_default_device("meta"),
    ]
    unlike = []
    for name in PRESETS:
        plain = trained(name, lambda: None)
        for i, set_default in enumerate(defaults):
            found = trained(name, set_default)
            if not all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)):
                unlike.append(f"{name} with default {i}")
    assert unlike == []
